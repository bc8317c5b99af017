"""Importance weights: caps, signs, effective sample size."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import importance as imp
from tasks.errors import TrainingError


def test_cap_is_from_above_only_and_ess_is_raw_and_capped() -> None:
    log_ratio = torch.tensor([0.0, 0.693147, 2.302585, -1.386294])
    mask = torch.ones(4, 1, dtype=torch.bool)
    weights = imp.truncated_importance_weights(log_ratio, torch.ones(4, 1), mask, cap=2.0)
    torch.testing.assert_close(weights[:, 0], torch.tensor([1.0, 2.0, 2.0, 0.25]))
    # raw 1, 2, 10, 0.25: 13.25^2 / 105.0625; capped: 5.25^2 / 9.0625
    assert imp.effective_sample_size(log_ratio.exp()).item() == pytest.approx(1.671029, abs=1e-5)
    assert imp.effective_sample_size(weights[:, 0]).item() == pytest.approx(3.041379, abs=1e-5)
    metrics = imp.weight_metrics(log_ratio, weights, mask, cap=2.0)
    assert metrics["above_cap_sum"].item() / metrics["n_weights"].item() == 0.25
    raw = imp.effective_sample_size_from_sums(
        metrics["raw_weight_sum"], metrics["raw_weight_sq_sum"]
    )
    assert raw.item() == pytest.approx(1.671029, abs=1e-5)
    assert metrics["weight_max"].item() == pytest.approx(2.0)


def test_raw_sums_take_the_clamped_ratio() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    metrics = imp.weight_metrics(torch.tensor([25.0]), torch.ones(1, 1), mask, cap=2.0)
    assert metrics["raw_weight_sum"].item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_negative_advantages_are_capped_at_one() -> None:
    log_ratio = torch.log(torch.tensor([[4.0, 4.0, 4.0, 0.5, 0.5]]))
    advantages = torch.tensor([[1.0, -1.0, 0.0, 1.0, -1.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    weights = imp.truncated_importance_weights(log_ratio, advantages, mask, cap=3.0)
    torch.testing.assert_close(weights, torch.tensor([[3.0, 1.0, 3.0, 0.5, 0.5]]))


def test_levels_of_the_ratio() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    behavior = torch.tensor([[-1.5, -1.0, math.inf], [-2.0, -2.0, -2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # differences: 0.5, -1 and 1, 1, 1
    whole = imp.sequence_log_ratio(logprobs, behavior, mask, level="sequence")
    assert whole.tolist() == [-0.5, 3.0]
    geometric = imp.sequence_log_ratio(logprobs, behavior, mask, level="geometric")
    assert geometric.tolist() == [-0.25, 1.0]
    token = imp.sequence_log_ratio(logprobs, behavior, mask, level="token")
    assert token.tolist() == [[0.5, -1.0, 0.0], [1.0, 1.0, 1.0]]


def test_sequence_weights_cover_every_real_token_of_the_row() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[1.0, -1.0, math.nan], [-1.0, -1.0, -1.0]])
    weights = imp.truncated_importance_weights(torch.tensor([1.0, -1.0]), advantages, mask, cap=2.0)
    low = math.exp(-1.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.0], [low, low, low]]))


def test_weights_never_overflow_and_carry_no_gradient() -> None:
    log_ratio = torch.tensor([1e4, -1e4])
    mask = torch.ones(2, 1, dtype=torch.bool)
    weights = imp.truncated_importance_weights(log_ratio, torch.ones(2, 1), mask, cap=5.0)
    torch.testing.assert_close(weights[:, 0], torch.tensor([5.0, 0.0]))
    assert not weights.requires_grad


def test_an_infinite_log_ratio_does_not_hide_behind_the_cap() -> None:
    mask, ones = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)
    log_ratio = imp.sequence_log_ratio(ones, -math.inf * ones, mask, level="sequence")
    with pytest.raises(TrainingError, match="behaviour policy holds 6"):
        imp.truncated_importance_weights(log_ratio, ones, mask, cap=2.0)


def test_ess_is_between_one_and_n() -> None:
    torch.manual_seed(0)
    for n in (1, 2, 7, 50):
        weights = torch.rand(n) + 0.01
        ess = imp.effective_sample_size(weights).item()
        assert 1.0 - 1e-5 <= ess <= n + 1e-4
    assert imp.effective_sample_size(torch.full((8,), 0.3)).item() == pytest.approx(8.0)
    assert imp.effective_sample_size(torch.zeros(3)).item() == 0.0


@pytest.mark.parametrize("level", ["sequence", "geometric", "token"])
def test_weight_metrics_add_up_over_micro_batches(level: imp.RatioLevel) -> None:
    torch.manual_seed(1)
    mask = torch.rand(6, 4) < 0.6
    mask[0] = False
    logprobs, behavior, advantages = torch.randn(3, 6, 4)
    log_ratio = imp.sequence_log_ratio(logprobs, behavior, mask, level=level)
    weights = imp.truncated_importance_weights(log_ratio, advantages, mask, cap=2.0)
    whole = imp.weight_metrics(log_ratio, weights, mask, cap=2.0)
    parts = [
        imp.weight_metrics(log_ratio[s], weights[s], mask[s], cap=2.0)
        for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    for name, value in whole.items():
        merged = torch.stack([p[name] for p in parts])
        total = merged.max() if name.endswith("_max") else merged.sum()
        torch.testing.assert_close(total, value, atol=1e-4, rtol=1e-5)
