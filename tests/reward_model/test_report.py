"""The reward model's report against values worked out by hand, and on odd sets of pairs."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.data.hh import Message, Pair
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError, TrainingError
from tasks.reward_model.report import (
    ScoredPair,
    accuracy_bins,
    render_reward_report,
    reward_report,
    scored_pairs,
    summarize_pairs,
    write_reward_report,
)

SharedCases = Callable[[str], list[dict[str, Any]]]
LOG_3 = math.log(3.0)
PLOTS = {
    "overview.png",
    "reliability.png",
    "margins.png",
    "scores.png",
    "accuracy_by_margin.png",
    "accuracy_by_length_difference.png",
}


def _pair(margin: float, extra_tokens: int = 0, subset: str = "a", **changes: Any) -> ScoredPair:
    name = f"{subset}:{margin}:{extra_tokens}"
    made: dict[str, Any] = {
        "pair_id": name,
        "subset": subset,
        "chosen_score": margin,
        "rejected_score": 0.0,
    }
    made |= {"chosen_tokens": 10 + extra_tokens, "rejected_tokens": 10}
    return ScoredPair(**(made | changes))


# Validation: 3 of 4 right at +-2, so sigmoid(2 / T) = 3/4 and T = 2 / log 3 = 1.820478.
VALIDATION = [_pair(2.0), _pair(2.0), _pair(2.0), _pair(-2.0)]
# Test: 2 right, 1 tie, 1 wrong.
TEST = [_pair(2.0, 3, "a"), _pair(4.0, -5, "a"), _pair(0.0, 0, "b"), _pair(-2.0, 7, "b")]


def test_overall_figures_by_hand() -> None:
    report = reward_report(VALIDATION, TEST)
    overall = report.overall
    assert report.temperature.value == pytest.approx(2.0 / LOG_3, rel=1e-9)
    assert (overall.n, overall.n_ties, overall.accuracy) == (4, 1, 0.625)
    # Chosen is longer twice, shorter once, and once the lengths are equal: 2.5 of 4.
    assert (overall.longer_wins, overall.shorter_wins) == (0.625, 0.375)
    # log(1 + e^-2) = 0.126928, log(1 + e^-4) = 0.018150, log 2 = 0.693147, log(1 + e^2) = 2.126928.
    assert overall.log_loss == pytest.approx(
        (0.126928 + 0.018150 + 0.693147 + 2.126928) / 4, abs=1e-6
    )
    # At T the probabilities are 3/4, 9/10, 1/2 and 1/4, so the product of the chosen ones is
    # 27/320.
    assert overall.log_loss_calibrated == pytest.approx(-math.log(27 / 320) / 4)
    # Raw confidences: 0.8808 (one right, one wrong), 0.9820 (right), 0.5 (tie):
    # (2 |0.5 - 0.8808| + |1 - 0.9820| + 0) / 4 = (0.7616 + 0.0180) / 4 = 0.1949.
    assert overall.ece == pytest.approx(0.194895, abs=1e-5)
    # (2 |0.5 - 0.75| + |1 - 0.9| + 0) / 4.
    assert overall.ece_calibrated == pytest.approx(0.15)


def test_spread_of_the_scores_by_hand() -> None:
    chosen = reward_report(VALIDATION, TEST).overall.chosen
    # 2, 4, 0, -2: mean 1, squared deviations 1 + 9 + 1 + 9 over 3.
    assert (chosen["mean"], chosen["std"]) == pytest.approx((1.0, math.sqrt(20 / 3)))
    assert (chosen["minimum"], chosen["maximum"]) == (-2.0, 4.0)
    # Sorted -2, 0, 2, 4; p25 is at place 0.75: -2 + 0.75 * 2; p95 at 2.85: 2 + 0.85 * 2.
    assert chosen["quantiles"]["p25"] == pytest.approx(-0.5)
    assert chosen["quantiles"]["p50"] == pytest.approx(1.0)
    assert chosen["quantiles"]["p95"] == pytest.approx(3.7)


def test_subsets_and_metrics() -> None:
    report = reward_report(VALIDATION, TEST)
    assert {name: (s.n, s.accuracy) for name, s in report.subsets.items()} == {
        "a": (2, 1.0),
        "b": (2, 0.25),
    }
    metrics = report.metrics()
    assert metrics["test_accuracy"] == 0.625
    assert metrics["test_accuracy.b"] == 0.25
    assert metrics["test_tie_share"] == 0.25
    assert metrics["baseline_longer_wins"] == 0.625
    assert metrics["test_accuracy_low"] < 0.625 < metrics["test_accuracy_high"]
    # With one subset its figures are those of all.
    assert "test_accuracy.a" not in reward_report(VALIDATION, TEST[:2]).metrics()


def test_known_accuracy_and_loss(shared_cases: SharedCases) -> None:
    (case,) = [case for case in shared_cases("reward_model") if case["id"] == "RM-09"]
    scores = case["input"]["scores_in_batch_order"]
    pairs = [
        _pair(0.0, chosen_score=chosen, rejected_score=rejected)
        for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)
    ]
    summary = summarize_pairs(pairs, temperature=1.0)
    assert summary.accuracy == pytest.approx(case["expected"]["accuracy"], abs=1e-6)
    assert summary.log_loss == pytest.approx(case["expected"]["loss"], abs=1e-6)


def test_bins_of_equal_size() -> None:
    # 10 values, 5 bins of 2; the pairs of the two lowest values are wrong.
    values = np.arange(10.0)
    margins = np.array([-1.0] * 2 + [1.0] * 8)
    found = [(b.low, b.high, b.n, b.mean, b.accuracy) for b in accuracy_bins(values, margins)]
    assert found[0] == (0.0, 1.0, 2, 0.5, 0.0)
    assert found[-1] == (8.0, 9.0, 2, 8.5, 1.0)
    assert len(found) == 5


def test_equal_values_stay_in_one_bin() -> None:
    # The cuts are at the sorted values 1, 3, 4 and 6, which are 0, 0, 0 and 1.
    values = np.array([0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    bins = accuracy_bins(values, np.ones(8))
    assert [(b.low, b.high, b.n) for b in bins] == [(0.0, 0.0, 6), (1.0, 2.0, 2)]


def test_worst_pairs_come_first() -> None:
    report = reward_report(VALIDATION, [*TEST, *[_pair(3.0)] * 20])
    assert [pair.margin for pair in report.worst] == [-2.0, 0.0, 2.0, *[3.0] * 17]


def test_scores_are_put_beside_their_pairs() -> None:
    prompt = (Message("user", "first"), Message("assistant", "hm"), Message("user", "last"))
    pairs = [
        Pair(name, "p", "all", prompt, f"{name} good", f"{name} bad", "f.jsonl", line)
        for line, name in enumerate(("x", "y"), start=1)
    ]
    rendered = [RenderedPair("y", "p", (1,), (2, 3, 9), (4, 9), "all")]
    scores = torch.tensor([1.5]), torch.tensor([-0.5]), torch.tensor([0.25])
    (found,) = scored_pairs(pairs, rendered, *scores)
    assert (found.margin, found.extra_tokens, found.disagreement) == (2.0, 1, 0.25)
    assert (found.last_turn, found.chosen, found.source_line) == ("last", "y good", 2)


def _all_numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _all_numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _all_numbers(item)]
    return [value] if isinstance(value, int | float) else []


ODD_SETS = [
    [_pair(1.0)],
    [_pair(-1.0)],
    [_pair(0.0)],
    [_pair(0.0), _pair(0.0)],
    [_pair(1.0), _pair(2.0), _pair(3.0)],
    [_pair(-3.0), _pair(-2.0)],
    [_pair(1e30), _pair(-1e30)],
    [_pair(1e-30), _pair(-1e-30), _pair(1e-30)],
    [_pair(0.5, chosen_tokens=0, rejected_tokens=0)] * 7,
    [_pair(1.0, disagreement=0.0), _pair(-1.0, disagreement=2.0)],
    [_pair(1.0, disagreement=0.0), _pair(-1.0)],
]


@pytest.mark.parametrize("pairs", ODD_SETS)
def test_odd_sets_of_pairs_give_finite_numbers(pairs: Sequence[ScoredPair]) -> None:
    for validation, test in ((pairs, pairs), (pairs, TEST), (VALIDATION, pairs)):
        report = reward_report(validation, test)
        assert all(map(math.isfinite, report.metrics().values()))
        assert all(map(math.isfinite, _all_numbers(report.as_json())))
        assert "nan" not in render_reward_report(report)


@pytest.mark.parametrize("pairs", [ODD_SETS[0], ODD_SETS[3], ODD_SETS[6]])
def test_odd_sets_of_pairs_can_be_drawn(pairs: Sequence[ScoredPair], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_reward_report(reward_report(pairs, pairs), tmp_path)
    assert {file.name for file in files} >= PLOTS


def test_disagreement_is_binned_where_all_pairs_have_it() -> None:
    apart = [_pair(1.0, disagreement=0.1), _pair(-1.0, disagreement=0.9)]
    bins = summarize_pairs(apart, 1.0).by_disagreement
    assert [(b.low, b.accuracy) for b in bins] == [(0.1, 1.0), (0.9, 0.0)]
    assert "disagreement of members" in render_reward_report(reward_report(apart, apart))
    assert summarize_pairs([*apart, _pair(1.0)], 1.0).by_disagreement == []


def test_what_is_written(tmp_path: Path) -> None:
    files = write_reward_report(reward_report(VALIDATION, TEST), tmp_path / "report")
    assert {file.name for file in files} == {"report.json", "report.md", *PLOTS}
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "report" / "report.json").read_text())
    assert record["overall"]["accuracy"] == 0.625
    assert record["pairs"] == {"validation": 4, "test": 4}
    assert record["temperature"]["outcome"] == "fitted"
    assert [pair["margin"] for pair in record["worst_pairs"]] == [-2.0, 0.0, 2.0, 4.0]


def test_text_of_the_data_stays_text() -> None:
    nasty = "![x](http://a.example/p.png) <script>\n```\n# Not a heading\n````\n\x1b[31m\ud800"
    pair = _pair(-9.0, subset="a|b", pair_id="*p*", chosen=nasty, source_file="f.jsonl")
    lines = render_reward_report(reward_report(VALIDATION, [pair])).splitlines()
    assert "# Not a heading" in lines
    # The fence is longer than every run of backticks inside, so the text cannot end it.
    opened = lines.index("`````text")
    assert opened < lines.index("# Not a heading") < lines.index("`````", opened)
    assert not any("\x1b" in line or "\ud800" in line for line in lines)
    assert any("f.jsonl:0" in line for line in lines)
    (heading,) = [line for line in lines if line.startswith("### 1.")]
    assert heading == r"### 1. Pair \*p\*"


@pytest.mark.parametrize("outcome", ["all_right", "not_better_than_chance", "all_tied"])
def test_page_says_why_there_is_no_temperature(outcome: str) -> None:
    margin = {"all_right": 1.0, "not_better_than_chance": -1.0, "all_tied": 0.0}[outcome]
    report = reward_report([_pair(margin)], TEST)
    assert report.temperature.outcome == outcome
    (line,) = [x for x in render_reward_report(report).splitlines() if x.startswith("Temperature ")]
    assert len(line) > 40


def test_splits_that_cannot_be_reported_are_refused() -> None:
    with pytest.raises(DataError, match="The test split has no scored pairs"):
        reward_report(VALIDATION, [])
    with pytest.raises(DataError, match="The validation split has no scored pairs"):
        reward_report([], TEST)
    with pytest.raises(TrainingError, match="not finite"):
        reward_report(VALIDATION, [_pair(math.nan)])
