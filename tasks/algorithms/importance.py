"""Importance weights that correct for the policy that wrote the data (the behaviour policy)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_choice,
    check_finite,
    check_frozen,
    check_in_range,
    check_positive,
    check_rank,
    check_shape,
    check_token_values,
)
from tasks.algorithms.masking import count_metrics, masked_sum, sanitize

RatioLevel = Literal["sequence", "geometric", "token"]
LOG_RATIO_LIMIT = 20.0


class ClampedRatio(NamedTuple):
    """Hold a ratio together with the log-ratio that it was made of.

    Attributes:
        log_ratio: clamped to +-limit.
        ratio: ``exp(log_ratio)``, always of the clamped one.
        clamped: bool, True = the limit applied.
    """

    log_ratio: Tensor
    ratio: Tensor
    clamped: Tensor


def clamp_log_ratio(log_ratio: Tensor, *, limit: float = LOG_RATIO_LIMIT) -> ClampedRatio:
    """Clamp a log-ratio so that its exponential is finite, and say where.

    Args:
        log_ratio: any shape, in nats, without NaN. Outside the limit the gradient is zero.
        limit: in nats, above 0.
    """
    check_positive("limit", limit)
    values = log_ratio.float()
    clamped = values.clamp(-limit, limit)
    return ClampedRatio(clamped, clamped.exp(), values.detach().abs() > limit)


def sequence_log_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel = "sequence",
) -> Tensor:
    """Return ``log(pi / mu)`` of the stored responses.

    With ``d_t = logprob_t - behavior_logprob_t``:

    - sequence: ``sum_t d_t``, the exact ratio of the whole response, ``(B,)``
    - geometric: ``mean_t d_t``, the geometric mean of the token ratios, ``(B,)``
    - token: ``d_t``, ``(B, T)``, 0 under the mask

    Args:
        logprobs: ``(B, T)`` of the frozen proximal policy (never of the policy under training,
            whose gradient must not flow into a weight).
        behavior_logprobs: ``(B, T)`` of the behaviour policy.
        mask: ``(B, T)`` bool, True = a real response token; an empty row gives 0.

    Raises:
        TrainingError: a log-probability that is not finite, or that carries a gradient.
    """
    check_choice("level", level, get_args(RatioLevel))
    check_token_values(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    for name, values in (("logprobs", logprobs), ("behavior_logprobs", behavior_logprobs)):
        check_frozen(name, values)
        check_finite(name, values, mask)
    token = sanitize(logprobs.float() - behavior_logprobs.float(), mask)
    if level == "token":
        return token
    total = token.sum(dim=1)
    return total if level == "sequence" else total / mask.sum(dim=1).clamp(min=1)


def truncated_importance_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel,
    cap: float,
) -> Tensor:
    """Return truncated weights, split by the sign of the advantage (Le Roux et al. 2025).

    ``w = min(ratio, cap)`` where ``A >= 0`` and ``w = min(ratio, 1)`` where ``A < 0``: capped from
    above only, so a bad response that the policy no longer gives fades out, and is never pushed
    down harder than once.

    Args:
        log_ratio: from `sequence_log_ratio` at the same level: ``(B,)``, or ``(B, T)`` for tokens.
        advantages: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        cap: at least 1.

    Returns:
        ``(B, T)`` fp32 weights without a gradient, 0 under the mask.

    Raises:
        DataError: a shape that does not belong to the level.
        TrainingError: a log-ratio or advantage that is not finite.
    """
    check_token_values(mask, advantages=advantages)
    check_in_range("cap", cap, 1.0, math.exp(LOG_RATIO_LIMIT))
    check_finite("advantages", advantages, mask)
    token_ratio = _as_token_values(log_ratio.detach(), mask, level)
    log_cap = torch.where(sanitize(advantages.detach(), mask) < 0, 0.0, math.log(cap))
    return sanitize(torch.minimum(token_ratio, log_cap).exp(), mask)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return ``(sum w)^2 / sum w^2``: how many equal samples the weights are worth (Kish 1965).

    Args:
        weights: ``(N,)``, at least 0. All zero, or none, is worth 0.
    """
    check_rank("weights", weights, 1)
    check_finite("weights", weights)
    values = weights.detach().float()
    return effective_sample_size_from_sums(values.sum(), values.square().sum())


def effective_sample_size_from_sums(weight_sum: Tensor, weight_sq_sum: Tensor) -> Tensor:
    """Return the effective sample size from sums over micro-batches and ranks; 0 for no weight."""
    ratio = weight_sum.square() / weight_sq_sum
    return torch.where(weight_sq_sum > 0, ratio, torch.zeros_like(ratio))


def effective_sample_size_from_log(log_ratio: Tensor) -> Tensor:
    """Return the effective sample size of uncapped weights; in log space no ratio overflows.

    Args:
        log_ratio: ``(N,)`` in nats, N at least 1.
    """
    check_rank("log_ratio", log_ratio, 1)
    check_finite("log_ratio", log_ratio)
    values = log_ratio.detach().float()
    return (2 * values.logsumexp(0) - (2 * values).logsumexp(0)).exp()


def weight_metrics(
    log_ratio: Tensor, weights: Tensor, mask: Tensor, *, level: RatioLevel, cap: float
) -> dict[str, Tensor]:
    """Describe weights by sums that add up over micro-batches.

    The unit is a response (its tokens' mean weight), or a token at level token. ``ess = sum^2 /
    sq_sum``, see `effective_sample_size_from_sums`; the raw sums take the ratio clamped to
    exp(+-20) and count the clamped units.

    Args:
        log_ratio: as handed to `truncated_importance_weights`; weights: ``(B, T)``, what it
            returned.
        mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``weight_sum``, ``weight_sq_sum``, ``weight_max``, ``raw_weight_sum``,
        ``raw_weight_sq_sum``, ``log_ratio_sum`` (of the same clamped log-ratio), ``clamped_sum``,
        ``above_cap_sum``, ``n_weights``, ``n_tokens``, ``n_sequences``.
    """
    check_token_values(mask, weights=weights)
    ratios = _as_token_values(log_ratio.detach(), mask, level)
    if level == "token":
        used, unit_log_ratio = weights.detach().float()[mask], ratios[mask]
    else:
        kept = mask.any(dim=1)
        lengths = mask.sum(dim=1)[kept]
        used = masked_sum(weights.detach(), mask, dim=1)[kept] / lengths
        unit_log_ratio = log_ratio.detach().float()[kept]
    raw = clamp_log_ratio(unit_log_ratio)
    return {
        "weight_sum": used.sum(),
        "weight_sq_sum": used.square().sum(),
        "weight_max": used.amax() if used.numel() else used.sum(),
        "raw_weight_sum": raw.ratio.sum(),
        "raw_weight_sq_sum": raw.ratio.square().sum(),
        "log_ratio_sum": raw.log_ratio.sum(),
        "clamped_sum": raw.clamped.sum().float(),
        "above_cap_sum": (unit_log_ratio > math.log(cap)).sum().float(),
        "n_weights": torch.tensor(float(used.numel()), device=used.device),
        **count_metrics(mask),
    }


def _as_token_values(log_ratio: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    check_choice("level", level, get_args(RatioLevel))
    if level == "token":
        check_shape("log_ratio (level token)", log_ratio, mask.shape)
        spread = log_ratio
    else:
        check_shape(f"log_ratio (level {level})", log_ratio, mask.shape[:1])
        spread = log_ratio.unsqueeze(1).expand(mask.shape)
    check_finite("log_ratio", spread, mask)
    return sanitize(spread, mask)
