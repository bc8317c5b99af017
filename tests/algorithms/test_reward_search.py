"""Search of reward weights on pairs."""

from __future__ import annotations

import math
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.rewards import WeightTrial, best_trial, judge_weights, simplex_grid

# Margins of three pairs: 4, 1, -1 by `good`, -2, 3, 1 by `other`. Laid out chosen, rejected.
GOOD = torch.tensor([4.0, 0.0, 1.0, 0.0, 0.0, 1.0])
OTHER = torch.tensor([0.0, 2.0, 3.0, 0.0, 1.0, 0.0])


def test_grid_of_two_has_every_tenth() -> None:
    grid = list(simplex_grid(["a", "b"], 10))
    assert [point["a"] for point in grid] == [k / 10 for k in range(11)]
    assert [point["b"] for point in grid] == [(10 - k) / 10 for k in range(11)]


@given(n=st.integers(1, 4), resolution=st.integers(1, 6))
def test_grid_is_complete_and_adds_up(n: int, resolution: int) -> None:
    names = [f"c{k}" for k in range(n)]
    grid = list(simplex_grid(names, resolution))
    assert len(grid) == comb(resolution + n - 1, n - 1)
    assert len({tuple(point.values()) for point in grid}) == len(grid)
    assert all(math.isclose(sum(point.values()), 1.0) for point in grid)
    assert all(list(point) == names for point in grid)


def test_accuracy_is_that_of_the_weighted_sum() -> None:
    # 0.5 * (4 - 2) = 1, 0.5 * (1 + 3) = 2, 0.5 * (-1 + 1) = 0: two right and a tie.
    trial = judge_weights({"good": GOOD, "other": OTHER}, {"good": 0.5, "other": 0.5})
    assert trial.accuracy == pytest.approx(2.5 / 3)
    # Nothing is ranked wrong, so the loss falls to that of the tie: log 2 / 3.
    assert trial.log_loss == pytest.approx(math.log(2.0) / 3)


def test_log_loss_does_not_depend_on_the_scale() -> None:
    values = {"good": GOOD, "other": OTHER}
    one = judge_weights(values, {"good": 0.9, "other": 0.1})
    ten = judge_weights(values, {"good": 9.0, "other": 1.0})
    assert one.log_loss == pytest.approx(ten.log_loss, abs=1e-6)  # fp32 sums
    # Margins 3.4, 1.2, -0.8: at the best temperature better than at any other of a fine row.
    margins = torch.tensor([3.4, 1.2, -0.8], dtype=torch.float64)
    row = [float(torch.nn.functional.softplus(-margins / (k / 50)).mean()) for k in range(1, 1000)]
    assert one.log_loss == pytest.approx(min(row), abs=1e-4)
    assert one.log_loss <= min(row) + 1e-6  # the margins above are rounded, those inside are fp32


def test_best_trial_breaks_ties_by_accuracy_and_order() -> None:
    first = WeightTrial({"a": 1.0}, 0.5, 0.7)
    assert best_trial([WeightTrial({"a": 0.0}, 0.6, 0.9), first, first]) is first
    better = WeightTrial({"a": 0.5}, 0.5, 0.8)
    assert best_trial([first, better]) is better
