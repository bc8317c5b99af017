"""Baselines and the variance that they remove."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.advantages import (
    control_variate,
    fitted_baseline,
    leave_one_out_baseline,
    rloo_advantages,
)
from tasks.errors import DataError


def test_variance_removed_by_hand() -> None:
    # raw 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5; less 1, 1, 3, 3 it is 0, 1, 0, 3:
    # mean 1, variance (1 + 0 + 1 + 4) / 4 = 1.5
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    rest, removed = control_variate(rewards, torch.tensor([1.0, 1.0, 3.0, 3.0]))
    assert rest.tolist() == [0.0, 1.0, 0.0, 3.0]
    assert removed == pytest.approx(1.0 - 1.5 / 3.5)
    # A baseline that points the wrong way adds variance: twice the reward, 4 times the variance.
    assert control_variate(rewards, -rewards)[1] == pytest.approx(-3.0)
    assert control_variate(torch.full((3,), 0.1), torch.arange(3.0))[1] == 0.0


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 9.0])
    groups = torch.tensor([7, 7, 7, 3, 8])
    # Group 7: (2 + 6) / 2, (1 + 6) / 2, (1 + 2) / 2. Alone: (23 - 5) / 4 and (23 - 9) / 4.
    baseline = leave_one_out_baseline(rewards, groups)
    assert baseline.tolist() == [4.0, 3.5, 1.5, 4.5, 3.5]


def test_leave_one_out_is_rloo() -> None:
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.7])
    groups = torch.tensor([0, 1, 0, 1, 0])
    rest, _ = control_variate(rewards, leave_one_out_baseline(rewards, groups))
    torch.testing.assert_close(rest, rloo_advantages(rewards, groups))


def test_fitted_baseline_by_hand() -> None:
    # Groups 1 and 3 are one half, 2 and 4 the other. In the first the reward is 2 * length + 1, in
    # the second -length: each is predicted by the line of the other.
    groups = torch.tensor([1, 2, 3, 4])
    length = torch.tensor([1.0, 1.0, 3.0, 5.0])
    rewards = torch.tensor([3.0, -1.0, 7.0, -5.0])
    baseline = fitted_baseline(rewards, {"length": length}, groups)
    torch.testing.assert_close(baseline, torch.tensor([-1.0, 3.0, -3.0, 11.0]).double())


def test_fitted_baseline_removes_what_the_features_explain() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 400
    groups = torch.arange(n) // 2
    length = torch.randint(5, 400, (n,), generator=generator).double()
    value = torch.randn(n, generator=generator)
    noise = torch.randn(n, generator=generator)
    # Variances: 4 by length (standardised below), 1 by value, 1 noise: 5 / 6 can go.
    rewards = 2.0 * (length - length.mean()) / length.std() + value + noise
    features = {"length": length, "value": value}
    _, removed = control_variate(rewards, fitted_baseline(rewards, features, groups))
    assert removed == pytest.approx(5.0 / 6.0, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), row=st.integers(0, 23))
def test_no_response_meets_a_baseline_that_saw_its_own_reward(seed: int, row: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(24) // 3
    rewards = torch.randn(24, generator=generator, dtype=torch.float64)
    features = {"f": torch.randn(24, generator=generator, dtype=torch.float64)}
    changed = rewards.clone()
    changed[row] += 100.0
    for of in (
        leave_one_out_baseline,
        lambda r, g: fitted_baseline(r, features, g),
    ):
        before, after = of(rewards, groups), of(changed, groups)
        assert float(after[row]) == pytest.approx(float(before[row]), abs=1e-9)
    fitted = fitted_baseline(changed, features, groups) - fitted_baseline(rewards, features, groups)
    # Nor does one of its group, nor one of the same half.
    same_half = groups % 2 == groups[row] % 2
    assert float(fitted[same_half].abs().max()) < 1e-9
    order = torch.randperm(24, generator=generator)
    moved = fitted_baseline(rewards[order], {"f": features["f"][order]}, groups[order])
    torch.testing.assert_close(moved, fitted_baseline(rewards, features, groups)[order])


def test_features_that_do_not_determine_a_fit_are_refused() -> None:
    rewards, groups = torch.randn(12), torch.arange(12) // 2
    length = torch.arange(12.0) ** 2
    with pytest.raises(DataError, match=r"rank 2 with the constant; constant: \['same'\]"):
        fitted_baseline(rewards, {"length": length, "same": torch.full((12,), 0.1)}, groups)
    with pytest.raises(DataError, match="rank 2 with the constant"):
        fitted_baseline(rewards, {"length": length, "again": 3.0 * length + 1.0}, groups)
    # Two responses in a half determine one slope, not two.
    with pytest.raises(DataError, match="of 2 responses have rank 2"):
        fitted_baseline(
            rewards[:4], {"a": length[:4], "b": torch.tensor([1.0, 0.0, 3.0, 5.0])}, groups[:4]
        )
    with pytest.raises(DataError, match="one prompt"):
        fitted_baseline(rewards, {"length": length}, torch.zeros(12, dtype=torch.long))


def test_scales_of_features_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, groups = torch.randn(20, generator=generator), torch.arange(20) // 2
    small = torch.randn(20, generator=generator, dtype=torch.float64)
    other = torch.randn(20, generator=generator, dtype=torch.float64)
    plain = fitted_baseline(rewards, {"a": small, "b": other}, groups)
    scaled = fitted_baseline(rewards, {"a": 1e9 * small + 1e9, "b": 1e-9 * other}, groups)
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-6)
