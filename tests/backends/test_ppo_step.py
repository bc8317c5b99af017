"""Advantages as the loop computes them, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tasks.backends.ppo_step import gae_of, sequence_advantages
from tasks.config import AdvantageConfig

# Two prompts with two responses each, of 2, 1, 1 and 2 tokens; the score stands at the last token.
MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]], dtype=torch.bool)
REWARDS = torch.tensor([[0.0, 1.0], [3.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
GROUPS = torch.tensor([7, 7, 2, 2])


def _rounded(tensor: Tensor) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in tensor.tolist()]


def _advantages(**changes: object) -> list[list[float]]:
    cfg = AdvantageConfig.model_validate(changes)
    return _rounded(sequence_advantages(cfg, REWARDS, MASK, GROUPS))


def test_gae_by_hand() -> None:
    cfg = AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=0.5)
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.5, 0.4]])
    advantages, returns = gae_of(cfg, rewards, values, torch.ones(1, 3, dtype=torch.bool))
    # delta = 0.3, -0.1, 0.6; A3 = 0.6, A2 = -0.1 + 0.5 * 0.6 = 0.2, A1 = 0.3 + 0.5 * 0.2 = 0.4;
    # mean 0.4, standard deviation over n - 1 0.2.
    assert _rounded(returns) == [[0.6, 0.7, 1.0]]
    assert _rounded(advantages) == [[0.0, -1.0, 1.0]]


def test_adaptive_lambda_follows_the_unexplained_variance() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    values = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    # Returns 1, 1, 0, 0 with variance 1/4; errors 1/2, 1/2, 0, 0 with variance 1/16: a quarter is
    # unexplained, so lambda = 0.95 + 0.03 * 3/4.
    adaptive = gae_of(AdvantageConfig(gae_lambda="adaptive"), rewards, values, mask)
    fixed = gae_of(AdvantageConfig(gae_lambda=0.9725), rewards, values, mask)
    other = gae_of(AdvantageConfig(gae_lambda=0.95), rewards, values, mask)
    torch.testing.assert_close(adaptive, fixed)
    assert not torch.allclose(adaptive[1], other[1])


def test_group_advantages_by_hand() -> None:
    # Prompt 7: 1 and 3, mean 2, standard deviation over n - 1 sqrt(2). Prompt 2: equal, so 0.
    a = round(1 / math.sqrt(2), 4)
    assert _advantages(estimator="group") == [[-a, -a], [a, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_group_advantages_without_the_standard_deviation() -> None:
    found = _advantages(estimator="group", normalize_std=False)
    assert found == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_leave_one_out_by_hand() -> None:
    # 1 - 3, 3 - 1, 5 - 5, 5 - 5
    assert _advantages(estimator="rloo") == [[-2.0, -2.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_discounted_returns_are_whitened_over_all_tokens() -> None:
    # gamma 1/2: returns 0.5, 1 | 3 | 5 | 2.5, 5; mean 17/6, squares around it 18.3333,
    # variance over n - 1 3.6667, standard deviation 1.9149.
    found = _advantages(estimator="reinforce_pp", gamma=0.5)
    returns = [[0.5, 1.0], [3.0], [5.0], [2.5, 5.0]]
    expected = [[(x - 17 / 6) / math.sqrt(18 + 1 / 3) * math.sqrt(5) for x in r] for r in returns]
    for row, wanted in zip(found, expected, strict=True):
        assert row[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
        assert row[len(wanted) :] == [0.0] * (2 - len(wanted))


def test_whitening_is_asked_for() -> None:
    plain = torch.tensor(_advantages(estimator="rloo"))[MASK]
    white = torch.tensor(_advantages(estimator="rloo", whiten=True))[MASK]
    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(white, expected, atol=1e-3, rtol=0)
