"""Drop the responses that the policy has moved too far from, with a limit that adapts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_finite,
    check_in_range,
    check_mask,
    check_rank,
    check_shape,
    check_token_values,
)
from tasks.algorithms.importance import LOG_RATIO_LIMIT
from tasks.algorithms.masking import masked_sum
from tasks.errors import ConfigError, DataError

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
