"""The pairwise loss of the reward model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tasks.algorithms.reward_losses import (
    bradley_terry_loss,
    pairwise_accuracy,
    split_interleaved,
)


def _loss(gap: float, **options: Any) -> float:
    chosen, rejected = torch.tensor([gap]), torch.tensor([0.0])
    return bradley_terry_loss(chosen, rejected, total_pairs=1, **options)[0].item()


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (-100.0, 100.0),  # softplus(100) = 100 + log1p(e^-100)
        (-20.0, 20.0),
        (-1.0, 1.313262),  # 1 + log1p(e^-1)
        (0.0, 0.693147),
        (1.0, 0.313262),
        (20.0, 2.06115e-09),
        (100.0, 3.72008e-44),  # a subnormal: fp32 steps there are 1.4e-45
    ],
)
def test_loss_neither_overflows_nor_vanishes(gap: float, expected: float) -> None:
    assert _loss(gap) == pytest.approx(expected, rel=1e-5, abs=3e-45)
    assert _loss(gap) > 0.0


def test_gradient_of_a_hopeless_pair_is_one() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    bradley_terry_loss(chosen, torch.tensor([1e4]), total_pairs=1)[0].backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == -1.0


def test_margin_sits_inside_the_sigmoid_and_may_be_unknown() -> None:
    chosen, rejected = torch.full((3,), 0.5), torch.zeros(3)
    margin = torch.tensor([1.0, 0.0, math.nan])
    losses = [
        bradley_terry_loss(
            chosen[i : i + 1],
            rejected[i : i + 1],
            total_pairs=1,
            margins=margin[i : i + 1],
        )[0].item()
        for i in range(3)
    ]
    # -log sigmoid(0.5 - 1) = log(1 + e^0.5) = 0.974077
    # -log sigmoid(0.5) = log(1 + e^-0.5) = 0.474077
    assert losses == pytest.approx([0.974077, 0.474077, 0.474077], abs=1e-6)
    assert _loss(0.5) == pytest.approx(0.474077, abs=1e-6)


def test_interleaved_scores_of_three_pairs() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 2.5, 0.0, 1.0])
    chosen, rejected = split_interleaved(scores)
    loss, metrics = bradley_terry_loss(chosen, rejected, total_pairs=3)
    # gaps 2, -0.5, -1: (0.126928 + 0.974077 + 1.313262) / 3
    assert loss.item() == pytest.approx(0.804756, abs=1e-6)
    assert metrics["correct_sum"].item() / 3 == pytest.approx(0.333333, abs=1e-6)


def test_close_scores_stay_apart_in_fp32_and_tie_in_bf16() -> None:
    chosen, rejected = torch.tensor([18.03]), torch.tensor([18.0])
    loss, metrics = bradley_terry_loss(chosen, rejected, total_pairs=1)
    assert loss.item() == pytest.approx(0.67826, abs=1e-5)  # log(1 + e^-0.03)
    assert metrics["gap_sum"].item() == pytest.approx(0.03, abs=1e-5)
    assert metrics["correct_sum"].item() == 1.0
    assert pairwise_accuracy(chosen.bfloat16(), rejected.bfloat16()) == (0.5, 1.0)


def test_bf16_scores_lose_nothing_more_in_the_loss() -> None:
    chosen, rejected = torch.tensor([3.0]).bfloat16(), torch.tensor([2.0]).bfloat16()
    loss, _ = bradley_terry_loss(chosen, rejected, total_pairs=1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.3132617, abs=1e-6)


def test_ties_count_half_and_are_counted() -> None:
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    # tie 0.5 + right 1 + wrong 0
    assert pairwise_accuracy(chosen, rejected) == pytest.approx((1.5 / 3, 1.0 / 3))
    _, metrics = bradley_terry_loss(chosen, rejected, total_pairs=3)
    counts = [metrics[name].item() for name in ("correct_sum", "tie_sum", "n_pairs")]
    assert counts == [1.5, 1.0, 3.0]


def test_smoothing_and_centring() -> None:
    chosen, rejected = torch.tensor([2.0]), torch.tensor([1.0])
    loss, _ = bradley_terry_loss(
        chosen, rejected, total_pairs=1, label_smoothing=0.1, center_coef=0.01
    )
    # 0.9 * 0.3132617 + 0.1 * 1.3132617 + 0.01 * (2 + 1)^2 = 0.2819355 + 0.1313262 + 0.09
    assert loss.item() == pytest.approx(0.5032617, abs=1e-6)


def test_a_pair_of_weight_zero_may_hold_nan() -> None:
    chosen = torch.tensor([1.0, math.nan], requires_grad=True)
    rejected = torch.tensor([0.0, math.inf], requires_grad=True)
    loss, metrics = bradley_terry_loss(
        chosen, rejected, total_pairs=2, weights=torch.tensor([2.0, 0.0])
    )
    loss.backward()
    assert loss.item() == pytest.approx(2 * 0.3132617 / 2, abs=1e-6)
    assert chosen.grad is not None
    # -sigmoid(-1) * 2 / 2
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.2689414, 0.0]))
    assert metrics["n_pairs"].item() == 1.0


def test_any_split_gives_the_same_loss_and_gradient() -> None:
    torch.manual_seed(0)
    base_chosen, rejected = torch.randn(11), torch.randn(11)
    results = []
    for sizes in ([11], [1] * 11, [4, 7], [2, 5, 3, 1]):
        chosen = base_chosen.clone().requires_grad_()
        parts = zip(chosen.split(sizes), rejected.split(sizes), strict=True)
        loss = sum(bradley_terry_loss(c, r, total_pairs=11)[0] for c, r in parts)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert chosen.grad is not None
        results.append((loss.item(), chosen.grad))
    for loss_value, grad in results[1:]:
        assert loss_value == pytest.approx(results[0][0], abs=1e-6)
        torch.testing.assert_close(grad, results[0][1], atol=1e-6, rtol=0)


def test_trust_mixes_both_labels() -> None:
    # z = 1: -log sigmoid(1) = 0.313262, -log sigmoid(-1) = 1.313262.
    def loss(trust: float, smoothing: float = 0.0) -> float:
        return _loss(1.0, trust=torch.tensor([trust]), label_smoothing=smoothing)

    assert loss(1.0) == pytest.approx(0.313262, abs=1e-6)
    assert loss(0.0) == pytest.approx(1.313262, abs=1e-6)
    assert loss(0.7) == pytest.approx(0.7 * 0.313262 + 0.3 * 1.313262, abs=1e-6)
    # Smoothing 0.1 of trust 0.7: p = 0.9 * 0.7 + 0.1 * 0.3 = 0.66.
    assert loss(0.7, 0.1) == pytest.approx(0.66 * 0.313262 + 0.34 * 1.313262, abs=1e-6)


def test_padding_may_hold_any_trust_and_margin() -> None:
    chosen, rejected = torch.tensor([1.0, math.nan]), torch.tensor([0.0, 3.0])
    loss, _ = bradley_terry_loss(
        chosen,
        rejected,
        total_pairs=1,
        weights=torch.tensor([1.0, 0.0]),
        margins=torch.tensor([0.0, math.inf]),
        trust=torch.tensor([1.0, math.nan]),
    )
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)


def test_swapped_label_keeps_its_margin() -> None:
    # Swapped, the pair is rejected over chosen: d = -0.5, z = -0.5 - 2, -log sigmoid = 2.578889.
    margins = torch.tensor([2.0])
    swapped = _loss(0.5, margins=margins, trust=torch.tensor([0.0]))
    assert swapped == pytest.approx(2.578889, abs=1e-5)
    assert _loss(-0.5, margins=margins) == pytest.approx(2.578889, abs=1e-5)
