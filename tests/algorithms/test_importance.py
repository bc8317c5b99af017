"""Importance weights: caps, signs, effective sample size."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import importance as imp
from tasks.errors import ConfigError, DataError, TrainingError


def test_cap_is_from_above_only_and_ess_is_raw_and_capped() -> None:
    log_ratio = torch.tensor([0.0, 0.693147, 2.302585, -1.386294])
    mask = torch.ones(4, 1, dtype=torch.bool)
    weights = imp.truncated_importance_weights(
        log_ratio, torch.ones(4, 1), mask, level="sequence", cap=2.0
    )
    torch.testing.assert_close(weights[:, 0], torch.tensor([1.0, 2.0, 2.0, 0.25]))
    # raw 1, 2, 10, 0.25: 13.25^2 / 105.0625; capped: 5.25^2 / 9.0625
    assert imp.effective_sample_size(log_ratio.exp()).item() == pytest.approx(1.671029, abs=1e-5)
    assert imp.effective_sample_size(weights[:, 0]).item() == pytest.approx(3.041379, abs=1e-5)
    assert imp.effective_sample_size_from_log(log_ratio).item() == pytest.approx(1.671029, abs=1e-5)
    metrics = imp.weight_metrics(log_ratio, weights, mask, level="sequence", cap=2.0)
    assert metrics["above_cap_sum"].item() / metrics["n_weights"].item() == 0.25
    raw = imp.effective_sample_size_from_sums(
        metrics["raw_weight_sum"], metrics["raw_weight_sq_sum"]
    )
    assert raw.item() == pytest.approx(1.671029, abs=1e-5)
    assert metrics["weight_max"].item() == pytest.approx(2.0)


def test_clamped_ratio_and_its_log_agree() -> None:
    result = imp.clamp_log_ratio(torch.tensor([25.0, 1.0, -25.0]), limit=20.0)
    assert result.ratio[0].item() == pytest.approx(485165195.40979, rel=1e-6)
    assert torch.equal(result.ratio, result.log_ratio.exp())
    assert result.clamped.tolist() == [True, False, True]


def test_exported_sums_use_the_clamped_log_ratio() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    metrics = imp.weight_metrics(
        torch.tensor([25.0]), torch.ones(1, 1), mask, level="sequence", cap=2.0
    )
    assert metrics["log_ratio_sum"].item() == 20.0
    assert metrics["raw_weight_sum"].item() == pytest.approx(math.exp(20.0), rel=1e-6)
    assert metrics["clamped_sum"].item() == 1.0


def test_negative_advantages_are_capped_at_one() -> None:
    log_ratio = torch.log(torch.tensor([[4.0, 4.0, 4.0, 0.5, 0.5]]))
    advantages = torch.tensor([[1.0, -1.0, 0.0, 1.0, -1.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    weights = imp.truncated_importance_weights(log_ratio, advantages, mask, level="token", cap=3.0)
    torch.testing.assert_close(weights, torch.tensor([[3.0, 1.0, 3.0, 0.5, 0.5]]))


def test_levels_of_the_ratio() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    behavior = torch.tensor([[-1.5, -1.0, math.inf], [-2.0, -2.0, -2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # differences: 0.5, -1 and 1, 1, 1
    assert imp.sequence_log_ratio(logprobs, behavior, mask).tolist() == [-0.5, 3.0]
    geometric = imp.sequence_log_ratio(logprobs, behavior, mask, level="geometric")
    assert geometric.tolist() == [-0.25, 1.0]
    token = imp.sequence_log_ratio(logprobs, behavior, mask, level="token")
    assert token.tolist() == [[0.5, -1.0, 0.0], [1.0, 1.0, 1.0]]


def test_sequence_weights_cover_every_real_token_of_the_row() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[1.0, -1.0, math.nan], [-1.0, -1.0, -1.0]])
    weights = imp.truncated_importance_weights(
        torch.tensor([1.0, -1.0]), advantages, mask, level="sequence", cap=2.0
    )
    low = math.exp(-1.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.0], [low, low, low]]))


def test_weights_never_overflow_and_carry_no_gradient() -> None:
    log_ratio = torch.tensor([1e4, -1e4])
    mask = torch.ones(2, 1, dtype=torch.bool)
    weights = imp.truncated_importance_weights(
        log_ratio, torch.ones(2, 1), mask, level="sequence", cap=5.0
    )
    torch.testing.assert_close(weights[:, 0], torch.tensor([5.0, 0.0]))
    assert not weights.requires_grad
    assert imp.effective_sample_size_from_log(log_ratio).item() == pytest.approx(1.0)


def test_the_current_policy_may_not_enter_a_weight() -> None:
    current = torch.zeros(1, 2, requires_grad=True)
    with pytest.raises(TrainingError, match="carries a gradient"):
        imp.sequence_log_ratio(current, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))


def test_wrong_levels_shapes_caps_and_numbers_are_refused() -> None:
    mask, ones = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)
    with pytest.raises(DataError, match="level token"):
        imp.truncated_importance_weights(torch.ones(2), ones, mask, level="token", cap=2.0)
    with pytest.raises(DataError, match="level sequence"):
        imp.truncated_importance_weights(ones, ones, mask, level="sequence", cap=2.0)
    with pytest.raises(ConfigError, match="cap"):
        imp.truncated_importance_weights(ones, ones, mask, level="token", cap=0.5)
    with pytest.raises(TrainingError, match="behavior_logprobs"):
        imp.sequence_log_ratio(ones, -math.inf * ones, mask)


def test_ess_is_between_one_and_n() -> None:
    torch.manual_seed(0)
    for n in (1, 2, 7, 50):
        weights = torch.rand(n) + 0.01
        ess = imp.effective_sample_size(weights).item()
        assert 1.0 - 1e-5 <= ess <= n + 1e-4
        assert imp.effective_sample_size_from_log(weights.log()).item() == pytest.approx(
            ess, rel=1e-5
        )
    assert imp.effective_sample_size(torch.full((8,), 0.3)).item() == pytest.approx(8.0)
    assert imp.effective_sample_size(torch.zeros(3)).item() == 0.0


@pytest.mark.parametrize("level", ["sequence", "geometric", "token"])
def test_weight_metrics_add_up_over_micro_batches(level: imp.RatioLevel) -> None:
    torch.manual_seed(1)
    mask = torch.rand(6, 4) < 0.6
    mask[0] = False
    logprobs, behavior, advantages = torch.randn(3, 6, 4)
    log_ratio = imp.sequence_log_ratio(logprobs, behavior, mask, level=level)
    weights = imp.truncated_importance_weights(log_ratio, advantages, mask, level=level, cap=2.0)
    whole = imp.weight_metrics(log_ratio, weights, mask, level=level, cap=2.0)
    parts = [
        imp.weight_metrics(log_ratio[s], weights[s], mask[s], level=level, cap=2.0)
        for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    for name, value in whole.items():
        merged = torch.stack([p[name] for p in parts])
        total = merged.max() if name.endswith("_max") else merged.sum()
        torch.testing.assert_close(total, value, atol=1e-4, rtol=1e-5)
