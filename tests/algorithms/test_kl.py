"""KL estimates and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.kl import AdaptiveKLController, KLKind, kl_per_token, weighted_kl_on_data
from tasks.errors import ConfigError, TrainingError


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
    value = kl_per_token(torch.full((1, 1), 1e-3), torch.zeros(1, 1), torch.ones(1, 1).bool())
    # d^2 / 2 - d^3 / 6
    assert value.item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)


def test_a_real_nan_or_a_live_reference_raises() -> None:
    ones, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(TrainingError, match="ref_logprobs"):
        kl_per_token(ones, ones * math.nan, mask)
    with pytest.raises(TrainingError, match="carries a gradient"):
        kl_per_token(ones, ones.clone().requires_grad_(), mask)


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
    for kind in ("k1", "k3"):
        value, _ = weighted_kl_on_data(logp, ref_logp, weights, mask, kind=kind)
        assert value.item() == pytest.approx(exact, abs=1e-6)
    plain, _ = weighted_kl_on_data(logp, ref_logp, torch.ones(10, 1), mask, kind="k1")
    assert plain.item() < 0 < exact  # the unweighted estimate even has the wrong sign


def test_kl_on_data_sums_add_up() -> None:
    torch.manual_seed(0)
    logp, ref = torch.randn(2, 6, 4)
    weights, mask = torch.rand(6, 4), torch.rand(6, 4) < 0.7
    logp[~mask], weights[~mask] = math.nan, math.inf
    value, _ = weighted_kl_on_data(logp, ref, weights, mask)
    parts = [
        weighted_kl_on_data(logp[i : i + 2], ref[i : i + 2], weights[i : i + 2], mask[i : i + 2])[1]
        for i in (0, 2, 4)
    ]
    top = sum(p["kl_data_weighted_sum"] for p in parts)
    bottom = sum(p["kl_data_weight_sum"] for p in parts)
    assert float(top / bottom) == pytest.approx(value.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (12.0, 0.100512),  # error 1 clipped to 0.2: 0.1 * (1 + 0.2 * 256 / 10000)
        (3.0, 0.099488),  # error -0.5 clipped to -0.2
        (6.3, 0.100128),  # error 0.05
        (6.0, 0.1),
    ],
)
def test_controller_moves_the_right_way(observed: float, expected: float) -> None:
    controller = AdaptiveKLController(coef=0.1, target=6.0, horizon=10000)
    assert controller.update(observed, 256).coef == pytest.approx(expected, abs=1e-9)
    assert controller.coef == 0.1


def test_controller_refuses_what_could_turn_it_around() -> None:
    for target, horizon in ((0.0, 1.0), (-6.0, 1.0), (6.0, 0.0), (6.0, -5.0), (math.nan, 1.0)):
        with pytest.raises(ConfigError):
            AdaptiveKLController(coef=0.1, target=target, horizon=horizon)
    controller = AdaptiveKLController(coef=0.1, target=6.0, horizon=100)
    with pytest.raises(ConfigError, match="horizon"):
        controller.update(1.0, 600)
    with pytest.raises(TrainingError, match="KL is nan"):
        controller.update(math.nan, 1)
