"""Losses of the policy and of the critic over stored responses.

Each returns this micro-batch's share of the whole step's loss, and metrics that add up over
micro-batches. Tensors are ``(B, T)``, the mask is bool, True = a real response token. Only the
first tensor carries a gradient. A NaN at a real position makes the loss NaN, which ends the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.kl import KLKind, kl_per_token
from tasks.algorithms.logprobs import LOG_RATIO_LIMIT
from tasks.algorithms.masking import Totals, aggregate, count_metrics, masked_sum, real_only

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    totals: Totals,
) -> LossAndMetrics:
    """Compute the clipped surrogate with a separate behaviour weight (Hilton et al. 2022).

    With ``rho = exp(logprob - proximal_logprob)``, the token loss is
    ``w * max(-A rho, -A clip(rho, 1 - low, 1 + high))``, for ``A < 0`` at most ``-w A dual`` (Ye et
    al. 2020). The weight comes from the frozen proximal policy; only rho follows the current
    policy. ``log rho`` is clamped at +-20.

    Args:
        logprobs, proximal_logprobs: of the current policy and of the frozen snapshot, in nats.
        weights: proximal to behaviour policy (`importance.truncated_importance_weights`).

    Returns:
        the loss and ``policy_loss_sum``, ``clip_upper_sum`` (A > 0, rho too high),
        ``clip_lower_sum`` (A < 0, rho too low), ``clip_dual_sum``, ``live_gradient_sum`` (tokens
        whose gradient is not zero), ``ratio_sum``, ``ratio_clamped_sum``, ``weight_sum``,
        ``approx_kl_k1_sum`` and ``approx_kl_k3_sum`` (KL(proximal || current)), ``ratio_max``,
        ``n_tokens``, ``n_sequences``.
    """
    now, proximal, adv, weight = (
        real_only(x, mask) for x in (logprobs, proximal_logprobs, advantages, weights)
    )
    difference = now - proximal
    log_rho = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = log_rho.exp()
    cost, is_bad = -adv, adv < 0
    surrogate = torch.maximum(cost * rho, cost * rho.clamp(1.0 - clip_low, 1.0 + clip_high))
    surrogate = torch.where(is_bad, torch.minimum(surrogate, cost * dual_clip), surrogate)
    token_loss = weight * surrogate
    loss = aggregate(token_loss, mask, totals)

    log_rho, rho = log_rho.detach(), rho.detach()
    upper = (adv > 0) & (rho > 1.0 + clip_high)
    lower = is_bad & (rho < 1.0 - clip_low)
    dual = is_bad & (rho > dual_clip)
    clamped = difference.detach().abs() > LOG_RATIO_LIMIT
    live = (adv * weight != 0) & ~(upper | lower | dual | clamped)
    counts = torch.stack([upper, lower, dual, live, clamped]).flatten(1).sum(1).float().unbind()
    real_rho = real_only(rho, mask)
    return loss, {
        "clip_upper_sum": counts[0],
        "clip_lower_sum": counts[1],
        "clip_dual_sum": counts[2],
        "live_gradient_sum": counts[3],
        "ratio_clamped_sum": counts[4],
        "policy_loss_sum": token_loss.detach().sum(),
        "ratio_sum": real_rho.sum(),
        "weight_sum": weight.sum(),
        "approx_kl_k1_sum": -log_rho.sum(),
        "approx_kl_k3_sum": (log_rho.expm1() - log_rho).clamp(min=0.0).sum(),
        "ratio_max": real_rho.max() if len(mask) else real_rho.sum(),
        **count_metrics(mask),
    }


def weighted_likelihood_loss(
    logprobs: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, *, totals: Totals
) -> LossAndMetrics:
    """Compute ``-w A logprob``, the policy gradient without a ratio.

    Args:
        logprobs: of the current policy, in nats.
        weights: of TOPR, A-LoL or positives-only, see `importance.likelihood_weights`.

    Returns:
        the loss and ``policy_loss_sum``, ``live_gradient_sum``, ``weight_sum``, ``n_tokens``,
        ``n_sequences``.
    """
    now, adv, weight = (real_only(x, mask) for x in (logprobs, advantages, weights))
    factor = adv * weight
    token_loss = -factor * now
    return aggregate(token_loss, mask, totals), {
        "policy_loss_sum": token_loss.detach().sum(),
        "live_gradient_sum": (factor != 0).sum().float(),
        "weight_sum": weight.sum(),
        **count_metrics(mask),
    }


def dpo_loss(
    log_ratio_chosen: Tensor,
    log_ratio_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    total_pairs: float,
) -> LossAndMetrics:
    """Compute the DPO loss (Rafailov et al. 2023).

    ``z = beta * (log_ratio_chosen - log_ratio_rejected)``, loss ``-(1 - s) log sigmoid(z) - s log
    sigmoid(-z)``.

    Args:
        log_ratio_chosen, log_ratio_rejected: ``(P,)`` sequence log-probability of the policy less
            the reference's.
        beta: above 0. label_smoothing: s. total_pairs: pairs of the whole step.

    Returns:
        the loss and ``loss_sum``, ``correct_sum`` (ties half), ``reward_gap_sum``, ``n_pairs``.
    """
    z = beta * (log_ratio_chosen.float() - log_ratio_rejected.float())
    loss = -(1.0 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
    gap = z.detach()
    return loss.sum() / total_pairs, {
        "loss_sum": loss.detach().sum(),
        "correct_sum": (gap > 0).sum() + 0.5 * (gap == 0).sum(),
        "reward_gap_sum": gap.sum(),
        "n_pairs": torch.tensor(float(len(gap)), device=gap.device),
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    totals: Totals,
) -> LossAndMetrics:
    """Compute the critic's squared error, clipped around the old values.

    ``0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``.

    Args:
        values, old_values, returns: V, V_old and R. clip_range: c, above 0.

    Returns:
        the loss and ``value_loss_sum``, ``value_clip_sum``, ``value_sum``, ``return_sum``,
        ``n_tokens``, ``n_sequences``.
    """
    new, old, target = (real_only(x, mask) for x in (values, old_values, returns))
    error = (new - target).square()
    clipped_error = (torch.clamp(new, old - clip_range, old + clip_range) - target).square()
    token_loss = 0.5 * torch.maximum(error, clipped_error)
    return aggregate(token_loss, mask, totals), {
        "value_loss_sum": token_loss.detach().sum(),
        "value_clip_sum": (clipped_error > error).sum().float(),
        "value_sum": new.detach().sum(),
        "return_sum": target.sum(),
        **count_metrics(mask),
    }


def entropy_loss(entropy: Tensor, mask: Tensor, *, coef: float, totals: Totals) -> LossAndMetrics:
    """Compute ``-coef * entropy``, a bonus for a policy that stays spread out.

    Args:
        entropy: in nats, at the temperature of the log-probabilities. coef: loss per nat.

    Returns:
        the loss and ``entropy_sum``, ``n_tokens``, ``n_sequences``.
    """
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
) -> LossAndMetrics:
    """Compute ``coef * KL(policy || reference)``, estimated token by token (`kl.kl_per_token`).

    On samples of the policy, k2 has the gradient of that KL, k3 that of ``KL(reference ||
    policy)``, and k1 none in expectation: take k2 unless you compare.

    Args:
        logprobs, ref_logprobs: in nats. coef: loss per nat.

    Returns:
        the loss and ``kl_sum`` (the very KL of the loss), ``n_tokens``, ``n_sequences``.
    """
    token_kl = kl_per_token(logprobs, ref_logprobs, mask, kind=kind)
    metrics = {"kl_sum": token_kl.detach().sum(), **count_metrics(mask)}
    return coef * aggregate(token_kl, mask, totals), metrics
