"""Weights without a proximal policy: known values, signs, masked positions."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.importance import (
    LikelihoodKind,
    RatioLevel,
    likelihood_weights,
    sequence_log_ratio,
)

LOG2 = math.log(2.0)
# One response per row: A > 0 at ratio 2, A > 0 at 1/2, A < 0 at 2, A < 0 at 1/4, A = 0 at 1/2.
RATIO = torch.tensor([[LOG2], [-LOG2], [LOG2], [-2 * LOG2], [-LOG2]])
ADVANTAGE = torch.tensor([[1.0], [2.0], [-1.0], [-3.0], [0.0]])
MASK = torch.ones(5, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 1 where A >= 0, min(r, 1) where A < 0
        ("topr", [1.0, 1.0, 1.0, 0.25, 1.0]),
        # clip(r, 0.8, 1.2) where A > 0: 2 -> 1.2, 1/2 -> 0.8
        ("a_lol", [1.2, 0.8, 0.0, 0.0, 0.0]),
        ("positives_only", [1.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_weights_by_hand(kind: LikelihoodKind, expected: list[float]) -> None:
    weights = likelihood_weights(kind, RATIO, ADVANTAGE, MASK, clip_range=0.2)
    assert weights[:, 0].tolist() == pytest.approx(expected)
    assert not weights.requires_grad


@pytest.mark.parametrize("kind", ["topr", "a_lol", "positives_only"])
def test_masked_positions_never_matter(kind: LikelihoodKind) -> None:
    nan = torch.full((5, 1), math.nan)
    mask = torch.cat([MASK, ~MASK], 1)
    weights = likelihood_weights(
        kind, torch.cat([RATIO, nan], 1), torch.cat([ADVANTAGE, nan], 1), mask, clip_range=0.2
    )
    alone = likelihood_weights(kind, RATIO, ADVANTAGE, MASK, clip_range=0.2)
    assert torch.equal(weights, torch.cat([alone, torch.zeros(5, 1)], 1))


def test_a_huge_ratio_stays_finite() -> None:
    ratio = torch.tensor([[500.0], [-500.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    kinds: list[LikelihoodKind] = ["topr", "a_lol"]
    for kind in kinds:
        for sign in (1.0, -1.0):
            adv = torch.full((2, 1), sign)
            weights = likelihood_weights(kind, ratio, adv, mask, clip_range=0.2)
            assert bool(torch.isfinite(weights).all())


def test_the_ratio_of_a_response_weighs_all_its_tokens_without_a_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    behavior = torch.tensor([[-0.5, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    # -0.5 - 1.0 = -1.5 for the response, -0.75 per token
    levels: dict[RatioLevel, list[float]] = {
        "sequence": [-1.5, -1.5],
        "geometric": [-0.75, -0.75],
        "token": [-0.5, -1.0],
    }
    for level, expected in levels.items():
        ratio = sequence_log_ratio(logprobs, behavior, mask, level=level)
        weights = likelihood_weights("topr", ratio, -torch.ones(1, 3), mask, clip_range=0.2)
        assert weights[0].tolist() == pytest.approx([*map(math.exp, expected), 0.0])
        assert not weights.requires_grad
