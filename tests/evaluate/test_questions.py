"""Questions and answers in FastChat's formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError, MissingInputError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.questions import (
    ModelAnswer,
    Question,
    answers_to,
    read_answers,
    read_questions,
    temperature_for,
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
    referenced = Counter(q.category for q in questions if q.reference is not None)
    assert sum(referenced.values()) == 39
    assert (referenced["math"], referenced["reasoning"], referenced["coding"]) == (10, 10, 9)


def test_references_are_the_right_ones(shared_data: Path, shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-06")
    questions = read_questions(shared_data / "mt_bench" / "question.jsonl")
    references = {question.question_id: question.reference for question in questions}
    brothers, triangle = references[104], references[111]
    assert brothers is not None
    assert [case["expected"]["q104"][turn] in brothers[turn] for turn in (0, 1)] == [True, True]
    assert triangle is not None
    assert triangle[0].startswith(f"Area is {case['expected']['q111'][0]}")
    assert triangle[1].startswith("5pi")


def test_temperatures_by_category(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-08")
    table = EvaluateConfig().category_temperatures
    found = [temperature_for(name, table, 1.0) for name in case["input"]["categories"]]
    assert found == case["expected"]["temperature"]
    assert temperature_for("refusal", table, 0.3) == 0.3


def test_questions_survive_writing(tmp_path: Path) -> None:
    questions = [
        Question(2, "writing", ("a\nb", "ä \u2028"), None),
        Question(1, "math", ("a", "b"), ("x", "y")),
    ]
    write_questions(tmp_path / "q.jsonl", questions)
    assert read_questions(tmp_path / "q.jsonl") == questions


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"turns": None}, "turns is a NoneType"),
        ({"turns": ["a"]}, "1 turns"),
        ({"turns": ["a", "b", "c"]}, "3 turns"),
        ({"turns": ["a", 2]}, r"turns\[1\] is a int"),
        ({"question_id": "2"}, "question_id is a str"),
        ({"question_id": True}, "question_id is a bool"),
        ({"category": 5}, "category is a int"),
        ({"reference": "x"}, "reference is a str"),
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


def test_last_answer_to_a_question_counts(tmp_path: Path) -> None:
    path = tmp_path / "student.jsonl"
    write_answers(path, [ModelAnswer(81, "s", ("old", "old"), 1.0)])
    first = path.read_text()
    write_answers(path, [ModelAnswer(81, "s", ("new", "new"), 2.0)])
    path.write_text(first + path.read_text())
    assert [answer.turns for answer in read_answers(path)] == [("new", "new")]


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
    with pytest.raises(DataError, match="choices is empty"):
        read_answers(path)
    with pytest.raises(DataError, match="cannot hold"):
        write_objects(path, [{"score": float("nan")}])
    with pytest.raises(DataError, match="cannot hold"):
        write_objects(path, [{"text": "\ud800"}])
