"""The demo's question file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tasks.demo.oracle import is_good
from tasks.demo.vocabulary import KINDS
from tasks.demo.world import demo_questions, write_questions
from tasks.evaluate.questions import read_questions


def test_both_turns_have_a_good_reference() -> None:
    for question in demo_questions():
        first, second = question["turns"]
        opening = [{"role": "user", "content": first}]
        assert is_good(opening, question["reference"][0])
        for answer in (question["reference"][0], "an answer of no world"):
            dialogue = [
                *opening,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": second},
            ]
            assert is_good(dialogue, question["reference"][1])
            assert not is_good(dialogue, "an answer of no world")


def test_the_two_turns_want_different_answers() -> None:
    for question in demo_questions():
        first, second = question["turns"]
        assert first != second
        if question["category"] != "harmful":
            answer = question["reference"][0]
            dialogue = [
                {"role": "user", "content": first},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": second},
            ]
            assert not is_good(dialogue, answer)


def test_every_category_is_there() -> None:
    questions = demo_questions()
    counts = Counter(question["category"] for question in questions)
    assert len(questions) == 24
    assert len({question["question_id"] for question in questions}) == 24
    assert set(counts) == {kind.name for kind in KINDS} - {"greeting"}
    assert min(counts.values()) >= 2


def test_the_file_is_read_as_a_question_file(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "question.jsonl")
    read = read_questions(path)
    assert [question.turns for question in read] == [
        tuple(question["turns"]) for question in demo_questions()
    ]
    assert [question.reference for question in read] == [
        tuple(question["reference"]) for question in demo_questions()
    ]
    assert write_questions(tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
