"""Raw files: lines, line numbers, and refusals that name the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tasks.data import source
from tasks.data.source import read_lines
from tasks.errors import DataError, MissingInputError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf{1}\r\n\n  \n{2}\n{3}"
    plain = write(tmp_path / "a.jsonl", content)
    packed = write(tmp_path / "a.jsonl.gz", gzip.compress(content, mtime=0))
    misnamed = write(tmp_path / "b.jsonl", gzip.compress(content, mtime=0))
    for path in (plain, packed, misnamed):
        lines = list(read_lines(path))
        assert [(line.number, line.text) for line in lines] == [
            (1, b"{1}"),
            (4, b"{2}"),
            (5, b"{3}"),
        ]
        assert lines[-1].bytes_read == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"PAR1....", "is a Parquet file"),
        ("a.jsonl", b"\xff\xfe{\x00", "UTF-16"),
        ("a.jsonl", b"ab\x00cd", "binary"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        ("a.jsonl.gz", b'{"chosen": 1}\n', "not gzip"),
        ("a.jsonl.gz", gzip.compress(b"PAR1", mtime=0), "is a Parquet file"),
        ("a.jsonl.gz", gzip.compress(b"x\n" * 9, mtime=0)[:-9], "corrupt gzip after line"),
        (
            "a.jsonl.gz",
            gzip.compress(b"x\n" * 9, mtime=0)[:-8] + b"\x00" * 8,
            "corrupt gzip after line",
        ),
        ("a.jsonl.gz", b"\x1f\x8b broken", "corrupt gzip after line 0"),
    ],
)
def test_files_that_are_no_json_lines(
    tmp_path: Path, name: str, content: bytes, found: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=found) as caught:
        list(read_lines(path))
    assert str(path) in str(caught.value)
    assert caught.value.fix


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="does not exist"):
        list(read_lines(tmp_path / "absent.jsonl"))
    with pytest.raises(MissingInputError, match="is a directory"):
        list(read_lines(tmp_path))


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 2**20)
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b"{}\n" + b"x" * 2**21, mtime=0))
    with pytest.raises(DataError, match=r"line 2 is longer than 1 MiB"):
        list(read_lines(path))
