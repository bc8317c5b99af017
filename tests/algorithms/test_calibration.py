"""Calibration against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.calibration import (
    expected_calibration_error,
    fit_temperature,
    pair_accuracy,
    pair_log_loss,
    reliability_bins,
)
from tasks.algorithms.statistics import Column, wilson_interval
from tasks.errors import TrainingError

SharedCases = Callable[[str], list[dict[str, Any]]]
LOG_3 = math.log(3.0)


def _margins(*values: float) -> Column:
    return np.array(values, np.float64)


def test_tie_is_half_a_success() -> None:
    # 2 right, 1 tie, 1 wrong: 2.5 of 4.
    found = pair_accuracy(_margins(1.0, 0.2, 0.0, -3.0))
    assert (found.value, found.n_ties, found.n) == (0.625, 1, 4)
    assert (found.low, found.high) == wilson_interval(2.5, 4)


def test_known_accuracy_and_loss(shared_cases: SharedCases) -> None:
    cases = {case["id"]: case for case in shared_cases("reward_model")}
    scores = torch.tensor(cases["RM-09"]["input"]["scores_in_batch_order"])
    margins = (scores[0::2] - scores[1::2]).numpy()
    expected = cases["RM-09"]["expected"]
    assert pair_accuracy(margins).value == pytest.approx(expected["accuracy"], abs=1e-6)
    assert pair_log_loss(margins) == pytest.approx(expected["loss"], abs=1e-6)

    steep = cases["RM-01"]
    losses = [pair_log_loss([value]) for value in steep["input"]["margin"]]
    assert losses == pytest.approx(steep["expected"]["bt_loss"], rel=1e-5)

    close = cases["RM-05"]
    fp32 = torch.tensor([close["input"]["chosen"], close["input"]["rejected"]])
    margin = (fp32[:1] - fp32[1:]).numpy()
    assert pair_accuracy(margin).value == close["expected"]["fp32_correct"]
    assert pair_log_loss(margin) == pytest.approx(close["expected"]["fp32_loss"], abs=1e-5)
    # In bf16 the same pair is a tie, which is reported as one.
    bf16 = fp32.bfloat16()
    assert pair_accuracy((bf16[:1] - bf16[1:]).float().numpy())[0::3] == (0.5, 1)


def test_log_loss_with_temperature() -> None:
    # sigmoid(log 3) = 3/4, sigmoid(2 log 3 / 2) = 3/4.
    assert pair_log_loss(_margins(LOG_3)) == pytest.approx(-math.log(0.75))
    assert pair_log_loss(_margins(2 * LOG_3), temperature=2.0) == pytest.approx(-math.log(0.75))


def test_reliability_bins_and_error_by_hand() -> None:
    # Confidences: 0.78 (right), 0.78 (wrong, folded), 0.97 (right), 0.5 (tie).
    apart = math.log(0.78 / 0.22)
    margins = [apart, -apart, math.log(0.97 / 0.03), 0.0]
    found = [
        (b.low, b.high, b.count, round(b.confidence, 6), b.accuracy)
        for b in reliability_bins(margins)
    ]
    assert found == [
        (0.5, 0.55, 1, 0.5, 0.5),
        (0.75, 0.8, 2, 0.78, 0.5),
        (0.95, 1.0, 1, 0.97, 1.0),
    ]
    # (1 * |0.5 - 0.5| + 2 * |0.5 - 0.78| + 1 * |1 - 0.97|) / 4 = (0.56 + 0.03) / 4.
    assert expected_calibration_error(margins) == pytest.approx(0.1475)


def test_tie_is_in_the_first_bin_and_certainty_in_the_last() -> None:
    bins = reliability_bins([0.0, 1000.0])
    assert [(b.low, b.high, b.count) for b in bins] == [(0.5, 0.55, 1), (0.95, 1.0, 1)]
    assert expected_calibration_error([-1000.0]) == 1.0


def test_calibrated_margins_have_no_error() -> None:
    # 3 of 4 right at a confidence of 3/4.
    margins = _margins(LOG_3, LOG_3, LOG_3, -LOG_3)
    assert expected_calibration_error(margins) == pytest.approx(0.0, abs=1e-12)
    assert fit_temperature(margins).value == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 0.5, 7.0, 1e8])
def test_temperature_in_closed_form(scale: float) -> None:
    # 3 of 4 right with margins +-s: the loss is least where sigmoid(s / T) = 3/4, T = s / log 3.
    found = fit_temperature(scale * _margins(1.0, 1.0, 1.0, -1.0))
    assert found.outcome == "fitted"
    assert found.value == pytest.approx(scale / LOG_3, rel=1e-9)


@given(st.lists(st.floats(-20.0, 20.0), min_size=2, max_size=30))
def test_no_other_temperature_is_better(values: list[float]) -> None:
    margins = _margins(*values)
    found = fit_temperature(margins)
    assert math.isfinite(found.value) and found.value > 0.0
    if found.outcome == "fitted":
        loss = pair_log_loss(margins, found.value)
        for factor in (0.5, 0.99, 1.01, 2.0):
            assert loss <= pair_log_loss(margins, found.value * factor) + 1e-12


def test_one_small_error_among_large_margins() -> None:
    # Not separable, so there is a best temperature, though a tiny one: loss falls until the wrong
    # pair costs as much as the right one still gains.
    found = fit_temperature(_margins(10.0, -1e-9))
    assert found.outcome == "fitted"
    assert 0.0 < found.value < 1.0
    assert pair_log_loss(_margins(10.0, -1e-9), found.value) == pytest.approx(0.5 * math.log(2.0))


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ((1.0, 2.0), "all_right"),
        ((1.0, 0.0), "all_right"),
        ((0.0, 0.0), "all_tied"),
        ((-1.0, -2.0), "not_better_than_chance"),
        ((1.0, -1.0), "not_better_than_chance"),
        ((1.0, -3.0), "not_better_than_chance"),
    ],
)
def test_margins_without_a_best_temperature(values: tuple[float, ...], outcome: str) -> None:
    found = fit_temperature(_margins(*values))
    assert found.outcome == outcome
    if outcome == "not_better_than_chance":
        assert pair_log_loss(_margins(*values), found.value) == pytest.approx(math.log(2), abs=1e-5)
    else:
        assert found.value == 1.0


def test_margins_that_are_not_finite_are_refused() -> None:
    with pytest.raises(TrainingError, match="not finite"):
        fit_temperature([1.0, math.nan])
