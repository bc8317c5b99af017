"""Rewards: scale, components, place."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tasks.algorithms import rewards as rw
from tasks.errors import ConfigError, RewardError


def test_score_sits_at_the_last_real_token() -> None:
    log_ratio = torch.tensor([[0.2, -0.1, 0.3, math.nan, math.inf]])
    mask = torch.tensor([[True, True, True, False, False]])
    rewards = rw.token_level_rewards(
        torch.tensor([2.0]), log_ratio, torch.zeros(1, 5), mask, kl_coef=0.1
    )
    # -0.1 * 0.2, -0.1 * -0.1, -0.1 * 0.3 + 2
    torch.testing.assert_close(rewards, torch.tensor([[-0.02, 0.01, 1.97, 0.0, 0.0]]))
    assert rewards[mask].sum().item() == pytest.approx(1.96)


def test_score_sits_at_the_last_real_token_of_left_padded_rows() -> None:
    mask = torch.tensor([[False, True, True], [True, True, False]])
    rewards = rw.token_level_rewards(
        torch.tensor([1.0, 2.0]), torch.zeros(2, 3), None, mask, kl_coef=0.0
    )
    assert rewards.tolist() == [[0, 0, 1], [0, 2, 0]]


def test_normalize_scores_in_every_mode() -> None:
    scores = torch.tensor([1.0, 3.0, 103.0])
    # (1 - 1) / 2, (3 - 1) / 2, (103 - 1) / 2 = 51 clipped to 5
    normalize = partial(rw.normalize_scores, scores, clip=5.0)
    assert normalize(mean=1.0, std=2.0, mode="standardize").tolist() == [0.0, 1.0, 5.0]
    unit = normalize(mean=1.0, std=2.0, mode="unit_range")
    torch.testing.assert_close(unit, torch.tensor([0.0, 0.2, 1.0]))  # the same over 5
    assert normalize(mean=2.0, std=1.0, mode="binary").tolist() == [-1, 1, 1]
    assert normalize(mean=0.0, std=0.0, mode="raw").tolist() == scores.tolist()


def test_normalize_refuses_scores_that_tell_nothing() -> None:
    with pytest.raises(RewardError, match="std 0"):
        rw.normalize_scores(torch.ones(2), mean=1.0, std=0.0, mode="standardize", clip=5.0)


def test_center_by_group_in_any_order() -> None:
    scores = torch.tensor([1.0, 10.0, 3.0, 7.0, 20.0])
    groups = torch.tensor([5, 2, 5, 9, 2])
    # group 5: mean 2; group 2: mean 15; group 9 alone
    assert rw.center_by_group(scores, groups).tolist() == [-1.0, -5.0, 1.0, 0.0, 5.0]


def test_components_add_up_by_name() -> None:
    parts = {"helpful": torch.tensor([1.0, 2.0]), "harmless": torch.tensor([0.0, -4.0])}
    total = rw.combine_components(parts, {"helpful": 0.5, "harmless": 0.25})
    assert total.tolist() == [0.5, 0.0]  # 0.5 * 2 + 0.25 * -4 = 0


def test_unmatched_components_are_named() -> None:
    parts = {"helpful": torch.ones(1)}
    with pytest.raises(ConfigError, match="harmless"):
        rw.combine_components(parts, {"helpful": 1.0, "harmless": 1.0})
    with pytest.raises(ConfigError, match="helpful"):
        rw.combine_components(parts, {})
    # As large as a function of the user's may say in fp64, infinite in fp32.
    broken = torch.tensor([1.0, math.nan, 1e300])
    with pytest.raises(RewardError, match=r"component helpful holds 2 .* row 1"):
        rw.combine_components({"helpful": broken}, {"helpful": 0.0})
