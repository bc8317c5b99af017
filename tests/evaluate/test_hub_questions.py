"""Questions as the hub has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError
from tasks.evaluate import questions as hub_questions
from tasks.evaluate.questions import Question, download_questions, questions_of, read_questions

ROW = {"prompt_id": 4711, "category": "math", "prompt": ["a", "b"], "reference": ["x", "y"]}


def test_rows_of_both_namings() -> None:
    other = {"question_id": 5, "category": "stem", "turns": ["c", "d"], "reference": None}
    bare = {**ROW, "prompt_id": 6, "reference": []}
    assert list(questions_of("o/n", [ROW, other, bare])) == [
        Question(4711, "math", ("a", "b"), ("x", "y")),
        Question(5, "stem", ("c", "d")),
        Question(6, "math", ("a", "b")),
    ]


def test_bad_rows_are_named() -> None:
    for row, found in (
        ({**ROW, "prompt": ["a"]}, "o/n, row 1: 1 turns"),
        ({**ROW, "prompt_id": None}, "o/n, row 1: question_id is a NoneType"),
        ({**ROW, "reference": [1]}, r"reference\[0\] is a int"),
    ):
        with pytest.raises(DataError, match=found):
            list(questions_of("o/n", [row]))
    with pytest.raises(DataError, match="holds no questions"):
        list(questions_of("o/n", []))


def test_file_of_one_commit_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def rows(hub: Any) -> Iterator[dict[str, Any]]:
        asked.append(hub)
        yield ROW

    # The hub cannot be reached by tests.
    monkeypatch.setattr(hub_questions, "resolve_revision", lambda name, revision: "c0ffee")
    monkeypatch.setattr(hub_questions, "stream_rows", rows)
    path = download_questions("o/n", tmp_path)
    assert download_questions("o/n", tmp_path) == path
    assert asked == [{"path": "o/n", "revision": "c0ffee", "split": "train"}]
    assert read_questions(path) == [Question(4711, "math", ("a", "b"), ("x", "y"))]
