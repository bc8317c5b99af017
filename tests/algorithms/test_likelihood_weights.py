"""Weights without a proximal policy: known values, signs, masked positions."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.importance import current_log_ratio, likelihood_weights
from tasks.errors import ConfigError, TrainingError

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
def test_weights_by_hand(kind: str, expected: list[float]) -> None:
    weights = likelihood_weights(kind, RATIO, ADVANTAGE, MASK)  # type: ignore[arg-type]
    assert weights[:, 0].tolist() == pytest.approx(expected)
    assert not weights.requires_grad


@pytest.mark.parametrize("kind", ["topr", "a_lol", "positives_only"])
def test_masked_positions_never_matter(kind: str) -> None:
    nan = torch.full((5, 1), math.nan)
    mask = torch.cat([MASK, ~MASK], 1)
    weights = likelihood_weights(
        kind,  # type: ignore[arg-type]
        torch.cat([RATIO, nan], 1),
        torch.cat([ADVANTAGE, nan], 1),
        mask,
    )
    alone = likelihood_weights(kind, RATIO, ADVANTAGE, MASK)  # type: ignore[arg-type]
    assert torch.equal(weights, torch.cat([alone, torch.zeros(5, 1)], 1))


def test_a_huge_ratio_stays_finite() -> None:
    ratio = torch.tensor([[500.0], [-500.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    for kind in ("topr", "a_lol"):
        for sign in (1.0, -1.0):
            weights = likelihood_weights(kind, ratio, torch.full((2, 1), sign), mask)  # type: ignore[arg-type]
            assert bool(torch.isfinite(weights).all())


def test_current_ratio_carries_no_gradient_and_spreads_over_the_response() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    behavior = torch.tensor([[-1.5, -3.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    # 0.5 + 1.0 = 1.5 for the response, 0.75 per token
    for level, expected in (
        ("sequence", [1.5, 1.5, 0.0]),
        ("geometric", [0.75, 0.75, 0.0]),
        ("token", [0.5, 1.0, 0.0]),
    ):
        ratio = current_log_ratio(logprobs, behavior, mask, level=level)  # type: ignore[arg-type]
        assert ratio[0].tolist() == pytest.approx(expected)
        assert not ratio.requires_grad


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="kind"):
        likelihood_weights("best", RATIO, ADVANTAGE, MASK)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clip_range"):
        likelihood_weights("a_lol", RATIO, ADVANTAGE, MASK, clip_range=2.0)
    with pytest.raises(TrainingError, match="advantages"):
        likelihood_weights("topr", RATIO, ADVANTAGE * math.nan, MASK)
