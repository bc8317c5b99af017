"""Losses of the policy and of the critic over stored responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.importance import ClampedRatio, clamp_log_ratio
from tasks.algorithms.kl import KLKind, kl_per_token
from tasks.algorithms.masking import (
    Totals,
    aggregate,
    check_count,
    check_finite,
    check_frozen,
    check_in_range,
    check_positive,
    check_rank,
    check_shape,
    check_token_values,
    count_metrics,
    masked_sum,
    sanitize,
)
from tasks.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class ClipRange:
    """Hold the bounds of the ratio of the current to the proximal policy.

    Attributes:
        low, high: the ratio is clipped to ``[1 - low, 1 + high]``.
        dual: bound c of the loss ``-c A`` for negative advantages (Ye et al. 2020); None =
            unbounded.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = 3.0

    def __post_init__(self) -> None:
        check_in_range("clip.low", self.low, 0.0, 1.0)
        check_in_range("clip.high", self.high, 0.0, 1e6)
        if self.dual is not None and not self.dual >= 1.0 + self.high:
            raise ConfigError(
                f"clip.dual is {self.dual} with clip.high {self.high}",
                "at least 1 + clip.high",
                "raise clip.dual (3.0 is usual) or set it to None",
            )


@dataclass(frozen=True)
class PolicyBatch:
    """Hold what stays fixed while the policy is trained on a batch.

    All tensors are ``(B, T)``, none carries a gradient.

    Attributes:
        proximal_logprobs: of the frozen snapshot pi_prox, in nats.
        advantages: per token.
        weights: pi_prox / behaviour, truncated, at least 0
            (`importance.truncated_importance_weights`).
        response_mask: bool, True = a real response token.
    """

    proximal_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    response_mask: Tensor

    def validate(self, logprobs: Tensor) -> None:
        """Check shapes (DataError), and for NaN and stray gradients (TrainingError)."""
        constants = {
            "proximal_logprobs": self.proximal_logprobs,
            "advantages": self.advantages,
            "weights": self.weights,
        }
        check_token_values(self.response_mask, logprobs=logprobs, **constants)
        check_finite("logprobs", logprobs, self.response_mask)
        for name, values in constants.items():
            check_frozen(name, values)
            check_finite(name, values, self.response_mask)
        if bool((sanitize(self.weights, self.response_mask) < 0).any()):
            raise TrainingError(
                "an importance weight is negative",
                "weights of at least 0",
                "put the sign into the advantage",
            )


def decoupled_ppo_loss(
    logprobs: Tensor,
    batch: PolicyBatch,
    *,
    totals: Totals,
    clip: ClipRange | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped surrogate with a separate behaviour weight (Hilton et al. 2022).

    With ``rho = exp(logprob - proximal_logprob)``, the token loss is
    ``w * max(-A rho, -A clip(rho, 1 - low, 1 + high))``, for ``A < 0`` at most ``-w A dual``. The
    weight comes from the frozen proximal policy and has no gradient; only rho follows the current
    policy. ``log rho`` is clamped at +-20.

    Args:
        logprobs: ``(B, T)`` of the current policy, with gradient.
        batch: the constants of these responses.
        totals: global counts and averaging mode, see `masking.aggregate_token_loss`.
        clip: None = ``ClipRange()``.

    Returns:
        the loss (this micro-batch's share) and, over its real tokens: ``policy_loss_sum``,
        ``clip_upper_sum`` (A > 0, rho too high), ``clip_lower_sum`` (A < 0, rho too low),
        ``clip_dual_sum``, ``live_gradient_sum`` (tokens whose gradient is not zero),
        ``ratio_sum``, ``ratio_clamped_sum``, ``weight_sum``, ``approx_kl_k1_sum`` and
        ``approx_kl_k3_sum`` (KL(proximal || current)), ``ratio_max``, ``n_tokens``,
        ``n_sequences``.

    Raises:
        DataError, TrainingError: see `PolicyBatch.validate`.
    """
    batch.validate(logprobs)
    bounds = clip or ClipRange()
    mask = batch.response_mask
    log_rho = sanitize(logprobs, mask) - sanitize(batch.proximal_logprobs, mask)
    rho = clamp_log_ratio(log_rho)
    advantages = sanitize(batch.advantages, mask)
    surrogate = _clipped_surrogate(rho.ratio, advantages, bounds)
    token_loss = sanitize(batch.weights, mask) * surrogate
    return aggregate(token_loss, mask, totals), _surrogate_metrics(rho, token_loss, batch, bounds)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    clipped_ratio = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if clip.dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)


def _surrogate_metrics(
    rho: ClampedRatio, token_loss: Tensor, batch: PolicyBatch, clip: ClipRange
) -> dict[str, Tensor]:
    mask, ratio, log_rho = batch.response_mask, rho.ratio.detach(), rho.log_ratio.detach()
    advantages, weights = sanitize(batch.advantages, mask), sanitize(batch.weights, mask)
    upper = (advantages > 0) & (ratio > 1.0 + clip.high)
    lower = (advantages < 0) & (ratio < 1.0 - clip.low)
    dual = (advantages < 0) & (ratio > (float("inf") if clip.dual is None else clip.dual))
    live = mask & (advantages * weights != 0) & ~(upper | lower | dual | rho.clamped)
    flags = {
        "clip_upper_sum": upper,
        "clip_lower_sum": lower,
        "clip_dual_sum": dual,
        "live_gradient_sum": live,
        "ratio_clamped_sum": rho.clamped & mask,
    }
    return {
        **{name: flag.sum().float() for name, flag in flags.items()},
        "policy_loss_sum": token_loss.detach().sum(),
        "ratio_sum": masked_sum(ratio, mask),
        "weight_sum": weights.sum(),
        "approx_kl_k1_sum": -log_rho.sum(),
        "approx_kl_k3_sum": (log_rho.expm1() - log_rho).clamp(min=0.0).sum(),
        "ratio_max": sanitize(ratio, mask).max() if ratio.numel() else ratio.sum(),
        **count_metrics(mask),
    }


def weighted_likelihood_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute ``-w A logprob``, the policy gradient without a ratio.

    TOPR (Le Roux et al. 2025) takes w = 1 where ``A >= 0`` and ``min(pi / mu, 1)`` where ``A <
    0``; A-LoL (Baheti et al. 2024) the ratio on positive advantages; positives-only w = 1 where
    ``A > 0``, else 0.

    Args:
        logprobs: ``(B, T)`` with gradient; advantages, weights: ``(B, T)`` constants.
        mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        the loss and ``policy_loss_sum``, ``live_gradient_sum``, ``weight_sum``, ``n_tokens``,
        ``n_sequences``.
    """
    PolicyBatch(logprobs.detach(), advantages, weights, mask).validate(logprobs)
    factor = sanitize(advantages, mask) * sanitize(weights, mask)
    token_loss = -factor * sanitize(logprobs, mask)
    metrics = {
        "policy_loss_sum": token_loss.detach().sum(),
        "live_gradient_sum": (factor != 0).sum().float(),
        "weight_sum": masked_sum(weights, mask),
        **count_metrics(mask),
    }
    return aggregate(token_loss, mask, totals), metrics


def dpo_loss(
    log_ratio_chosen: Tensor,
    log_ratio_rejected: Tensor,
    *,
    beta: float,
    total_pairs: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the DPO loss (Rafailov et al. 2023).

    ``z = beta * (log_ratio_chosen - log_ratio_rejected)``, loss ``-(1 - s) log sigmoid(z) - s log
    sigmoid(-z)``.

    Args:
        log_ratio_chosen, log_ratio_rejected: ``(P,)`` sequence log-probability of the policy less
            the reference's.
        beta: above 0. total_pairs: pairs of the whole step. label_smoothing: s, from 0 to 0.5.

    Returns:
        the loss and ``loss_sum``, ``correct_sum`` (ties half), ``reward_gap_sum``, ``n_pairs``.
    """
    check_rank("log_ratio_chosen", log_ratio_chosen, 1)
    check_shape("log_ratio_rejected", log_ratio_rejected, log_ratio_chosen.shape)
    check_positive("beta", beta)
    check_count("total_pairs", total_pairs)
    check_in_range("label_smoothing", label_smoothing, 0.0, 0.5)
    logit = beta * (log_ratio_chosen.float() - log_ratio_rejected.float())
    check_finite("log-ratio differences", logit)
    loss = -(1.0 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    gap = logit.detach()
    metrics = {
        "loss_sum": loss.detach().sum(),
        "correct_sum": (gap > 0).sum() + 0.5 * (gap == 0).sum(),
        "reward_gap_sum": gap.sum(),
        "n_pairs": torch.tensor(float(gap.shape[0]), device=gap.device),
    }
    return loss.sum() / total_pairs, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the critic's squared error, clipped around the old values.

    ``0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``; without c the first term only.

    Args:
        values: ``(B, T)`` with gradient; old_values, returns: ``(B, T)`` constants.
        mask: ``(B, T)`` bool, True = a real response token.
        clip_range: c, in units of the return; None = no clipping.

    Returns:
        the loss and ``value_loss_sum``, ``value_clip_sum``, ``value_sum``, ``return_sum``,
        ``n_tokens``, ``n_sequences``.
    """
    check_token_values(mask, values=values, old_values=old_values, returns=returns)
    for name, constant in (("old_values", old_values), ("returns", returns)):
        check_frozen(name, constant)
        check_finite(name, constant, mask)
    check_finite("values", values, mask)
    new, target = sanitize(values, mask), sanitize(returns, mask)
    error = (new - target).square()
    clipped_count = torch.zeros((), device=new.device)
    if clip_range is not None:
        check_positive("clip_range", clip_range)
        old = sanitize(old_values, mask)
        clipped_error = (torch.clamp(new, old - clip_range, old + clip_range) - target).square()
        clipped_count = (clipped_error > error).sum().float()
        error = torch.maximum(error, clipped_error)
    token_loss = 0.5 * error
    metrics = {
        "value_loss_sum": masked_sum(token_loss.detach(), mask),
        "value_clip_sum": clipped_count,
        "value_sum": new.detach().sum(),
        "return_sum": target.sum(),
        **count_metrics(mask),
    }
    return aggregate(token_loss, mask, totals), metrics


def entropy_loss(
    entropy: Tensor, mask: Tensor, *, coef: float, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute ``-coef * entropy``, a bonus for a policy that stays spread out.

    Args:
        entropy: ``(B, T)`` in nats, at the temperature of the log-probabilities
            (`logprobs.entropy_from_logits`).
        mask: ``(B, T)`` bool, True = a real response token. coef: loss per nat, at least 0.

    Returns:
        the loss and ``entropy_sum``, ``n_tokens``, ``n_sequences``.
    """
    check_token_values(mask, entropy=entropy)
    check_in_range("coef", coef, 0.0, 1e6)
    check_finite("entropy", entropy, mask)
    metrics = {"entropy_sum": masked_sum(entropy.detach(), mask), **count_metrics(mask)}
    return -coef * aggregate(entropy, mask, totals), metrics


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: KLKind,
    coef: float,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute ``coef * KL(policy || reference)``, estimated token by token (`kl.kl_per_token`).

    On samples of the policy, k2 has the gradient of that KL, k3 that of ``KL(reference ||
    policy)``, and k1 none in expectation: take k2 unless you compare.

    Args:
        logprobs: ``(B, T)`` with gradient; ref_logprobs: ``(B, T)`` constant.
        mask: ``(B, T)`` bool, True = a real response token. coef: loss per nat, at least 0.

    Returns:
        the loss and ``kl_sum`` (the very KL of the loss), ``n_tokens``, ``n_sequences``.
    """
    check_in_range("coef", coef, 0.0, 1e6)
    token_kl = kl_per_token(logprobs, ref_logprobs, mask, kind=kind)
    metrics = {"kl_sum": token_kl.detach().sum(), **count_metrics(mask)}
    return coef * aggregate(token_kl, mask, totals), metrics
