"""Divergences between teacher and student, and their mix with the hard labels.

Every divergence works on logits ``(..., V)``: padded ``(B, T, V)`` or flattened ``(N, V)``, so a
caller may cut a long batch into chunks of tokens and never hold all logits. A mask ``(...)`` is
bool, True = a real token; other positions give 0 without a gradient. Teacher tensors are constants.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_choice,
    check_count,
    check_finite,
    check_in_range,
    check_mask,
    check_positive,
    check_shape,
)
from tasks.algorithms.logprobs import log_softmax
from tasks.algorithms.masking import masked_sum, sanitize
from tasks.errors import DataError

Direction = Literal["forward", "reverse"]
# The tail mass cannot be known below fp32 resolution; the floor keeps its logarithm and its
# gradient finite.
TAIL_FLOOR = 1e-7
LOGPROB_FLOOR = -1e4


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
    check_shape("teacher_topk_ids", teacher_topk_ids, teacher_topk_logprobs.shape)
    check_shape(
        "student_logits", student_logits, (*teacher_topk_ids.shape[:-1], student_logits.shape[-1])
    )
    real = _position_mask(student_logits, mask)
    kept = real.unsqueeze(-1).expand(teacher_topk_ids.shape)
    vocabulary, ids = student_logits.shape[-1], torch.where(kept, teacher_topk_ids, 0)
    if ids.numel() and not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise DataError(
            f"teacher token ids from {int(ids.min())} to {int(ids.max())}",
            f"ids from 0 to {vocabulary - 1}, the student's vocabulary",
            "use teacher and student with the same tokenizer",
        )
    check_finite("teacher_topk_logprobs", teacher_topk_logprobs, kept)
    width = teacher_topk_ids.shape[-1]
    # A harmless uniform teacher stands in at positions that do not count.
    teacher = sanitize(teacher_topk_logprobs.detach(), kept, fill=-math.log(vocabulary))
    student = log_softmax(student_logits, temperature=tau, mask=real).gather(-1, ids)
    student = student.clamp(min=LOGPROB_FLOOR)
    if width < vocabulary:
        teacher = torch.cat([teacher, tail_logprob(teacher).unsqueeze(-1)], dim=-1)
        student = torch.cat([student, tail_logprob(student).unsqueeze(-1)], dim=-1)
    return _finish("topk_tail_kl", _directed_kl(teacher, student, direction), real)


def full_kl(
    teacher_logits: Tensor,
    student_logits: Tensor,
    *,
    tau: float,
    direction: Direction = "forward",
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the KL over the whole vocabulary, both sides at tau, without the factor tau^2.

    Args:
        teacher_logits, student_logits: ``(..., V)``.
        direction: forward = KL(teacher || student) = ``sum p_T log(p_T / p_S)``, reverse =
            KL(student || teacher).
        mask: ``(...)`` bool, True = a real token.

    Returns:
        ``(...)`` in nats per token.

    Raises:
        DataError: shapes that differ. TrainingError: a real position that is not finite.
    """
    check_choice("direction", direction, get_args(Direction))
    teacher, student, real = _both_logprobs(teacher_logits, student_logits, tau, mask)
    return _finish("full_kl", _directed_kl(teacher, student, direction), real)


def jsd(
    teacher_logits: Tensor,
    student_logits: Tensor,
    *,
    beta: float,
    tau: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence as defined by Agarwal et al. 2024.

    ``beta KL(T || M) + (1 - beta) KL(S || M)`` with ``M = beta T + (1 - beta) S``. The formula is
    0 at beta 0 and 1, where the paper's limits are taken instead: beta 0 = forward KL(T || S),
    beta 1 = reverse KL(S || T). The divergence is therefore not continuous there.

    Args:
        teacher_logits, student_logits: ``(..., V)``; beta: from 0 to 1, the teacher's share of the
            mixture.
        mask: ``(...)`` bool, True = a real token.

    Returns:
        ``(...)`` in nats per token.

    Raises:
        ConfigError: beta out of range. DataError: shapes that differ. TrainingError: not finite.
    """
    check_in_range("beta", beta, 0.0, 1.0)
    if beta in (0.0, 1.0):
        direction: Direction = "forward" if beta == 0.0 else "reverse"
        return full_kl(teacher_logits, student_logits, tau=tau, direction=direction, mask=mask)
    teacher, student, real = _both_logprobs(teacher_logits, student_logits, tau, mask)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    value = beta * _directed_kl(teacher, mixture, "forward")
    value = value + (1.0 - beta) * _directed_kl(student, mixture, "forward")
    return _finish("jsd", value, real)


def soft_hard_loss(
    token_kl: Tensor,
    token_nll: Tensor,
    mask: Tensor,
    *,
    alpha: float,
    tau: float,
    total_tokens: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mix soft and hard loss (Hinton et al. 2015), averaged over the tokens of the whole step.

    ``sum(alpha tau^2 KL + (1 - alpha) NLL) / total_tokens``: tau^2 keeps the weight of the soft
    gradient, which shrinks by 1 / tau^2.

    Args:
        token_kl: ``(B, T)`` or ``(N,)`` divergence at tau, WITHOUT tau^2.
        token_nll: same shape, ``-log p_student(label)`` at temperature 1.
        mask: same shape, bool, True = a real response token: neither prompt nor padding.
        alpha: share of the soft loss, from 0 to 1.
        total_tokens: real tokens over all micro-batches and ranks of the step.

    Returns:
        the loss and ``soft_sum`` (with tau^2), ``kl_sum`` (without), ``hard_sum``, ``n_tokens``.

    Raises:
        DataError: shapes that differ or no token. TrainingError: a real position that is not
        finite.
    """
    check_in_range("alpha", alpha, 0.0, 1.0)
    check_positive("tau", tau)
    check_count("total_tokens", total_tokens)
    check_shape("token_nll", token_nll, token_kl.shape)
    check_mask(mask, token_kl.shape)
    check_finite("token_kl", token_kl, mask)
    check_finite("token_nll", token_nll, mask)
    kl_sum, hard_sum = masked_sum(token_kl, mask), masked_sum(token_nll, mask)
    soft_sum = tau**2 * kl_sum
    metrics = {
        "soft_sum": soft_sum.detach(),
        "kl_sum": kl_sum.detach(),
        "hard_sum": hard_sum.detach(),
        "n_tokens": mask.sum().float(),
    }
    return (alpha * soft_sum + (1.0 - alpha) * hard_sum) / total_tokens, metrics


def _directed_kl(teacher: Tensor, student: Tensor, direction: Direction) -> Tensor:
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    return (first.exp() * (first - second)).sum(dim=-1)


def _both_logprobs(
    teacher_logits: Tensor, student_logits: Tensor, tau: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("student_logits", student_logits, teacher_logits.shape)
    real = _position_mask(student_logits, mask)
    teacher = log_softmax(teacher_logits.detach(), temperature=tau, mask=real)
    student = log_softmax(student_logits, temperature=tau, mask=real)
    # A forbidden token has the logit -inf; the floor leaves its probability at 0 and its products
    # finite.
    return teacher.clamp(min=LOGPROB_FLOOR), student.clamp(min=LOGPROB_FLOOR), real


def _position_mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    check_mask(mask, logits.shape[:-1])
    return mask


def _finish(name: str, values: Tensor, mask: Tensor) -> Tensor:
    check_finite(name, values, mask)
    return sanitize(values, mask)
