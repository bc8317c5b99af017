"""Divergences between teacher and student, their mix with the hard labels, and soft labels.

Every divergence works on logits ``(..., V)`` of real tokens only, so a caller may cut a long batch
into chunks of tokens and never hold all logits. It is in nats per token, at the temperature tau on
both sides, without the factor tau^2. Teacher tensors are constants. A NaN makes the loss NaN, which
ends the step.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.logprobs import log_softmax

Direction = Literal["forward", "reverse"]
# A forbidden token has the logit -inf; the floor leaves its probability at 0 and its products
# finite.
LOGPROB_FLOOR = -1e4
# The tail mass cannot be known below fp32 resolution; the floor keeps its logarithm and its
# gradient finite.
TAIL_FLOOR = 1e-7


def full_kl(
    teacher_logits: Tensor, student_logits: Tensor, *, tau: float, direction: Direction
) -> Tensor:
    """Compute the KL over the whole vocabulary.

    Args:
        teacher_logits, student_logits: ``(..., V)``.
        direction: forward = KL(teacher || student) = ``sum p_T log(p_T / p_S)``, reverse =
            KL(student || teacher).

    Returns:
        ``(...)``.
    """
    return _directed_kl(*_both_logprobs(teacher_logits, student_logits, tau), direction)


def jsd(teacher_logits: Tensor, student_logits: Tensor, *, beta: float, tau: float) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence as defined by Agarwal et al. 2024.

    ``beta KL(T || M) + (1 - beta) KL(S || M)`` with ``M = beta T + (1 - beta) S``. The formula is
    0 at beta 0 and 1, where the paper's limits are taken instead: beta 0 = forward KL(T || S),
    beta 1 = reverse KL(S || T). The divergence is therefore not continuous there.

    Args:
        teacher_logits, student_logits: ``(..., V)``; beta: from 0 to 1, the teacher's share of the
            mixture.

    Returns:
        ``(...)``.
    """
    return _mixture_divergence(*_both_logprobs(teacher_logits, student_logits, tau), beta)


def soft_hard_tokens(
    token_kl: Tensor,
    token_nll: Tensor,
    *,
    alpha: float,
    tau: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Mix soft and hard loss of each token (Hinton et al. 2015).

    ``w (alpha tau^2 KL + (1 - alpha) NLL)``: tau^2 keeps the weight of the soft gradient, which
    shrinks by 1 / tau^2.

    Args:
        token_kl: ``(N,)`` divergence at tau, WITHOUT tau^2.
        token_nll: ``(N,)``, ``-log p_student(label)`` at temperature 1.
        alpha: share of the soft loss, from 0 to 1.
        weights: ``(N,)`` of the token's response, mean 1 over the data; None = 1.

    Returns:
        ``(N,)``.
    """
    mixed = alpha * tau**2 * token_kl + (1.0 - alpha) * token_nll
    return mixed if weights is None else weights * mixed


def soft_hard_mean(
    token_loss: Tensor, token_kl: Tensor, token_nll: Tensor, *, tau: float, total_tokens: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Average what `soft_hard_tokens` gives over the tokens of the whole step.

    Args:
        token_loss, token_kl, token_nll: ``(N,)``, see there; of real response tokens only.
        total_tokens: real tokens over all micro-batches and ranks of the step.

    Returns:
        ``sum(token_loss) / total_tokens``, and ``soft_sum`` (with tau^2), ``kl_sum`` (without),
        ``hard_sum``, ``n_tokens``, none of them weighted.
    """
    kl_sum = token_kl.detach().float().sum()
    return token_loss.float().sum() / total_tokens, {
        "soft_sum": tau**2 * kl_sum,
        "kl_sum": kl_sum,
        "hard_sum": token_nll.detach().float().sum(),
        "n_tokens": torch.tensor(float(len(token_loss)), device=token_loss.device),
    }


def _mixture_divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return `jsd` of log-probabilities ``(..., V)``."""
    if beta in (0.0, 1.0):
        return _directed_kl(teacher, student, "forward" if beta == 0.0 else "reverse")
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    value = beta * _directed_kl(teacher, mixture, "forward")
    return value + (1.0 - beta) * _directed_kl(student, mixture, "forward")


def _directed_kl(teacher: Tensor, student: Tensor, direction: Direction) -> Tensor:
    """Return the KL of log-probabilities ``(..., V)``, shape ``(...)``."""
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    return (first.exp() * (first - second)).sum(dim=-1)


def _both_logprobs(
    teacher_logits: Tensor, student_logits: Tensor, tau: float
) -> tuple[Tensor, Tensor]:
    assert student_logits.shape == teacher_logits.shape
    teacher = log_softmax(teacher_logits.detach(), tau).clamp(min=LOGPROB_FLOOR)
    return teacher, log_softmax(student_logits, tau).clamp(min=LOGPROB_FLOOR)


# How far a teacher and a reward model agree about responses.


def agreement_weights(teacher_margin: Tensor, rewards: Tensor) -> Tensor:
    """Weigh responses by how far teacher and reward model agree about them.

    With ``P = sigmoid(z)`` of either's opinion in standard deviations over the responses, the
    weight is ``P_T P_R + (1 - P_T)(1 - P_R)``, the chance that two judges who are right with these
    probabilities both call the response better, or both worse, than the average; scaled to mean 1.

    Args:
        teacher_margin: ``(N,)`` how much the teacher likes a response more than the base does;
            NaN = it wrote the response, and so likes it for certain.
        rewards: ``(N,)`` of the reward model.

    Returns:
        ``(N,)`` fp32.
    """
    assert rewards.shape == teacher_margin.shape
    own = torch.isnan(teacher_margin)
    likes = torch.ones_like(rewards, dtype=torch.float64)
    likes[~own] = _standardised(teacher_margin[~own].double()).sigmoid()
    pays = _standardised(rewards.double()).sigmoid()
    weights = likes * pays + (1.0 - likes) * (1.0 - pays)
    return (weights / weights.mean()).float()


def _standardised(values: Tensor) -> Tensor:
    spread = values.std(unbiased=False) if values.numel() else torch.zeros(())
    return (values - values.mean()) / spread if float(spread) > 0.0 else torch.zeros_like(values)


# Soft labels that do not hold the whole vocabulary: a teacher's k best tokens with a tail, or k
# tokens that it drew.


class TopK(NamedTuple):
    """Hold some of a teacher's tokens; the tail of its best is implied: ``1 - sum exp(logprobs)``.

    Attributes:
        ids: ``(..., K)`` long.
        logprobs: ``(..., K)`` fp32 in nats at the temperature tau.
    """

    ids: Tensor
    logprobs: Tensor


def topk_with_tail(teacher_logits: Tensor, *, k: int, tau: float) -> TopK:
    """Return the k most probable tokens of ``softmax(teacher_logits / tau)``.

    Their log-probabilities are not renormalised: what is missing to 1 is the tail.

    Args:
        teacher_logits: ``(..., V)``, cut to the tokenizer's size.
        k: from 1 to V.
        tau: temperature, above 0; the same for the student.
    """
    values, ids = log_softmax(teacher_logits.detach(), tau).topk(k, dim=-1)
    return TopK(ids, values.clamp(min=LOGPROB_FLOOR))


def draw_tokens(teacher_logits: Tensor, *, k: int, tau: float, generator: torch.Generator) -> TopK:
    """Draw k tokens with replacement from ``softmax(teacher_logits / tau)``.

    Args:
        teacher_logits: ``(N, V)``, cut to the tokenizer's size.
        k: at least 1.
        tau: temperature, above 0; the same for the student.
        generator: of the device of the logits.

    Returns:
        ids and log-probabilities ``(N, K)``.
    """
    logprobs = log_softmax(teacher_logits.detach(), tau)
    ids = torch.multinomial(logprobs.exp(), k, replacement=True, generator=generator)
    return TopK(ids, logprobs.gather(-1, ids))


def tail_logprob(logprobs: Tensor) -> Tensor:
    """Return ``log(1 - sum exp(logprobs))``, at least log(1e-7).

    Args:
        logprobs: ``(..., K)`` of some tokens of one distribution.

    Returns:
        ``(...)``; finite, with a finite gradient, also where rounding brings the sum to 1 or above.
    """
    mass = torch.logsumexp(logprobs.float(), dim=-1).clamp(max=-TAIL_FLOOR)
    # Each formula is exact on its half, and both have finite gradients on all of it.
    return torch.where(
        mass > -math.log(2.0), torch.log(-torch.expm1(mass)), torch.log1p(-torch.exp(mass))
    )


def topk_tail_kl(
    teacher_logprobs: Tensor,
    teacher_ids: Tensor,
    student_logits: Tensor,
    *,
    tau: float,
    direction: Direction,
) -> Tensor:
    """Compute the KL over the teacher's k tokens and one bucket for all the others.

    A lower bound of the full KL, and equal to it where K = V (then there is no bucket).

    Args:
        teacher_logprobs: ``(..., K)`` at the same tau, see `topk_with_tail`.
        teacher_ids: ``(..., K)`` long, distinct, from 0 to V - 1.
        student_logits: ``(..., V)`` with gradient.
        tau: temperature, above 0.
        direction: see `full_kl`.

    Returns:
        ``(...)``.
    """
    teacher, student = _buckets(teacher_logprobs, teacher_ids, student_logits, tau)
    return _directed_kl(teacher, student, direction)


def topk_tail_jsd(
    teacher_logprobs: Tensor,
    teacher_ids: Tensor,
    student_logits: Tensor,
    *,
    beta: float,
    tau: float,
) -> Tensor:
    """Compute the divergence of `jsd` over the teacher's k tokens and one bucket for the others.

    A lower bound of `jsd`, and equal to it where K = V; tensors as in `topk_tail_kl`.
    """
    teacher, student = _buckets(teacher_logprobs, teacher_ids, student_logits, tau)
    return _mixture_divergence(teacher, student, beta)


def sampled_kl(
    drawn_logprobs: Tensor, drawn_ids: Tensor, student_logits: Tensor, *, tau: float
) -> Tensor:
    """Estimate KL(teacher || student) from k tokens that the teacher drew, each with weight 1 / k.

    ``mean_j (log p_T(x_j) - log p_S(x_j))`` with ``x_j ~ p_T``: unbiased in value and in gradient,
    so a single position may give less than 0.

    Args:
        drawn_logprobs: ``(..., K)`` of the teacher at the same tau, see `draw_tokens`.
        drawn_ids: ``(..., K)`` long, with repetitions, from 0 to V - 1.
        student_logits: ``(..., V)`` with gradient.
        tau: temperature, above 0.

    Returns:
        ``(...)``.
    """
    student = _student_logprobs(student_logits, drawn_ids, tau)
    return (drawn_logprobs.float() - student).mean(dim=-1)


def _buckets(
    teacher_logprobs: Tensor, teacher_ids: Tensor, student_logits: Tensor, tau: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the teacher's tokens and of the tail, ``(..., K + 1)``, of
    teacher and student; no tail where K = V."""
    teacher = teacher_logprobs.float()
    student = _student_logprobs(student_logits, teacher_ids, tau)
    if teacher_ids.shape[-1] < student_logits.shape[-1]:
        teacher = torch.cat([teacher, tail_logprob(teacher).unsqueeze(-1)], dim=-1)
        student = torch.cat([student, tail_logprob(student).unsqueeze(-1)], dim=-1)
    return teacher, student


def _student_logprobs(student_logits: Tensor, ids: Tensor, tau: float) -> Tensor:
    """Return the student's log-probabilities at the teacher's ids, ``(..., K)``."""
    logits = student_logits.float()
    scaled = logits / tau if tau != 1.0 else logits
    # Only k of V log-probabilities are needed: the normaliser alone costs one pass over all.
    picked = scaled.gather(-1, ids) - scaled.logsumexp(dim=-1, keepdim=True)
    return picked.clamp(min=LOGPROB_FLOOR)
