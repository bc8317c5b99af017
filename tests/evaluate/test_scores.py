"""Scores: failed judgments, repeated judgments, ties, and a published table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError
from tasks.evaluate.judgments import (
    UNBOUNDED_METHOD,
    Score,
    WinRate,
    compare_scores,
    latest_scores,
    read_scores,
    summarize_scores,
    write_scores,
)

SharedCases = Callable[[str], list[dict[str, Any]]]

JUDGE = ("reward_model", UNBOUNDED_METHOD)
PUBLISHED = {
    "mamba_0_5_dpo_ep3": (7.7375, 6.8875, 7.3125),
    "mamba_0_5_dpo_ep1": (7.59375, 6.65, 7.121875),
    "mamba_0_75_dpo_ep1": (7.41875, 6.65, 7.034375),
    "mamba_0_75_dpo_ep3": (7.19375, 5.96875, 6.58125),
    "mamba_0_875_dpo_ep1": (6.95625, 5.81875, 6.3875),
    "mamba_0_875_dpo_ep3": (6.93125, 5.80625, 6.36875),
}


def score_of(question_id: int, turn: int, value: float | None, tstamp: float = 0.0) -> Score:
    return Score(question_id, "m", turn, value, JUDGE, tstamp=tstamp)


def test_published_scores_of_six_models(shared_data: Path) -> None:
    path = shared_data / "mt_bench" / "judgments_mamba" / "gpt-4_single.jsonl"
    scores = latest_scores(read_scores(path))
    for model, (first, second, mean) in PUBLISHED.items():
        summary = summarize_scores(score for score in scores if score.model_id == model)
        assert summary.turn_means == pytest.approx({1: first, 2: second})
        assert summary.mean == pytest.approx(mean)
        assert (summary.valid, summary.failed, summary.coverage) == (160, 0, 1.0)


def test_failed_judgments_enter_no_mean(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-02")
    scores = []
    for turn in (1, 2):
        given = case["input"][f"turn{turn}"]
        # Any values with the given sum and number have the right mean.
        scores += [score_of(q, turn, given["sum"] / given["valid"]) for q in range(given["valid"])]
        scores += [score_of(99, turn, None) for _ in range(given["failed"])]
    summary = summarize_scores(scores)
    right = case["expected"]
    assert summary.turn_means[1] == pytest.approx(right["turn1"], abs=1e-6)
    assert summary.turn_means[2] == pytest.approx(right["turn2"], abs=1e-6)
    assert summary.mean == pytest.approx(right["average_pooled"], abs=1e-6)
    assert summary.coverage == pytest.approx(right["coverage"])


def test_summary_of_nothing_has_no_mean() -> None:
    summary = summarize_scores([score_of(1, 1, None)])
    assert (summary.mean, summary.turn_means, summary.coverage) == (None, {}, 0.0)
    assert summarize_scores([]).coverage == 0.0


def test_latest_judgment_wins() -> None:
    first, later, other = score_of(1, 1, 3.0, 10.0), score_of(1, 1, 9.0, 20.0), score_of(1, 2, 5.0)
    assert latest_scores([first, later, other]) == [later, other]
    assert latest_scores([later, first]) == [later]
    tie = score_of(1, 1, 4.0, 20.0)
    assert latest_scores([later, tie]) == [tie]


def test_scores_survive_writing_and_a_failure_is_minus_one(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    scores = [score_of(1, 1, 0.25, 5.5), score_of(1, 2, None), score_of(2, 1, -3.5)]
    write_scores(path, reversed(scores))
    assert read_scores(path) == scores
    assert path.read_text().count('"score": -1,') == 1


def test_bad_judgments_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    head = '{"question_id": 1, "model": "m", "turn": 1, '
    for tail, found in (
        ('"judge": ["a", "b"], "score": "9"}', "score is '9'"),
        ('"judge": ["a", "b"], "score": NaN}', "score is nan"),
        ('"judge": ["a", "b"], "score": 1, "tstamp": "x"}', "tstamp is 'x'"),
        (f'"judge": ["a", "b"], "score": {"9" * 400}}}', "score is 9"),
        ('"judge": ["a"], "score": 1}', "judge is"),
        ('"judge": ["a", "b"], "score": 1, "turn": 3}', "turn is 3.*1 or 2"),
    ):
        path.write_text(head + tail)
        with pytest.raises(DataError, match=rf"s\.jsonl, line 1: {found}"):
            read_scores(path)


def test_ties_are_half_wins(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-04")
    rates = [WinRate(*case["input"][side]) for side in "AB"]
    assert [rate.strict for rate in rates] == pytest.approx(case["expected"]["win_rate"])
    assert [rate.adjusted for rate in rates] == pytest.approx(case["expected"]["win_rate_adjusted"])


def test_comparison_counts_each_item_once() -> None:
    assert compare_scores([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 4.0, -1.0]) == WinRate(2, 1, 1)
    for n_ours, n_theirs in ((1, 0), (0, 0)):
        with pytest.raises(DataError, match="cannot be compared"):
            compare_scores([1.0] * n_ours, [1.0] * n_theirs)
