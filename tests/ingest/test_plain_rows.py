"""Whole chunks at a time: the same as line by line."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.quarantine import default_actions
from tasks.data.source import InputFile
from tasks.ingest.chunks import ParseJob, ParseOptions, Span, pairs_file, read_spill
from tasks.ingest.parser import ChunkParser
from tasks.ingest.plain_rows import two_columns, two_texts

H, A = "\n\nHuman:", "\n\nAssistant:"
GOOD = b'{"chosen": "a", "rejected": "b"}'
pieces = st.sampled_from(
    [
        H, A, "\n\n", "\n", "Human:", "Assistant:", "q", "A", " ", "\u2028", "\u2019", "\ufb01",
        "é", "😀", "\\", '"', "}", "{", "\t", "\x00", "\x7f",
    ]
)  # fmt: skip
texts = st.lists(pieces, max_size=9).map("".join)
exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)


@given(
    st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=6),
    st.sampled_from([b"", b"\n"]),
)
def test_lines_of_two_texts_are_read_at_once(rows: list[tuple[str, str, bool]], end: bytes) -> None:
    lines = [
        json.dumps({"chosen": chosen, "rejected": rejected}, ensure_ascii=ascii_only).encode()
        for chosen, rejected, ascii_only in rows
    ]
    text = b"\n".join(lines) + end
    found = two_columns(text)
    assert found is not None
    assert found.chosen.to_pylist() == [row[0] for row in rows]
    assert found.rejected.to_pylist() == [row[1] for row in rows]
    assert [found.line(text, number) for number in range(len(lines))] == lines


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" ",
        b"{}",
        b"null",
        b" " + GOOD,
        GOOD + b"\r",
        GOOD + b" ",
        GOOD[:-1],
        GOOD + GOOD,
        GOOD + b", " + GOOD,
        b'{"chosen": "a"}\n{"rejected": "b"}',
        b'{"chosen": "a",\n"rejected": "b"}',
        b'{"chosen": {"x": "}\n{"}, "rejected": "b"}',
        b'{"chosen": "}\n{", "rejected": "b"}',
        b'{"chosen": "a", "rejected": null}',
        b'{"chosen": "a", "rejected": 1}',
        b'{"chosen": "a", "rejected": "b", "margin": 1}',
        b'{"chosen": "a", "chosen": "b", "rejected": "c"}',
        b'{"chosen": "\xff", "rejected": "b"}',
        b'{"chosen": "\xed\xa0\x80", "rejected": "b"}',
        b'{"chosen": "\\ud800", "rejected": "b"}',
        b'{"chosen": "\\udc00", "rejected": "b"}',
        b'{"chosen": "\\u12", "rejected": "b"}',
        b'{"chosen": "\x01", "rejected": "b"}',
        b'[{"chosen": "a", "rejected": "b"}]',
    ],
)
def test_anything_else_is_left_to_the_reader_of_single_lines(line: bytes) -> None:
    for before, after in ((b"", b""), (GOOD + b"\n", b""), (GOOD + b"\n", b"\n" + GOOD)):
        text = before + line + after
        # A last line break alone is no blank line.
        if (line, after) != (b"", b"") or not before:
            assert two_columns(text) is None


@given(st.lists(st.binary(max_size=12) | st.sampled_from([GOOD, b"}", b"{"]), max_size=4))
def test_whatever_is_read_at_once_is_what_each_line_says(lines: list[bytes]) -> None:
    text = b"\n".join(lines)
    found = two_columns(text)
    if found is not None:
        assert list(zip(found.chosen.to_pylist(), found.rejected.to_pylist(), strict=True)) == [
            two_texts(line) for line in text.removesuffix(b"\n").split(b"\n")
        ]


def _parse(path: Path, directory: Path, is_usual: bool) -> tuple[object, object, int, int]:
    directory.mkdir(exist_ok=True)
    parser = ChunkParser(ParseOptions({**default_actions(), "empty_response": "keep"}))
    assert parser._is_usual
    parser._is_usual = is_usual
    span = Span(0, path.stat().st_size)
    result = parser.parse(ParseJob(0, 0, InputFile(str(path), "s", "s", "s"), span, directory, 0))
    pairs = read_spill(pairs_file(directory, 0)) if result.n_pairs else None
    return result.records.tolist(), pairs, result.n_left_out, result.n_lines


@given(
    st.lists(
        st.builds(
            lambda turns, one, other: {
                side: "".join(f"{H} {q}{A} {a}" for q, a in turns) + f"{H}x{A} {last}"
                for side, last in (("chosen", one), ("rejected", other))
            },
            exchanges,
            texts,
            texts,
        )
        | st.fixed_dictionaries({"chosen": texts, "rejected": texts}),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
)
def test_both_ways_through_the_parser_give_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], end: bytes
) -> None:
    directory = tmp_path_factory.getbasetemp() / "plain"
    directory.mkdir(exist_ok=True)
    path = directory / "s.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + end for row in rows))
    assert _parse(path, directory / "fast", True) == _parse(path, directory / "general", False)
