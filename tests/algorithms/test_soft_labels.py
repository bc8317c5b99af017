"""Soft labels: a bucket for the tail, tokens that the teacher drew, and how far judges agree."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import distillation_losses as sl
from tasks.algorithms.distillation_losses import agreement_weights, full_kl, jsd


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


def test_sampled_kl_by_hand() -> None:
    # Drawn: the first token twice, the second once; -log p_S = log 2 each.
    # ((log 0.9 - log 0.5) * 2 + log 0.1 - log 0.5) / 3
    teacher, student = torch.tensor([0.9, 0.1]).log(), torch.tensor([[0.5, 0.5]]).log()
    ids = torch.tensor([[0, 0, 1]])
    found = sl.sampled_kl(teacher[ids], ids, student, tau=1.0)
    expected = (2 * math.log(1.8) + math.log(0.2)) / 3
    assert found.item() == pytest.approx(expected, abs=1e-6)


def _deviations(draws: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return by how many of its standard errors the mean of the draws (D, N) misses the truth (N,).

    Without bias these are N independent standard normal numbers, as the positions are independent.
    """
    error = draws.std(dim=0) / math.sqrt(len(draws))
    return (draws.mean(dim=0) - truth) / error


def _is_standard_normal(z: torch.Tensor) -> bool:
    """Tell whether share within one, mean and mean square are those of N standard normal numbers,
    each to within three standard errors of such a figure: sqrt(p (1 - p) / N) for the share
    p = erf(1 / sqrt 2) = 0.6827, sqrt(1 / N) for the mean, sqrt(2 / N) for the mean square."""
    n, p = len(z), math.erf(1 / math.sqrt(2))
    figures = (
        (float((z.abs() < 1).double().mean()), p, p * (1 - p)),
        (float(z.mean()), 0.0, 1.0),
        (float(z.square().mean()), 1.0, 2.0),
    )
    return all(abs(found - truth) <= 3 * math.sqrt(var / n) for found, truth, var in figures)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_sampled_kl_is_unbiased(tau: float) -> None:
    """The mean over 1,000 draws of 8 tokens is off by its standard error and no more.

    That is one number in value and one in gradient at each of 500 positions: 68 % of them lie
    within one standard error of the full KL's, and on average they lie on neither side. A bias of a
    seventh of a standard error is seen (3 / sqrt 500 = 0.13).
    """
    n, n_draws, vocabulary = 500, 1000, 11
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)
    student = torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)
    direction = torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)

    def value_and_slope(kl: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = torch.autograd.grad(kl.sum(), at)
        return kl.detach().double(), (gradient * direction).sum(dim=-1)

    at = student.clone().requires_grad_()
    exact = value_and_slope(full_kl(teacher, at, tau=tau, direction="forward"), at)
    at = student.expand(n_draws, n, vocabulary).clone().requires_grad_()
    drawn = sl.draw_tokens(
        teacher.expand(n_draws, n, vocabulary).reshape(-1, vocabulary),
        k=8,
        tau=tau,
        generator=generator,
    )
    ids, logprobs = (part.view(n_draws, n, 8) for part in (drawn.ids, drawn.logprobs))
    found = value_and_slope(sl.sampled_kl(logprobs, ids, at, tau=tau), at)
    for draws, truth in zip(found, exact, strict=True):
        z = _deviations(draws, truth)
        assert _is_standard_normal(z)
        assert not _is_standard_normal(z + 0.3)
    # Tokens that are drawn without putting them back are found out.
    weights = (teacher / tau).softmax(-1).expand(n_draws, n, vocabulary).reshape(-1, vocabulary)
    ids = torch.multinomial(weights, 8, generator=generator)
    logprobs = weights.log().gather(-1, ids).view(n_draws, n, 8)
    biased = sl.sampled_kl(logprobs, ids.view(n_draws, n, 8), student.expand_as(at), tau=tau)
    assert not _is_standard_normal(_deviations(biased.double(), exact[0]))


def test_draws_follow_the_teacher() -> None:
    logits = torch.tensor([[2.0, 0.0, -2.0]]).expand(20_000, 3)
    drawn = sl.draw_tokens(logits, k=1, tau=2.0, generator=torch.Generator().manual_seed(3))
    shares = torch.bincount(drawn.ids[:, 0], minlength=3) / 20_000
    # softmax(1, 0, -1)
    torch.testing.assert_close(shares, torch.tensor([0.6652, 0.2447, 0.0900]), atol=0.015, rtol=0)
    first = drawn.logprobs[drawn.ids == 0][0]
    assert first.item() == pytest.approx(math.log(0.665241), abs=1e-5)


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
