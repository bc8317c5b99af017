"""Questions and answers in FastChat's formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.config.shared import GenerationConfig
from tasks.errors import DataError, MissingInputError
from tasks.evaluate import questions as module
from tasks.evaluate.answers import temperature_of
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.questions import (
    ModelAnswer,
    Question,
    answers_to,
    download_questions,
    read_answers,
    read_questions,
    with_references,
    write_answers,
    write_objects,
    write_questions,
)

SharedCases = Callable[[str], list[dict[str, Any]]]

GOOD = {"question_id": 1, "category": "math", "turns": ["a", "b"], "reference": ["x", "y"]}


def test_real_questions(shared_data: Path) -> None:
    questions = read_questions(shared_data / "mt_bench" / "question.jsonl")
    assert [question.question_id for question in questions] == list(range(81, 161))
    assert set(Counter(question.category for question in questions).values()) == {10}
    referenced = Counter(q.category for q in questions if q.reference)
    assert sum(referenced.values()) == 39
    assert (referenced["math"], referenced["reasoning"], referenced["coding"]) == (10, 10, 9)


def test_temperatures_by_category(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-08")
    cfg = EvaluateConfig(generation=GenerationConfig(temperature=0.3))
    assert [temperature_of(name, cfg) for name in case["input"]["categories"]] == (
        case["expected"]["temperature"]
    )
    assert temperature_of("refusal", cfg) == 0.3


def test_questions_survive_writing(tmp_path: Path) -> None:
    questions = [
        Question(2, "writing", ("a\nb", "ä \u2028")),
        Question(1, "math", ("a", "b"), ("x", "y")),
    ]
    write_questions(tmp_path / "q.jsonl", questions)
    assert read_questions(tmp_path / "q.jsonl") == questions


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"turns": None}, "turns is None"),
        ({"turns": ["a"]}, "no field 'turns.1'"),
        ({"turns": ["a", "b", "c"]}, r"turns is \['a', 'b', 'c'\]"),
        ({"turns": ["a", 2]}, r"turns.1 is 2"),
        ({"question_id": "2"}, "question_id is '2'"),
        ({"question_id": True}, "question_id is True"),
        ({"category": 5}, "category is 5"),
        ({"reference": "x"}, "reference is 'x'"),
        ({"question_id": 1}, "question_id 1 is there a second time"),
    ],
)
def test_bad_question_names_file_and_line(
    tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in (GOOD, {**GOOD, "question_id": 2} | change))
    )
    with pytest.raises(DataError, match=rf"question\.jsonl, line 2: {found}"):
        read_questions(path)


def test_files_that_hold_no_questions(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    for content, found in (
        ('{"question_id": 1,', r"line 1 is not JSON"),
        ("[1]", r"line 1 holds a list"),
        ('{"question_id": 1, "category": "a"}', r"line 1: no field 'turns'"),
        ("\n\n", "holds no questions"),
        ("", "is empty"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=found):
            read_questions(path)
    with pytest.raises(MissingInputError):
        read_questions(tmp_path / "absent.jsonl")


def test_answers_in_fastchat_format(tmp_path: Path) -> None:
    path = tmp_path / "student.jsonl"
    answers = [
        ModelAnswer(82, "student", ("c", "d"), 2.5),
        ModelAnswer(81, "student", ("a", "ü"), 1.5),
    ]
    write_answers(path, answers)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["question_id"] for row in rows] == [81, 82]
    assert rows[0] == {
        "question_id": 81,
        "answer_id": answers[1].answer_id,
        "model_id": "student",
        "choices": [{"index": 0, "turns": ["a", "ü"]}],
        "tstamp": 1.5,
    }
    assert read_answers(path) == answers[::-1]
    assert answers[0].answer_id != answers[1].answer_id


def test_answers_to_other_questions_and_two_to_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    questions = [Question(q, "math", ("a", "b")) for q in (1, 2)]
    answers = [ModelAnswer(q, "m", ("x", "y"), 0.0) for q in (2, 1, 3)]
    write_answers(path, answers)
    assert [answer.question_id for answer in answers_to(path, questions)] == [1, 2]
    write_answers(path, answers[2:])
    with pytest.raises(DataError, match=r"no answer to the questions \[1, 2\]"):
        answers_to(path, questions)
    write_answers(path, [*answers, answers[0]])
    with pytest.raises(DataError, match=r"line 3: m answers question 2 a second time"):
        answers_to(path, questions)
    write_answers(path, [answers[0], ModelAnswer(1, "n", ("x", "y"), 0.0)])
    with pytest.raises(DataError, match=r"answers of \['m', 'n'\]"):
        answers_to(path, questions)


def test_truncation_is_told_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = [ModelAnswer(1, "m", ("x", "y"), 0.0, truncated=(False, True))]
    write_answers(path, answers)
    assert read_answers(path) == answers and '"truncated": [false, true]' in path.read_text()


def test_reference_that_names_other_numbers_is_a_contradiction() -> None:
    question = Question(1, "math", ("a", "b"), ("Area is 3", "five"))
    for other, is_bad in (
        (("It is 3.", "5 of them"), False),
        (("It is 0.", "5 of them"), True),
        (("3", "4"), True),
    ):
        (kept,), found = with_references([question], {1: other, 9: ("x", "y")})
        assert kept == question and found == ([1] if is_bad else [])
    bare = Question(2, "math", ("a", "b"))
    assert with_references([bare], {2: ("x", "y")})[0][0].reference == ("x", "y")


def test_bad_answers_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question_id": 1, "model_id": "m", "choices": []}')
    with pytest.raises(DataError, match=r"no field 'choices\.0\.turns'"):
        read_answers(path)
    with pytest.raises(DataError, match="cannot hold"):
        write_objects(path, [{"score": float("nan")}])
    with pytest.raises(DataError, match="cannot hold"):
        write_objects(path, [{"text": "\ud800"}])


# Questions of the hub.

HUB_ROW = {"prompt_id": 4711, "category": "math", "prompt": ["a", "b"], "reference": ["x", "y"]}


@pytest.fixture
def hub_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of the hub, which tests cannot reach."""
    rows = [HUB_ROW]
    monkeypatch.setattr(module, "resolve_revision", lambda name, revision: "c0ffee")

    def stream(hub: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert hub == {"path": "o/n", "revision": "c0ffee", "split": "train"}
        return iter(rows)

    monkeypatch.setattr(module, "stream_rows", stream)
    return rows


def test_hub_rows_of_both_namings(hub_rows: list[dict[str, Any]], tmp_path: Path) -> None:
    other = {"question_id": 5, "category": "stem", "turns": ["c", "d"], "reference": None}
    bare = {**HUB_ROW, "prompt_id": 6, "reference": []}
    empty = {**HUB_ROW, "prompt_id": 7, "reference": ["", ""]}
    hub_rows += [other, bare, empty]
    assert read_questions(download_questions("o/n", tmp_path)) == [
        Question(4711, "math", ("a", "b"), ("x", "y")),
        Question(5, "stem", ("c", "d")),
        Question(6, "math", ("a", "b")),
        Question(7, "math", ("a", "b")),
    ]


def test_bad_hub_rows_are_named(hub_rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for row, found in (
        ({**HUB_ROW, "prompt": ["a"]}, "o/n, row 1: no field 'turns.1'"),
        ({**HUB_ROW, "prompt_id": None}, "o/n, row 1: question_id is None"),
        ({**HUB_ROW, "reference": [1]}, "reference.0 is 1"),
    ):
        hub_rows[:] = [row]
        with pytest.raises(DataError, match=found):
            download_questions("o/n", tmp_path)
    hub_rows.clear()
    with pytest.raises(DataError, match="holds no questions"):
        download_questions("o/n", tmp_path)
    assert not list(tmp_path.iterdir())


def test_hub_file_of_one_commit_is_made_once(
    hub_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = download_questions("o/n", tmp_path)
    hub_rows.clear()
    assert download_questions("o/n", tmp_path) == path and len(read_questions(path)) == 1
