"""Raw JSON-Lines files, plain or gzip, read line by line; other formats are refused by name."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

from tasks.errors import DataError, MissingInputError

MAX_LINE_BYTES: Final = 16 * 2**20
GZIP_ERRORS: Final = (EOFError, zlib.error, gzip.BadGzipFile)
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_FORMATS: Final = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a Git LFS pointer, not the data",
}
_FIX: Final = "give a .jsonl or .jsonl.gz file with one JSON object per line"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of a source.

    Args:
        number: 1-based.
        text: without the line end.
        bytes_read: position in the file on disk, compressed where it is.
    """

    number: int
    text: bytes
    bytes_read: int


def check_source(path: Path) -> int:
    """Return the size of a source in bytes.

    Raises:
        MissingInputError: not there, or not a file.
        DataError: the file is empty.
    """
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "does not exist"
        raise MissingInputError(f"Source {path} {state}", "a file of JSON Lines", _FIX)
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"Source {path} is empty", "at least one row", _FIX)
    return size


def read_lines(path: Path) -> Iterator[SourceLine]:
    """Yield the lines that are not blank, one in memory at a time.

    Gzip is recognised by content, not by name.

    Raises:
        MissingInputError: as in `check_source`, or the file may not be read.
        DataError: empty, of another format, torn or corrupt gzip, or a line over 16 MiB.
    """
    check_source(path)
    number = 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            handle = open_text(path, raw, stack)
            lines = iter(lambda: handle.readline(MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                _check_line(path, number, line)
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    yield SourceLine(number, text.rstrip(b"\r\n"), raw.tell())
    except GZIP_ERRORS as error:
        raise corrupt_gzip(path, number, error) from error
    except PermissionError as error:
        raise unreadable(path, error) from error


def corrupt_gzip(path: Path, line: int, error: BaseException, near_byte: int = 0) -> DataError:
    """Return the error of a gzip file that does not unpack."""
    where = f", near byte {near_byte} of the file" if near_byte else ""
    return DataError(
        f"{path} is corrupt gzip after line {line}{where}: {error}",
        "a complete gzip file",
        "download or copy the file again",
    )


def unreadable(path: Path, error: OSError) -> MissingInputError:
    """Return the error of a file that may not be read."""
    return MissingInputError(
        f"{path} may not be read: {error.strerror}", "a readable file", "change its permissions"
    )


def open_text(path: Path, raw: BufferedReader, stack: ExitStack) -> BufferedReader | gzip.GzipFile:
    """Return a handle of the text, unpacked; gzip is recognised by content, not by name.

    Raises:
        DataError: another format.
    """
    head = raw.peek(32)
    handle: BufferedReader | gzip.GzipFile = raw
    if head.startswith(_GZIP_MAGIC):
        handle = gzip.GzipFile(fileobj=raw)
        stack.callback(handle.close)
        head = handle.peek(32)
    elif path.suffix == ".gz":
        raise DataError(f"{path} is named .gz but is not gzip", "a gzip file", _FIX)
    _check_head(path, head)
    return handle


def _check_head(path: Path, head: bytes) -> None:
    for magic, what in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}", "JSON Lines", _FIX)
    if b"\x00" in head:
        raise DataError(f"{path} is a binary file", "JSON Lines", _FIX)


def _check_line(path: Path, number: int, line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{path}, line {number} is longer than {MAX_LINE_BYTES // 2**20} MiB",
            "one JSON object per line",
            _FIX,
        )
