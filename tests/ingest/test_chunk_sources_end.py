"""What follows a JSON array is not lost in silence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tasks.errors import DataError
from tasks.ingest.sources import array_elements

ROWS = json.dumps([{"a": 1}, {"b": 2}])


def _read(text: str) -> list[bytes]:
    return [element for _, element in array_elements(Path("x.json"), io.BytesIO(text.encode()))]


@pytest.mark.parametrize("end", ["", "\n", " \n\t "])
def test_white_space_may_follow(end: str) -> None:
    assert [json.loads(row) for row in _read(ROWS + end)] == [{"a": 1}, {"b": 2}]
    assert _read("[]" + end) == []


@pytest.mark.parametrize("text", [ROWS + "\n" + ROWS, ROWS + " trailing {", "[]\n{}", "[] " * 2])
def test_more_rows_are_an_error(text: str) -> None:
    with pytest.raises(DataError, match=r"x\.json, line \d+: .*text follows the end of the array"):
        _read(text)


def test_text_far_behind_the_end_is_found() -> None:
    with pytest.raises(DataError, match="text follows"):
        _read(ROWS + " " * 9_000_000 + "{}")
