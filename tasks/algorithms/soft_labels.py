"""Soft labels that do not hold the whole vocabulary: a teacher's k best tokens with a tail, or k
tokens that it drew.

Shapes and masks are those of `distillation_losses`; teacher tensors are constants.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_choice,
    check_count,
    check_finite,
    check_in_range,
    check_positive,
    check_shape,
)
from tasks.algorithms.distillation_losses import (
    LOGPROB_FLOOR,
    Direction,
    directed_kl,
    finish,
    mixture_divergence,
    real_positions,
)
from tasks.algorithms.logprobs import log_softmax
from tasks.algorithms.masking import sanitize
from tasks.errors import DataError

# The tail mass cannot be known below fp32 resolution; the floor keeps its logarithm and its
# gradient finite.
TAIL_FLOOR = 1e-7


class TopK(NamedTuple):
    """Hold a teacher's most probable tokens; the tail is implied: ``1 - sum exp(logprobs)``.

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

    Raises:
        DataError: k outside 1 to V.
    """
    if not 1 <= k <= teacher_logits.shape[-1]:
        raise DataError(
            f"k is {k} with a vocabulary of {teacher_logits.shape[-1]}",
            "k from 1 to the vocabulary size",
            "lower the number of stored teacher tokens",
        )
    logprobs = log_softmax(teacher_logits.detach(), temperature=tau)
    values, ids = logprobs.topk(k, dim=-1)
    return TopK(ids, values.clamp(min=LOGPROB_FLOOR))


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
    teacher_topk_logprobs: Tensor,
    teacher_topk_ids: Tensor,
    student_logits: Tensor,
    *,
    tau: float,
    direction: Direction = "forward",
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the KL over the teacher's k tokens and one bucket for all the others.

    A lower bound of the full KL, and equal to it where K = V (then there is no bucket). Without
    the factor tau^2.

    Args:
        teacher_topk_logprobs: ``(..., K)`` at the same tau, see `topk_with_tail`.
        teacher_topk_ids: ``(..., K)`` long, distinct, from 0 to V - 1.
        student_logits: ``(..., V)`` with gradient.
        tau: temperature, above 0.
        direction: forward = KL(teacher || student), reverse = KL(student || teacher).
        mask: ``(...)`` bool, True = a real token.

    Returns:
        ``(...)`` in nats per token.

    Raises:
        DataError: shapes that differ, or an id outside the student's vocabulary.
        TrainingError: a real position that is not finite.
    """
    check_choice("direction", direction, get_args(Direction))
    top = TopK(teacher_topk_ids, teacher_topk_logprobs)
    teacher, student, real = _buckets(top, student_logits, tau, mask)
    return finish("topk_tail_kl", directed_kl(teacher, student, direction), real)


def topk_tail_jsd(
    teacher_topk_logprobs: Tensor,
    teacher_topk_ids: Tensor,
    student_logits: Tensor,
    *,
    beta: float,
    tau: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the divergence of `jsd` over the teacher's k tokens and one bucket for the others.

    A lower bound of `jsd`, and equal to it where K = V; tensors, result and errors as in
    `topk_tail_kl`.

    Args:
        beta: from 0 to 1, the teacher's share of the mixture; at 0 and 1 the KLs of `jsd`.

    Raises:
        ConfigError: beta out of range.
    """
    check_in_range("beta", beta, 0.0, 1.0)
    top = TopK(teacher_topk_ids, teacher_topk_logprobs)
    teacher, student, real = _buckets(top, student_logits, tau, mask)
    return finish("topk_tail_jsd", mixture_divergence(teacher, student, beta), real)


def sampled_kl(
    drawn_logprobs: Tensor,
    drawn_ids: Tensor,
    student_logits: Tensor,
    *,
    tau: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(teacher || student) from k tokens that the teacher drew, each with weight 1 / k.

    ``mean_j (log p_T(x_j) - log p_S(x_j))`` with ``x_j ~ p_T``: unbiased in value and in gradient,
    so a single position may give less than 0. Without the factor tau^2.

    Args:
        drawn_logprobs: ``(..., K)`` of the teacher at the same tau, see `draw_tokens`.
        drawn_ids: ``(..., K)`` long, with repetitions, from 0 to V - 1.
        student_logits: ``(..., V)`` with gradient.
        tau: temperature, above 0.
        mask: ``(...)`` bool, True = a real token.

    Returns:
        ``(...)`` in nats per token.

    Raises:
        DataError: shapes that differ, or an id outside the student's vocabulary.
        TrainingError: a real position that is not finite.
    """
    top = TopK(drawn_ids, drawn_logprobs)
    teacher, student, real = _at_teacher_ids(top, student_logits, tau, mask)
    return finish("sampled_kl", (teacher - student).mean(dim=-1), real)


def draw_tokens(
    teacher_logits: Tensor, *, k: int, tau: float, generator: torch.Generator | None = None
) -> TopK:
    """Draw k tokens with replacement from ``softmax(teacher_logits / tau)``.

    Args:
        teacher_logits: ``(N, V)``, cut to the tokenizer's size.
        k: at least 1.
        tau: temperature, above 0; the same for the student.
        generator: of the device of the logits.

    Returns:
        ids and log-probabilities ``(N, K)``.
    """
    check_count("k", k)
    logprobs = log_softmax(teacher_logits.detach(), temperature=tau)
    ids = torch.multinomial(logprobs.exp(), k, replacement=True, generator=generator)
    return TopK(ids, logprobs.gather(-1, ids))


def _buckets(
    top: TopK, student_logits: Tensor, tau: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the teacher's tokens and of the tail, ``(..., K + 1)``, of
    teacher and student; no tail where K = V."""
    teacher, student, real = _at_teacher_ids(top, student_logits, tau, mask)
    if top.ids.shape[-1] < student_logits.shape[-1]:
        teacher = torch.cat([teacher, tail_logprob(teacher).unsqueeze(-1)], dim=-1)
        student = torch.cat([student, tail_logprob(student).unsqueeze(-1)], dim=-1)
    return teacher, student, real


def _at_teacher_ids(
    top: TopK, student_logits: Tensor, tau: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of teacher and student at the teacher's ids, ``(..., K)``, and
    the real positions."""
    check_positive("tau", tau)
    check_shape("teacher_ids", top.ids, top.logprobs.shape)
    vocabulary = student_logits.shape[-1]
    check_shape("student_logits", student_logits, (*top.ids.shape[:-1], vocabulary))
    real = real_positions(student_logits, mask)
    kept = real.unsqueeze(-1).expand(top.ids.shape)
    ids = torch.where(kept, top.ids, 0)
    if ids.numel() and not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise DataError(
            f"teacher token ids from {int(ids.min())} to {int(ids.max())}",
            f"ids from 0 to {vocabulary - 1}, the student's vocabulary",
            "use teacher and student with the same tokenizer",
        )
    check_finite("teacher_logprobs", top.logprobs, kept)
    # A harmless uniform teacher stands in at positions that do not count.
    teacher = sanitize(top.logprobs.detach(), kept, fill=-math.log(vocabulary))
    logits = student_logits.float()
    if mask is not None:
        logits = torch.where(mask.unsqueeze(-1), logits, torch.zeros((), device=logits.device))
    scaled = logits / tau if tau != 1.0 else logits
    # Only k of V log-probabilities are needed: the normaliser alone costs one pass over all.
    student = scaled.gather(-1, ids) - scaled.logsumexp(dim=-1, keepdim=True)
    return teacher, student.clamp(min=LOGPROB_FLOOR), real
