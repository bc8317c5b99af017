"""Divergences between teacher and student, and their mix with the hard labels.

Every divergence works on logits ``(..., V)``: padded ``(B, T, V)`` or flattened ``(N, V)``, so a
caller may cut a long batch into chunks of tokens and never hold all logits. A mask ``(...)`` is
bool, True = a real token; other positions give 0 without a gradient. Teacher tensors are constants.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

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

Direction = Literal["forward", "reverse"]
LOGPROB_FLOOR = -1e4


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
    return finish("full_kl", directed_kl(teacher, student, direction), real)


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
    teacher, student, real = _both_logprobs(teacher_logits, student_logits, tau, mask)
    return finish("jsd", mixture_divergence(teacher, student, beta), real)


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
        token_kl: ``(B, T)`` or ``(N,)`` divergence at tau, WITHOUT tau^2.
        token_nll: same shape, ``-log p_student(label)`` at temperature 1.
        alpha: share of the soft loss, from 0 to 1.
        weights: same shape, of the token's response, mean 1 over the data; None = 1.

    Returns:
        same shape.

    Raises:
        ConfigError: alpha or tau out of range. DataError: shapes that differ.
    """
    check_in_range("alpha", alpha, 0.0, 1.0)
    check_positive("tau", tau)
    check_shape("token_nll", token_nll, token_kl.shape)
    mixed = alpha * tau**2 * token_kl + (1.0 - alpha) * token_nll
    if weights is None:
        return mixed
    check_shape("weights", weights, token_kl.shape)
    return weights * mixed


def soft_hard_mean(
    token_loss: Tensor,
    token_kl: Tensor,
    token_nll: Tensor,
    mask: Tensor,
    *,
    tau: float,
    total_tokens: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Average what `soft_hard_tokens` gives over the tokens of the whole step.

    Args:
        token_loss, token_kl, token_nll: ``(B, T)`` or ``(N,)``, see there.
        mask: same shape, bool, True = a real response token: neither prompt nor padding.
        total_tokens: real tokens over all micro-batches and ranks of the step.

    Returns:
        ``sum(token_loss) / total_tokens``, and ``soft_sum`` (with tau^2), ``kl_sum`` (without),
        ``hard_sum``, ``n_tokens``, none of them weighted.

    Raises:
        DataError: shapes that differ or no token. TrainingError: a real position that is not
        finite.
    """
    check_count("total_tokens", total_tokens)
    check_mask(mask, token_loss.shape)
    for name, values in (("token_kl", token_kl), ("token_nll", token_nll)):
        check_shape(name, values, token_loss.shape)
        check_finite(name, values, mask)
    kl_sum = masked_sum(token_kl, mask).detach()
    metrics = {
        "soft_sum": tau**2 * kl_sum,
        "kl_sum": kl_sum,
        "hard_sum": masked_sum(token_nll, mask).detach(),
        "n_tokens": mask.sum().float(),
    }
    return masked_sum(token_loss, mask) / total_tokens, metrics


def mixture_divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return `jsd` of log-probabilities ``(..., V)``."""
    if beta in (0.0, 1.0):
        return directed_kl(teacher, student, "forward" if beta == 0.0 else "reverse")
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    value = beta * directed_kl(teacher, mixture, "forward")
    return value + (1.0 - beta) * directed_kl(student, mixture, "forward")


def directed_kl(teacher: Tensor, student: Tensor, direction: Direction) -> Tensor:
    """Return the KL of log-probabilities ``(..., V)``, shape ``(...)``."""
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    return (first.exp() * (first - second)).sum(dim=-1)


def _both_logprobs(
    teacher_logits: Tensor, student_logits: Tensor, tau: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("student_logits", student_logits, teacher_logits.shape)
    real = real_positions(student_logits, mask)
    teacher = log_softmax(teacher_logits.detach(), temperature=tau, mask=real)
    student = log_softmax(student_logits, temperature=tau, mask=real)
    # A forbidden token has the logit -inf; the floor leaves its probability at 0 and its products
    # finite.
    return teacher.clamp(min=LOGPROB_FLOOR), student.clamp(min=LOGPROB_FLOOR), real


def real_positions(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of logits ``(..., V)``; without one, all positions are real."""
    if mask is None:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    check_mask(mask, logits.shape[:-1])
    return mask


def finish(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return a divergence that is finite at real positions and 0 elsewhere."""
    check_finite(name, values, mask)
    return sanitize(values, mask)
