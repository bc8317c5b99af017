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

from tasks.algorithms.logprobs import log_softmax
from tasks.algorithms.masking import (
    check_choice,
    check_count,
    check_finite,
    check_in_range,
    check_mask,
    check_positive,
    check_shape,
    masked_sum,
    sanitize,
)
from tasks.errors import DataError

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
    check_shape("rewards", rewards, teacher_margin.shape)
    own = torch.isnan(teacher_margin)
    stored = teacher_margin[~own]
    likes = torch.ones_like(rewards, dtype=torch.float64)
    likes[~own] = _standardised(stored.double()).sigmoid()
    pays = _standardised(rewards.double()).sigmoid()
    weights = likes * pays + (1.0 - likes) * (1.0 - pays)
    return (weights / weights.mean()).float()


def _standardised(values: Tensor) -> Tensor:
    spread = values.std(unbiased=False) if values.numel() else torch.zeros(())
    return (values - values.mean()) / spread if float(spread) > 0.0 else torch.zeros_like(values)


#
# Soft labels that do not hold the whole vocabulary: a teacher's k best tokens with a tail, or k
# tokens that it drew.
#
# Shapes and masks are those of `distillation_losses`; teacher tensors are constants.

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
