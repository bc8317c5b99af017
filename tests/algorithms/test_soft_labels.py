"""Soft labels: a bucket for the tail, tokens that the teacher drew, and how far judges agree."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import soft_labels as sl
from tasks.algorithms.agreement import agreement_weights
from tasks.algorithms.distillation_losses import full_kl, jsd
from tasks.errors import ConfigError, DataError


def _logits(seed: int, n: int = 6, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher = 2.0 * torch.randn(n, vocabulary, generator=generator)
    student = torch.randn(n, vocabulary, generator=generator).requires_grad_()
    return teacher, student


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_buckets_is_the_jsd_where_nothing_is_left_out(beta: float) -> None:
    teacher, student = _logits(0)
    top = sl.topk_with_tail(teacher, k=11, tau=1.5)
    found = sl.topk_tail_jsd(top.logprobs, top.ids, student, beta=beta, tau=1.5)
    torch.testing.assert_close(found, jsd(teacher, student, beta=beta, tau=1.5), atol=1e-6, rtol=0)


def test_jsd_of_buckets_by_hand() -> None:
    # Teacher 0.6, 0.3, 0.1 and student 0.2, 0.3, 0.5; the best token and a tail: (0.6, 0.4) against
    # (0.2, 0.8), so M = (0.4, 0.6) at beta 0.5, and half of each KL is
    # 0.5 (0.6 ln 1.5 + 0.4 ln 2/3) + 0.5 (0.2 ln 0.5 + 0.8 ln 4/3) = 0.0863044
    teacher = torch.tensor([[0.6, 0.3, 0.1]]).log()
    student = torch.tensor([[0.2, 0.3, 0.5]]).log()
    top = sl.topk_with_tail(teacher, k=1, tau=1.0)
    found = sl.topk_tail_jsd(top.logprobs, top.ids, student, beta=0.5, tau=1.0)
    assert found.item() == pytest.approx(0.0863044, abs=1e-6)
    with pytest.raises(ConfigError, match="beta"):
        sl.topk_tail_jsd(top.logprobs, top.ids, student, beta=-0.1, tau=1.0)


def test_sampled_kl_by_hand() -> None:
    # Drawn: the first token twice, the second once; -log p_S = log 2 each.
    # ((log 0.9 - log 0.5) * 2 + log 0.1 - log 0.5) / 3
    teacher, student = torch.tensor([0.9, 0.1]).log(), torch.tensor([[0.5, 0.5]]).log()
    ids = torch.tensor([[0, 0, 1]])
    found = sl.sampled_kl(teacher[ids], ids, student, tau=1.0)
    expected = (2 * math.log(1.8) + math.log(0.2)) / 3
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_sampled_kl_is_unbiased(tau: float) -> None:
    """Over 1,000 draws of 8 tokens, value and gradient have the mean of the full KL, to within four
    standard errors of each of their 66 + 6 numbers."""
    teacher, student = _logits(1)
    exact = full_kl(teacher, student, tau=tau)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), student)
    generator = torch.Generator().manual_seed(2)
    values, gradients = [], []
    for _ in range(1000):
        drawn = sl.draw_tokens(teacher, k=8, tau=tau, generator=generator)
        value = sl.sampled_kl(drawn.logprobs, drawn.ids, student, tau=tau)
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value.sum(), student)[0])
    for draws, truth in ((torch.stack(values), exact), (torch.stack(gradients), exact_gradient)):
        error = draws.std(dim=0) / math.sqrt(len(draws))
        distance = (draws.mean(dim=0) - truth).abs()
        assert (distance <= 4 * error + 1e-6).all()
        # The interval is narrow: an estimate that is off by a tenth of the size would be seen.
        assert float(4 * error.mean()) < 0.25 * float(truth.detach().abs().mean())


def test_draws_follow_the_teacher() -> None:
    logits = torch.tensor([[2.0, 0.0, -2.0]]).expand(20_000, 3)
    drawn = sl.draw_tokens(logits, k=1, tau=2.0, generator=torch.Generator().manual_seed(3))
    shares = torch.bincount(drawn.ids[:, 0], minlength=3) / 20_000
    # softmax(1, 0, -1)
    torch.testing.assert_close(shares, torch.tensor([0.6652, 0.2447, 0.0900]), atol=0.015, rtol=0)
    first = drawn.logprobs[drawn.ids == 0][0]
    assert first.item() == pytest.approx(math.log(0.665241), abs=1e-5)
    with pytest.raises(DataError, match="k is 0"):
        sl.draw_tokens(logits, k=0, tau=2.0)


def test_masked_positions_hold_anything_in_samples_too() -> None:
    teacher, student = _logits(4, n=2)
    mask = torch.tensor([True, False])
    drawn = sl.draw_tokens(teacher, k=3, tau=1.0, generator=torch.Generator().manual_seed(0))
    ids, logprobs = drawn.ids.clone(), drawn.logprobs.clone()
    ids[1], logprobs[1] = 99, math.nan
    broken = student.detach().clone()
    broken[1] = math.inf
    broken.requires_grad_()
    found = sl.sampled_kl(logprobs, ids, broken, tau=1.0, mask=mask)
    found.sum().backward()
    assert found[1].item() == 0.0 and broken.grad is not None
    assert torch.isfinite(broken.grad).all() and not broken.grad[1].any()


def test_weights_of_agreement_by_hand() -> None:
    # Margins -1, 1 and rewards -1, 1 have z-scores -1, 1: P = 0.268941, 0.731059 for both judges,
    # who agree with P^2 + (1 - P)^2 = 0.606776 about either. With rewards the other way round they
    # agree with 2 P (1 - P) = 0.393224. All are scaled to mean 1.
    margins = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    rewards = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    found = agreement_weights(margins, rewards)
    expected = torch.tensor([0.606776, 0.606776, 0.393224, 0.393224]) / 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_own_responses_weigh_by_their_reward() -> None:
    # The teacher likes what it wrote for certain, which leaves the reward model's P.
    margins = torch.full((2,), math.nan)
    found = agreement_weights(margins, torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([0.537883, 1.462117]), atol=1e-5, rtol=0)
    assert agreement_weights(margins, torch.tensor([2.0, 2.0])).tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="rewards"):
        agreement_weights(margins, torch.zeros(3))
