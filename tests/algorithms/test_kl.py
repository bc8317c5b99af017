"""KL estimates and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.kl import KLKind, adapted_kl_coef, kl_per_token, weighted_kl_on_data
from tasks.errors import TrainingError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [0.106531, 0.718282]),  # e^-0.5 - 1 + 0.5; e^1 - 1 - 1
    ],
)
def test_three_estimators(kind: KLKind, expected: list[float]) -> None:
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, math.inf]])
    value = kl_per_token(logprobs, ref, mask, kind=kind)
    assert value[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-6)
    value.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0, 2].item() == 0.0


def test_k2_and_k3_are_never_negative_and_never_overflow() -> None:
    torch.manual_seed(0)
    diff = torch.cat([torch.randn(500), 1e-4 * torch.randn(500), torch.tensor([-300.0, 300.0])])
    mask = torch.ones(1, 1002, dtype=torch.bool)
    for kind in ("k2", "k3"):
        value = kl_per_token(diff.unsqueeze(0), torch.zeros(1, 1002), mask, kind=kind)
        assert torch.isfinite(value).all()
        assert (value >= 0).all()


def test_k3_is_exact_for_small_differences() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    value = kl_per_token(torch.full((1, 1), 1e-3), torch.zeros(1, 1), mask, kind="k3")
    # d^2 / 2 - d^3 / 6
    assert value.item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)


def test_weights_turn_the_writers_tokens_into_an_estimate_of_the_policy() -> None:
    # vocabulary of 3: writer mu, policy pi, reference ref; 10 tokens, in mu's exact proportions
    mu = torch.tensor([0.5, 0.3, 0.2])
    pi = torch.tensor([0.2, 0.3, 0.5])
    ref = torch.tensor([0.4, 0.4, 0.2])
    counts = (mu * 10).round().long()
    tokens = torch.arange(3).repeat_interleave(counts)
    mask = torch.ones(10, 1, dtype=torch.bool)
    logp, ref_logp = pi.log()[tokens].unsqueeze(1), ref.log()[tokens].unsqueeze(1)
    weights = (pi / mu)[tokens].unsqueeze(1)
    exact = float((pi * (pi / ref).log()).sum())
    value = weighted_kl_on_data(logp, ref_logp, weights, mask)
    assert value.item() == pytest.approx(exact, abs=1e-6)
    # The unweighted k1 even has the wrong sign.
    assert kl_per_token(logp, ref_logp, mask, kind="k1").mean().item() < 0 < exact


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (12.0, 0.100512),  # error 1 clipped to 0.2: 0.1 * (1 + 0.2 * 256 / 10000)
        (3.0, 0.099488),  # error -0.5 clipped to -0.2
        (6.3, 0.100128),  # error 0.05
        (6.0, 0.1),
    ],
)
def test_coefficient_moves_the_right_way(observed: float, expected: float) -> None:
    coef = adapted_kl_coef(0.1, observed=observed, target=6.0, horizon=10000, n=256)
    assert coef == pytest.approx(expected, abs=1e-9)


def test_a_kl_that_is_no_number_does_not_stay_in_the_coefficient() -> None:
    with pytest.raises(TrainingError, match="KL is nan"):
        adapted_kl_coef(0.1, observed=math.nan, target=6.0, horizon=100, n=1)
