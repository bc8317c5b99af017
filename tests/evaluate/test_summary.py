"""What an evaluation found, in numbers."""

from __future__ import annotations

import math

import pytest

from tasks.evaluate.judgments import PairJudgment, Score
from tasks.evaluate.questions import ModelAnswer, Question
from tasks.evaluate.report import (
    HeldOut,
    differences_section,
    failure_counts,
    flat_metrics,
    held_out_section,
    pairwise_section,
    questions_section,
    subset_rates,
)

JUDGE = ("j", "single-v1")
QUESTIONS = [Question(1, "math", ("a", "b")), Question(2, "stem", ("a", "b"))]


def _score(model: str, question: int, value: float | None, turn: int = 1) -> Score:
    failure = "" if value is not None else "no rating"
    return Score(question, model, turn, value, JUDGE, failure=failure)


def _answers(model: str, cut: bool = False) -> list[ModelAnswer]:
    return [ModelAnswer(q, model, ("x", "y"), 0.0, (cut, False)) for q in (1, 2)]


def test_judge_that_failed_everywhere_leaves_no_number() -> None:
    scores = [_score("base", 1, 7.0), _score("student", 1, None), _score("student", 2, None)]
    answers = {"base": _answers("base"), "student": _answers("student", cut=True)}
    section = questions_section(QUESTIONS, answers, scores)
    student = section["student"]
    assert (student["mean"], student["interval"], student["coverage"]) == (None, None, 0.0)
    assert student["categories"] == {"math": None, "stem": None}
    assert (student["truncated"], student["failed"]) == (2, 2)
    differences = differences_section(["base", "student"], scores)
    assert differences == {}
    report = {"questions": section, "differences": differences, "held_out": {}}
    metrics = flat_metrics({**report, "gate": {"verdict": "failed"}})
    assert "student_question_score" not in metrics
    assert metrics["student_judgment_coverage"] == 0.0 and metrics["gate_passed"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert failure_counts(scores) == {"no rating": 2}


def test_difference_from_the_base_on_what_both_have() -> None:
    scores = [
        *[_score("base", 1, 7.0), _score("base", 2, 4.0)],
        *[_score("student", 1, 8.0), _score("student", 2, None)],
    ]
    section = differences_section(["base", "student"], scores)
    # Question 1 alone: 8 - 7.
    assert section == {"student": {"difference": 1.0, "interval": [1.0, 1.0], "n": 1}}


def test_pairs_and_their_repeats() -> None:
    verdicts = [("A", "B"), ("A", "B"), ("A", "A")]
    games = [
        PairJudgment(1, "student", "base", 1, first, swapped, JUDGE, repeat=repeat)  # type: ignore[arg-type]
        for repeat, (first, swapped) in enumerate(verdicts)
    ]
    section = pairwise_section(["base", "student"], games)["student"]
    assert (section["wins"], section["ties"], section["losses"]) == (2, 1, 0)
    assert section["win_rate_adjusted"] == pytest.approx(2.5 / 3)
    # Of three pairs of repeats one is win and win.
    assert section["agreement"]["equal"] == pytest.approx(1 / 3)
    assert pairwise_section(["student"], [])["student"]["win_rate"] is None


def test_win_rate_on_prompts_that_both_have_a_score_for() -> None:
    heard = {
        "base": HeldOut(["a", "bb", "c"], [0.0, None, 1.0]),
        "policy": HeldOut(["a", "b", "ccc"], [0.5, 3.0, 1.0]),
    }
    section = held_out_section(heard)
    # A win and a tie; the second has no score of the base.
    assert section["policy"]["win_rate_against_base"] == 0.75
    assert section["policy"]["mean_score"] == 1.5 and section["base"]["mean_score"] == 0.5
    assert (section["base"]["scored"], section["policy"]["mean_characters"]) == (2, 5 / 3)
    nothing = {"base": HeldOut(["a"], [None])}
    assert held_out_section(nothing)["base"]["mean_score"] is None


def test_rates_by_subset_and_component() -> None:
    subsets = ["helpful-base", "helpful-online", "harmless-base", "other"]
    scores = [1.0, -1.0, 2.0, -5.0]
    assert subset_rates(HeldOut(["x"] * 4, scores, {}, subsets)) == {
        "helpfulness_rate": 0.5,
        "harmlessness_rate": 1.0,
    }
    components = {"helpful": [1.0, 1.0, -1.0, 0.0], "harmless": [0.0, 0.0, -2.0, 0.0]}
    assert subset_rates(HeldOut(["x"] * 4, scores, components, subsets)) == {
        "helpfulness_rate": 1.0,
        "harmlessness_rate": 0.0,
    }
    assert subset_rates(HeldOut(["x"], [1.0], {}, ["demo"])) == {}
