"""The KL of a policy from its base, on responses that the policy sampled."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.kl import kl_probe_estimate
from tasks.errors import DataError, TrainingError


def test_probe_kl_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, math.nan], [math.nan, math.nan]])
    base = torch.tensor([[-1.5, -1.0], [-1.5, math.inf], [0.0, 0.0]])
    found = kl_probe_estimate(logprobs, base, mask)
    # d = 0.5, -1 | 1: mean 1/6; deviations by response 1/3 - 7/6 = -5/6 and 5/6, so
    # SE = sqrt(2 / 1 * 2 * 25 / 36) / 3 = 5/9.
    assert found.k1.value == pytest.approx(1 / 6)
    assert found.k1.standard_error == pytest.approx(5 / 9)
    assert (found.k1.n, found.k1.n_clusters) == (3, 2)
    # e^-0.5 - 1 + 0.5 = 0.106531, e^1 - 1 - 1 = 0.718282, e^-1 - 1 + 1 = 0.367879.
    assert found.k3.value == pytest.approx((0.106531 + 0.718282 + 0.367879) / 3, abs=1e-6)
    # -0.5 and 1 per response.
    assert found.per_response.value == pytest.approx(0.25)
    assert found.per_response.standard_error == pytest.approx(0.75)


def test_both_estimates_find_the_true_kl() -> None:
    policy, base = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)
    true = float((policy * (policy / base).log()).sum())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(policy.expand(2000, -1), 10, True, generator=generator)
    found = kl_probe_estimate(
        policy.log()[tokens], base.log()[tokens], torch.ones(2000, 10, dtype=torch.bool)
    )
    for estimate in (found.k1, found.k3):
        assert estimate.standard_error is not None
        assert abs(estimate.value - true) < 4 * estimate.standard_error
    assert found.per_response.value == pytest.approx(10 * found.k1.value)


def test_probe_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no response token"):
        kl_probe_estimate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3).bool())
    with pytest.raises(TrainingError, match="log-prob"):
        kl_probe_estimate(torch.zeros(1, 1), torch.tensor([[math.nan]]), torch.ones(1, 1).bool())
