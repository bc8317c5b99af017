"""Importance weights that correct for the policy that wrote the data (the behaviour policy)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tasks.algorithms.masking import (
    check_choice,
    check_finite,
    check_frozen,
    check_in_range,
    check_mask,
    check_positive,
    check_rank,
    check_shape,
    check_token_values,
    count_metrics,
    masked_sum,
    sanitize,
)
from tasks.errors import ConfigError, DataError

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


# Weights of the policy gradients that have no proximal policy: TOPR, A-LoL, positives only.

LikelihoodKind = Literal["topr", "a_lol", "positives_only"]


def likelihood_weights(
    kind: LikelihoodKind,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float = 0.2,
) -> Tensor:
    """Return the weight w of `policy_losses.weighted_likelihood_loss`, without a gradient.

    With ``r = exp(log_ratio)`` of the current policy to the behaviour policy:

    - topr (Le Roux et al. 2025): 1 where ``A >= 0``, ``min(r, 1)`` where ``A < 0``
    - a_lol (Baheti et al. 2024): ``clip(r, 1 - c, 1 + c)`` where ``A > 0``, else 0
    - positives_only: 1 where ``A > 0``, else 0

    Args:
        kind: which of them.
        log_ratio: ``(B, T)`` in nats, the same for all tokens of a response unless it is taken
            token by token.
        advantages: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        clip_range: c of a_lol, from 0 to 1.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.

    Raises:
        TrainingError: a real log-ratio or advantage that is not finite.
    """
    check_choice("kind", kind, get_args(LikelihoodKind))
    check_in_range("clip_range", clip_range, 0.0, 1.0)
    check_token_values(mask, log_ratio=log_ratio, advantages=advantages)
    check_finite("log_ratio", log_ratio, mask)
    check_finite("advantages", advantages, mask)
    adv = sanitize(advantages.detach(), mask)
    one = torch.ones_like(adv)
    zero = torch.zeros_like(adv)
    if kind == "positives_only":
        weights = torch.where(adv > 0, one, zero)
    elif kind == "topr":
        faded = sanitize(log_ratio.detach(), mask).clamp(max=0.0).exp()
        weights = torch.where(adv < 0, faded, one)
    else:
        ratio = sanitize(log_ratio.detach(), mask).clamp(max=LOG_RATIO_LIMIT).exp()
        weights = torch.where(adv > 0, ratio.clamp(1.0 - clip_range, 1.0 + clip_range), zero)
    return sanitize(weights, mask)


def current_log_ratio(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, level: RatioLevel
) -> Tensor:
    """Return ``log(pi / mu)`` of the policy under training as ``(B, T)``, without a gradient.

    Args:
        logprobs: ``(B, T)`` of the current policy; behavior_logprobs: ``(B, T)`` of the writer.
        mask: ``(B, T)`` bool, True = a real response token.
        level: of `importance.sequence_log_ratio`; at sequence and geometric every token of a
            response gets the response's ratio.
    """
    ratio = sequence_log_ratio(logprobs.detach(), behavior_logprobs, mask, level=level)
    if level == "token":
        return ratio
    check_shape("log_ratio", ratio, mask.shape[:1])
    return sanitize(ratio.unsqueeze(1).expand(mask.shape), mask)


# Drop the responses that the policy has moved too far from, with a limit that adapts.

MAX_TAU = math.exp(LOG_RATIO_LIMIT)


def geometric_mean_veto(
    log_ratio_geometric: Tensor, tau: float, mask: Tensor | None = None
) -> Tensor:
    """Keep the responses whose geometric-mean ratio is within ``[1 / tau, tau]``.

    ``|mean_t log(pi_prox / mu)| <= log(tau)``, in fp64.

    Args:
        log_ratio_geometric: ``(B,)`` of `importance.sequence_log_ratio` at level geometric, from
            the frozen proximal policy.
        tau: at least 1.
        mask: ``(B,)`` bool, True = a response; the others are not kept. None = all.

    Returns:
        ``(B,)`` bool, True = kept.

    Raises:
        TrainingError: a log-ratio that is not finite.
    """
    check_rank("log_ratio_geometric", log_ratio_geometric, 1)
    rows = torch.ones_like(log_ratio_geometric, dtype=torch.bool) if mask is None else mask
    check_mask(rows, log_ratio_geometric.shape)
    check_finite("log_ratio_geometric", log_ratio_geometric, rows)
    check_in_range("tau", tau, 1.0, MAX_TAU)
    return rows & (log_ratio_geometric.detach().double().abs() <= math.log(tau))


def sequence_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Return each response's weight: the mean over its real tokens, 0 for an empty row.

    Args:
        weights: ``(B, T)`` of `importance.truncated_importance_weights`, of any level.
        mask: ``(B, T)`` bool, True = a real response token.
    """
    check_token_values(mask, weights=weights)
    return masked_sum(weights.detach(), mask, dim=1) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class TauTarget:
    """Say what the threshold aims at: one of the two shares, both of ALL N responses.

    Attributes:
        tau_min, tau_max: bounds, ``1 <= tau_min <= tau_max``.
        ess_share: effective sample size of the kept weights, divided by N.
        keep_share: kept responses, divided by N.
    """

    tau_min: float
    tau_max: float
    ess_share: float | None = None
    keep_share: float | None = None

    def __post_init__(self) -> None:
        check_in_range("tau_min", self.tau_min, 1.0, MAX_TAU)
        check_in_range("tau_max", self.tau_max, self.tau_min, MAX_TAU)
        if (self.ess_share is None) == (self.keep_share is None):
            raise ConfigError(
                f"ess_share is {self.ess_share} and keep_share is {self.keep_share}",
                "exactly one target",
                "set one and leave the other at None",
            )
        check_in_range("target share", self.share, 0.0, 1.0)

    @property
    def share(self) -> float:
        """The target's number."""
        return self.ess_share if self.ess_share is not None else self.keep_share or 0.0

    @property
    def name(self) -> str:
        """The target's name."""
        return "effective sample size" if self.ess_share is not None else "kept responses"


class TauChoice(NamedTuple):
    """Hold a threshold and what it does to the batch that it was measured on.

    Attributes:
        tau: the threshold, for `geometric_mean_veto`.
        ess_share, keep_share: under this tau, of all N responses.
        reached: whether the target is met.
        reason: empty if it is, else why not.
    """

    tau: float
    ess_share: float
    keep_share: float
    reached: bool
    reason: str


def adapt_tau(
    log_ratio_geometric: Tensor, weights: Tensor, target: TauTarget, mask: Tensor | None = None
) -> TauChoice:
    """Find the smallest tau within the bounds that meets the target; exact, by sorting.

    With the responses in order of ``|log ratio|`` and the first k kept,

        ESS / N = (sum_kept w)^2 / (N * sum_kept w^2)

    The trade-off: leaving out a response of extreme ratio raises ESS over the KEPT number, which
    one response alone brings to 1; over all N the number that is left counts too, and one response
    is worth 1 / N. Another response of weight w raises ESS / N while ``w < 2 S1 S2 / (S1^2 - S2)``
    (S1, S2: the sums of w and w^2 so far; always where ``S1^2 <= S2``), so a response that fits the
    others is worth keeping, and one whose weight outweighs them all is not. Truncated weights are
    bounded, hence in practice a greater tau means a greater ESS and more bias from far-off
    responses, and the smallest tau that suffices is the best one. Where none does, tau is the
    smallest of those with the greatest share, and `TauChoice.reason` tells.

    Args:
        log_ratio_geometric: ``(B,)``, see `geometric_mean_veto`.
        weights: ``(B,)`` of `sequence_weights`, at the level that training uses, at least 0.
        target: bounds and target.
        mask: ``(B,)`` bool, True = a response; N counts these. None = all.

    Raises:
        DataError: no response, or shapes that differ. TrainingError: a value that is not finite.
    """
    sorted_batch = _sort(log_ratio_geometric, weights, mask)
    low, high = math.log(target.tau_min), math.log(target.tau_max)
    distances = sorted_batch.distances
    inside = distances[(distances > low) & (distances <= high)]
    candidates = torch.cat([torch.tensor([low], dtype=torch.float64), inside])
    ess, keep = sorted_batch.shares(candidates)
    shares = ess if target.ess_share is not None else keep
    enough = (shares >= target.share - 1e-12).nonzero()
    # argmax returns the first of equals: the smallest tau.
    best = int(enough[0]) if enough.numel() else int((shares >= shares.max()).nonzero()[0])
    tau = min(max(_tau_of(float(candidates[best])), target.tau_min), target.tau_max)
    return _choice(tau, float(ess[best]), float(keep[best]), target)


@dataclass(frozen=True)
class TauController:
    """Follow `adapt_tau` slowly: ``log tau <- decay * log tau + (1 - decay) * log tau_batch``.

    Attributes:
        target: bounds and target of each batch.
        decay: from 0 (no memory) to below 1.
        log_tau: where it stands; None = before the first batch, whose tau is taken as it is.
    """

    target: TauTarget
    decay: float = 0.9
    log_tau: float | None = None

    def __post_init__(self) -> None:
        check_in_range("decay", self.decay, 0.0, 1.0 - 1e-9)
        if self.log_tau is not None:
            check_in_range("log_tau", self.log_tau, 0.0, LOG_RATIO_LIMIT)

    def update(
        self, log_ratio_geometric: Tensor, weights: Tensor, mask: Tensor | None = None
    ) -> tuple[TauController, TauChoice]:
        """Return the controller after a batch, and the smoothed tau with what it does to the batch.

        Args and errors are those of `adapt_tau`.
        """
        raw = math.log(adapt_tau(log_ratio_geometric, weights, self.target, mask).tau)
        before = raw if self.log_tau is None else self.log_tau
        smoothed = self.decay * before + (1.0 - self.decay) * raw
        tau = min(max(_tau_of(smoothed), self.target.tau_min), self.target.tau_max)
        at = torch.tensor([math.log(tau)], dtype=torch.float64)
        ess, keep = _sort(log_ratio_geometric, weights, mask).shares(at)
        return replace(self, log_tau=smoothed), _choice(tau, float(ess), float(keep), self.target)

    def state_dict(self) -> dict[str, float | None]:
        """Return what `with_state` needs."""
        return {"log_tau": self.log_tau}

    def with_state(self, state: Mapping[str, float | None]) -> TauController:
        """Return the controller as it stood when the state was taken.

        Raises:
            DataError: a state with other fields.
        """
        if set(state) != {"log_tau"}:
            raise DataError(
                f"a threshold state with the fields {sorted(state)}",
                "the field log_tau",
                "start from a checkpoint of this version",
            )
        return replace(self, log_tau=state["log_tau"])


class _SortedBatch(NamedTuple):
    """Hold N responses by distance, with sums over the first k, k from 0 to N; all fp64."""

    distances: Tensor
    weight_sums: Tensor
    square_sums: Tensor

    def shares(self, log_taus: Tensor) -> tuple[Tensor, Tensor]:
        """Return ESS / N and kept / N under each threshold."""
        n_kept = torch.searchsorted(self.distances, log_taus, right=True)
        n = self.distances.numel()
        sums, squares = self.weight_sums[n_kept], self.square_sums[n_kept]
        ess = torch.where(squares > 0, sums.square() / squares.clamp(min=1e-300), 0.0)
        return ess / n, n_kept.double() / n


def _sort(log_ratio: Tensor, weights: Tensor, mask: Tensor | None) -> _SortedBatch:
    check_rank("log_ratio_geometric", log_ratio, 1)
    check_shape("weights", weights, log_ratio.shape)
    kept = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    check_mask(kept, log_ratio.shape)
    check_finite("log_ratio_geometric", log_ratio, kept)
    check_finite("weights", weights, kept)
    values = weights.detach()[kept].double().cpu()
    if not values.numel() or bool((values < 0).any()):
        n_negative = int((values < 0).sum())
        raise DataError(
            f"{values.numel()} responses, of which {n_negative} have a weight below 0",
            "at least one response and weights of at least 0",
            "pass the truncated importance weights of a batch that is not empty",
        )
    distances, order = log_ratio.detach()[kept].double().cpu().abs().sort(stable=True)
    ordered = values[order]
    zero = torch.zeros(1, dtype=torch.float64)
    return _SortedBatch(
        distances,
        torch.cat([zero, ordered.cumsum(0)]),
        torch.cat([zero, ordered.square().cumsum(0)]),
    )


def _choice(tau: float, ess: float, keep: float, target: TauTarget) -> TauChoice:
    share = ess if target.ess_share is not None else keep
    reached = share >= target.share - 1e-12
    reason = (
        ""
        if reached
        else f"{target.name} {share:.4f} N at tau {tau:.6g}, less than the target "
        f"{target.share} N; tau may be {target.tau_min:.6g} to {target.tau_max:.6g}"
    )
    return TauChoice(tau, ess, keep, reached, reason)


def _tau_of(log_tau: float) -> float:
    """Return the smallest tau whose logarithm, as rounded, is not below the given one."""
    tau = math.exp(log_tau)
    while math.log(tau) < log_tau:
        tau = math.nextafter(tau, math.inf)
    return tau
