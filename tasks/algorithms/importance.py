"""Importance weights that correct for the policy that wrote the data (the behaviour policy)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tasks.algorithms.logprobs import LOG_RATIO_LIMIT
from tasks.algorithms.masking import broadcast_to_tokens, check_finite, masked_sum, real_only

RatioLevel = Literal["sequence", "geometric", "token"]


def sequence_log_ratio(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, level: RatioLevel
) -> Tensor:
    """Return ``log(pi / mu)`` of the stored responses, without a gradient.

    With ``d_t = logprob_t - behavior_logprob_t``:

    - sequence: ``sum_t d_t``, the exact ratio of the whole response, ``(B,)``
    - geometric: ``mean_t d_t``, the geometric mean of the token ratios, ``(B,)``
    - token: ``d_t``, ``(B, T)``, 0 under the mask

    Args:
        logprobs, behavior_logprobs: ``(B, T)`` of the policy and of the behaviour policy.
        mask: ``(B, T)`` bool, True = a real response token; an empty row gives 0.
    """
    token = real_only(logprobs.detach().float() - behavior_logprobs.float(), mask)
    if level == "token":
        return token
    total = token.sum(dim=1)
    return total if level == "sequence" else total / mask.sum(dim=1).clamp(min=1)


def _per_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return log-ratios of any level as ``(B, T)``, 0 under the mask."""
    if log_ratio.dim() == 1:
        return broadcast_to_tokens(log_ratio, mask)
    return real_only(log_ratio, mask)


def truncated_importance_weights(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """Return truncated weights, split by the sign of the advantage (Le Roux et al. 2025).

    ``w = min(ratio, cap)`` where ``A >= 0`` and ``w = min(ratio, 1)`` where ``A < 0``: capped from
    above only, so a bad response that the policy no longer gives fades out, and is never pushed
    down harder than once.

    Args:
        log_ratio: ``(B,)`` or ``(B, T)`` of `sequence_log_ratio`, from the frozen proximal policy.
        advantages: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        cap: at least 1.

    Returns:
        ``(B, T)`` fp32 weights without a gradient, 0 under the mask.

    Raises:
        TrainingError: a log-ratio that is not finite: the cap would hide it.
    """
    token_ratio = _per_token(log_ratio.detach(), mask)
    check_finite("log-ratio of policy to behaviour policy", token_ratio)
    log_cap = torch.where(real_only(advantages, mask) < 0, 0.0, math.log(cap))
    return real_only(torch.minimum(token_ratio, log_cap).exp(), mask)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return ``(sum w)^2 / sum w^2``: how many equal samples the weights are worth (Kish 1965).

    Args:
        weights: ``(N,)``, at least 0. All zero, or none, is worth 0.
    """
    values = weights.detach().float()
    return effective_sample_size_from_sums(values.sum(), values.square().sum())


def effective_sample_size_from_sums(weight_sum: Tensor, weight_sq_sum: Tensor) -> Tensor:
    """Return the effective sample size from sums over micro-batches and ranks; 0 for no weight."""
    ratio = weight_sum.square() / weight_sq_sum
    return torch.where(weight_sq_sum > 0, ratio, torch.zeros_like(ratio))


def weight_metrics(
    log_ratio: Tensor, weights: Tensor, mask: Tensor, *, cap: float
) -> dict[str, Tensor]:
    """Describe weights by sums that add up over batches.

    The unit is a response (its tokens' mean weight), or a token where the log-ratios are. ``ess =
    sum^2 / sq_sum``, see `effective_sample_size_from_sums`; the raw sums take the ratio clamped to
    exp(+-20).

    Args:
        log_ratio: as handed to `truncated_importance_weights`; weights: ``(B, T)``, what it
            returned.
        mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``weight_sum``, ``weight_sq_sum``, ``weight_max``, ``raw_weight_sum``,
        ``raw_weight_sq_sum``, ``above_cap_sum``, ``n_weights``.
    """
    if log_ratio.dim() == 2:
        used, unit_log_ratio = weights.float()[mask], log_ratio.float()[mask]
    else:
        kept = mask.any(dim=1)
        used = masked_sum(weights, mask, dim=1)[kept] / mask.sum(dim=1)[kept]
        unit_log_ratio = log_ratio.float()[kept]
    raw = unit_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "weight_sum": used.sum(),
        "weight_sq_sum": used.square().sum(),
        "weight_max": used.amax() if used.numel() else used.sum(),
        "raw_weight_sum": raw.sum(),
        "raw_weight_sq_sum": raw.square().sum(),
        "above_cap_sum": (unit_log_ratio > math.log(cap)).sum().float(),
        "n_weights": torch.tensor(float(used.numel()), device=used.device),
    }


# Weights of the policy gradients that have no proximal policy: TOPR, A-LoL, positives only.

LikelihoodKind = Literal["topr", "a_lol", "positives_only"]


def likelihood_weights(
    kind: LikelihoodKind,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
) -> Tensor:
    """Return the weight w of `policy_losses.weighted_likelihood_loss`, without a gradient.

    With ``r = exp(log_ratio)`` of the current policy to the behaviour policy:

    - topr (Le Roux et al. 2025): 1 where ``A >= 0``, ``min(r, 1)`` where ``A < 0``
    - a_lol (Baheti et al. 2024): ``clip(r, 1 - c, 1 + c)`` where ``A > 0``, else 0
    - positives_only: 1 where ``A > 0``, else 0

    Args:
        kind: which of them.
        log_ratio: ``(B,)`` or ``(B, T)`` of `sequence_log_ratio`.
        advantages: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        clip_range: c of a_lol.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.
    """
    log_r, adv = _per_token(log_ratio, mask), real_only(advantages, mask)
    if kind == "positives_only":
        weights = torch.where(adv > 0, 1.0, 0.0)
    elif kind == "topr":
        weights = torch.where(adv < 0, log_r.clamp(max=0.0).exp(), 1.0)
    else:
        ratio = log_r.clamp(max=LOG_RATIO_LIMIT).exp()
        weights = torch.where(adv > 0, ratio.clamp(1.0 - clip_range, 1.0 + clip_range), 0.0)
    return real_only(weights, mask)


# Drop the responses that the policy has moved too far from, with a limit that adapts.


def geometric_mean_veto(log_ratio_geometric: Tensor, tau: float) -> Tensor:
    """Keep the responses whose geometric-mean ratio is within ``[1 / tau, tau]``.

    ``|mean_t log(pi_prox / mu)| <= log(tau)``, in fp64.

    Args:
        log_ratio_geometric: ``(B,)`` of `sequence_log_ratio` at level geometric.
        tau: at least 1.

    Returns:
        ``(B,)`` bool, True = kept.
    """
    return log_ratio_geometric.double().abs() <= math.log(tau)


def sequence_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Return each response's weight: the mean over its real tokens, 0 for an empty row.

    Args:
        weights: ``(B, T)`` of `truncated_importance_weights`, of any level.
        mask: ``(B, T)`` bool, True = a real response token.
    """
    return masked_sum(weights, mask, dim=1) / mask.sum(dim=1).clamp(min=1)


def adapt_tau(
    log_ratio_geometric: Tensor,
    weights: Tensor,
    *,
    tau_min: float,
    tau_max: float,
    ess_share: float | None = None,
    keep_share: float | None = None,
) -> float:
    """Find the smallest tau within the bounds that meets the target; exact, by sorting.

    With the N responses in order of ``|log ratio|`` and the first k kept, the shares of all N are

        ESS / N = (sum_kept w)^2 / (N * sum_kept w^2)        kept / N = k / N

    The trade-off: leaving out a response of extreme ratio raises ESS over the KEPT number, which
    one response alone brings to 1; over all N the number that is left counts too, and one response
    is worth 1 / N. Another response of weight w raises ESS / N while ``w < 2 S1 S2 / (S1^2 - S2)``
    (S1, S2: the sums of w and w^2 so far; always where ``S1^2 <= S2``), so a response that fits the
    others is worth keeping, and one whose weight outweighs them all is not. Truncated weights are
    bounded, hence in practice a greater tau means a greater ESS and more bias from far-off
    responses, and the smallest tau that suffices is the best one. Where none does, tau is the
    smallest of those with the greatest share.

    Args:
        log_ratio_geometric: ``(B,)``, B at least 1, see `geometric_mean_veto`.
        weights: ``(B,)`` of `sequence_weights`, at the level that training uses, at least 0.
        tau_min, tau_max: bounds, ``1 <= tau_min <= tau_max``.
        ess_share, keep_share: the target, one of them.
    """
    distances, order = log_ratio_geometric.double().cpu().abs().sort(stable=True)
    ordered = weights.double().cpu()[order]
    low, high = math.log(tau_min), math.log(tau_max)
    inside = distances[(distances > low) & (distances <= high)]
    candidates = torch.cat([torch.tensor([low], dtype=torch.float64), inside])
    n_kept = torch.searchsorted(distances, candidates, right=True)
    if ess_share is not None:
        zero = torch.zeros(1, dtype=torch.float64)
        sums = torch.cat([zero, ordered.cumsum(0)])[n_kept]
        squares = torch.cat([zero, ordered.square().cumsum(0)])[n_kept]
        worth = torch.where(squares > 0, sums.square() / squares.clamp(min=1e-300), 0.0)
        target, shares = ess_share, worth / len(distances)
    else:
        assert keep_share is not None
        target, shares = keep_share, n_kept.double() / len(distances)
    enough = (shares >= target - 1e-12).nonzero()
    # argmax need not return the first of equals, which is the smallest tau.
    best = int(enough[0]) if enough.numel() else int((shares >= shares.max()).nonzero()[0])
    return min(max(_tau_of(float(candidates[best])), tau_min), tau_max)


def smooth_tau(
    tau: float, log_tau: float | None, *, decay: float, tau_min: float, tau_max: float
) -> tuple[float, float]:
    """Follow the taus of batches slowly: ``log tau <- decay * log tau + (1 - decay) * log tau_b``.

    Args:
        tau: tau_b, of `adapt_tau`.
        log_tau: where it stood; None = before the first batch, whose tau is taken as it is.
        decay: from 0 (no memory) to below 1.
        tau_min, tau_max: bounds.

    Returns:
        tau within its bounds, and the log tau to hand in next time.
    """
    raw = math.log(tau)
    before = raw if log_tau is None else log_tau
    smoothed = decay * before + (1.0 - decay) * raw
    return min(max(_tau_of(smoothed), tau_min), tau_max), smoothed


def _tau_of(log_tau: float) -> float:
    """Return the smallest tau whose logarithm, as rounded, is not below the given one."""
    tau = math.exp(log_tau)
    while math.log(tau) < log_tau:
        tau = math.nextafter(tau, math.inf)
    return tau
