"""Templates of the judge: the right one per category and turn, and what stands in it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError, MissingInputError
from tasks.evaluate.config import JudgingConfig
from tasks.evaluate.prompts import JudgePrompts, load_judge_prompts, template_name
from tasks.evaluate.questions import Question, read_questions, read_references, with_references

SharedCases = Callable[[str], list[dict[str, Any]]]
CATEGORIES = JudgingConfig().reference_categories
QUESTION = Question(1, "math", ("Q-1", "Q-2"), ("R-1", "R-2"))


@pytest.fixture
def real(shared_data: Path) -> JudgePrompts:
    return load_judge_prompts(str(shared_data / "mt_bench" / "judge_prompts.jsonl"))


def test_template_by_category_and_turn(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-07")
    for category, expected in case["expected"]["template"].items():
        found = [template_name("single", turn, category in CATEGORIES) for turn in (1, 2)]
        assert found == expected


def test_templates_of_the_real_questions(
    shared_data: Path, shared_cases: SharedCases, real: JudgePrompts
) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-07")
    folder = shared_data / "mt_bench"
    questions, _ = with_references(
        read_questions(folder / "question.jsonl"),
        read_references(folder / "reference_answer_gpt-4.jsonl"),
    )
    counts = Counter(
        real.select("single", turn, q.category in CATEGORIES and bool(q.reference)).name
        for q in questions
        for turn in (1, 2)
    )
    assert counts == case["expected"]["counts_of_160"]


def test_own_references_win_and_contradictions_are_named(
    shared_data: Path, shared_cases: SharedCases
) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-06")
    folder = shared_data / "mt_bench"
    questions, contradicted = with_references(
        read_questions(folder / "question.jsonl"),
        read_references(folder / "reference_answer_gpt-4.jsonl"),
    )
    by_id = {question.question_id: question.reference for question in questions}
    assert {104, 111} <= set(contradicted)
    # And few others: not every other wording is a contradiction.
    assert len(contradicted) <= 8
    assert [case["expected"]["q104"][turn] in by_id[104][turn] for turn in (0, 1)] == [True, True]
    assert by_id[111] == ("Area is 3", "5pi")
    # The one coding question without a reference of its own gets the separate one.
    assert "jokeDisplay" in " ".join(by_id[123])


@pytest.mark.parametrize("source", ["own", "real"])
def test_every_text_stands_in_its_template(source: str, real: JudgePrompts) -> None:
    prompts = load_judge_prompts("own") if source == "own" else real
    assert len(prompts.by_name) == 8
    answers = [("A-1", "A-2"), ("B-1", "B-2")]
    for kind in ("single", "pair"):
        for turn in (1, 2):
            for with_reference in (False, True):
                prompt = prompts.select(kind, turn, with_reference)
                messages = prompt.messages(turn, QUESTION, answers[: 1 if kind == "single" else 2])
                text = messages[-1].content
                wanted = {"Q-1", "A-1"} | ({"B-1"} if kind == "pair" else set())
                if with_reference:
                    wanted.add("R-1")
                if turn == 2:
                    wanted |= {word.replace("-1", "-2") for word in wanted}
                known = {f"{letter}-{turn}" for letter in "QRAB" for turn in (1, 2)}
                assert {word for word in known if word in text} == wanted
                assert "{" not in text


def test_what_a_model_wrote_is_never_a_template() -> None:
    prompt = load_judge_prompts("own").select("single", 1, False)
    messages = prompt.messages(1, QUESTION, [("{question} {x} {}", "")])
    assert "{question} {x} {}" in messages[-1].content


def test_fingerprint_tells_wordings_apart(tmp_path: Path, real: JudgePrompts) -> None:
    own = load_judge_prompts("own")
    assert own.fingerprint == load_judge_prompts("own").fingerprint != real.fingerprint
    row = {"name": "single-v1", "system_prompt": "s", "prompt_template": "{question} {answer}"}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))
    first = load_judge_prompts(str(path)).fingerprint
    path.write_text(json.dumps(row | {"system_prompt": "t"}))
    assert load_judge_prompts(str(path)).fingerprint != first


def test_bad_template_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = {"name": "single-v1", "system_prompt": "s", "prompt_template": "{question} {answer}"}
    for change, found in (
        ({"name": "other"}, "holds no judge prompt"),
        ({"prompt_template": "{question} {answer_b}"}, r"unknown fields \['answer_b'\]"),
        ({"prompt_template": "{question"}, "line 1: prompt_template"),
        ({"prompt_template": None}, "prompt_template is None"),
    ):
        path.write_text(json.dumps(row | change))
        with pytest.raises(DataError, match=found):
            load_judge_prompts(str(path))
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match="lack pair-v2"):
        load_judge_prompts(str(path)).select("pair", 1, False)
    with pytest.raises(MissingInputError):
        load_judge_prompts(str(tmp_path / "absent.jsonl"))
