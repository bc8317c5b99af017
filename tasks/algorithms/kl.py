"""Estimates of the KL divergence from sampled tokens, and the controller of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.algorithms.importance import clamp_log_ratio
from tasks.algorithms.masking import (
    check_choice,
    check_finite,
    check_frozen,
    check_positive,
    check_token_values,
    count_metrics,
    masked_sum,
    sanitize,
)
from tasks.algorithms.statistics import ClusteredMean, clustered_mean
from tasks.errors import ConfigError, DataError, TrainingError

KLKind = Literal["k1", "k2", "k3"]
KL_ERROR_LIMIT = 0.2


def kl_per_token(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: KLKind = "k3"
) -> Tensor:
    """Estimate ``KL(policy || reference)`` token by token (Schulman 2020).

    For tokens sampled from the policy, with ``d = logprob - ref_logprob``:

    - k1: ``d``; unbiased, negative on many tokens
    - k2: ``d^2 / 2``; biased, never negative, and its gradient is the gradient of the KL
    - k3: ``exp(-d) - 1 + d``; unbiased, never negative (exponent clamped at +-20)

    Args:
        logprobs, ref_logprobs: ``(B, T)`` in nats; mask: ``(B, T)`` bool, True = a real response
            token.

    Returns:
        ``(B, T)`` in nats, 0 under the mask; the gradient flows into ``logprobs``.

    Raises:
        TrainingError: a real log-probability that is not finite, or a reference that carries a
        gradient.
    """
    check_choice("kind", kind, get_args(KLKind))
    check_token_values(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_finite("logprobs", logprobs, mask)
    check_finite("ref_logprobs", ref_logprobs, mask)
    check_frozen("ref_logprobs", ref_logprobs)
    diff = sanitize(logprobs, mask) - sanitize(ref_logprobs, mask)
    if kind == "k1":
        return diff
    if kind == "k2":
        return 0.5 * diff.square()
    # expm1 keeps the small values that exp(x) - 1 rounds away; the clamp at 0 removes the last
    # rounding error.
    negative = clamp_log_ratio(-diff).log_ratio
    return (negative.expm1() - negative).clamp(min=0.0)


def weighted_kl_on_data(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    kind: KLKind = "k3",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Estimate the per-token KL on stored responses that another policy wrote (kl_data).

    ``sum_t w_t k_t / sum_t w_t`` with ``w`` the importance weight of the current policy against
    the writer. Unweighted, k1 over the writer's tokens is biased and may be negative; the
    truncated weights leave a small bias.

    Args:
        logprobs, ref_logprobs: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        weights: ``(B, T)``, at least 0.

    Returns:
        nats per token on this batch, and ``kl_data_weighted_sum``, ``kl_data_weight_sum``,
        ``n_tokens``, ``n_sequences``: over several batches, divide the first sum by the second. 0
        where all weights are 0.
    """
    check_token_values(mask, weights=weights)
    check_finite("weights", weights, mask)
    estimate = kl_per_token(logprobs.detach(), ref_logprobs.detach(), mask, kind=kind)
    kept = sanitize(weights.detach(), mask)
    weighted_sum, weight_sum = masked_sum(kept * estimate, mask), kept.sum()
    metrics = {
        "kl_data_weighted_sum": weighted_sum,
        "kl_data_weight_sum": weight_sum,
        **count_metrics(mask),
    }
    return weighted_sum / weight_sum.clamp(min=1e-12), metrics


@dataclass(frozen=True)
class AdaptiveKLController:
    """Move a KL coefficient so that the observed KL approaches a target (Ziegler et al. 2019).

    ``coef * (1 + clip(observed / target - 1, -0.2, 0.2) * n / horizon)``: up when the KL is above
    the target.

    Attributes:
        coef: reward per nat, above 0.
        target: KL in the unit of the observed KL (nats per token or per sequence), above 0.
        horizon: sequences over which the coefficient may move, above 0.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        check_positive("kl coef", self.coef)
        check_positive("kl target", self.target)
        check_positive("kl horizon", self.horizon)

    def update(self, observed: float, n: float) -> AdaptiveKLController:
        """Return the controller after a step.

        Args:
            observed: KL of the current policy from the reference, positive when they differ.
            n: sequences of the step, from 0 to the horizon.

        Raises:
            TrainingError: the KL is not finite.
            ConfigError: n outside 0 to the horizon, where the factor could turn negative.
        """
        if not math.isfinite(observed):
            raise TrainingError(
                f"the observed KL is {observed}",
                "a finite number of nats",
                "check the log-probabilities",
            )
        if not 0 <= n <= self.horizon:
            raise ConfigError(
                f"n is {n} with a horizon of {self.horizon}",
                "n from 0 to the horizon",
                "raise the horizon above the sequences of one step",
            )
        error = min(max(observed / self.target - 1.0, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
        return replace(self, coef=self.coef * (1.0 + error * n / self.horizon))


@dataclass(frozen=True)
class ProbeKL:
    """KL from the policy to the base, from responses that the policy sampled.

    Attributes:
        k1, k3: nats per token, clustered by response; both estimate the same number.
        per_response: k1 summed over a response, in nats.
    """

    k1: ClusteredMean
    k3: ClusteredMean
    per_response: ClusteredMean


def kl_probe_estimate(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> ProbeKL:
    """Estimate ``KL(policy || base)`` per token from responses that the policy itself sampled.

    The means of k1 and of k3 over tokens, see `kl_per_token`. Both are unbiased only for tokens
    sampled from the whole distribution of the policy (temperature 1, top_p 1), and the base's own
    responses do not do.

    Args:
        logprobs, base_logprobs: ``(B, T)`` in nats.
        mask: ``(B, T)`` bool, True = a real response token; rows without any are left out.

    Raises:
        DataError: no token.
        TrainingError: a log-probability that is not finite.
    """
    if not bool(mask.any()):
        raise DataError("The probe has no response token", "one at least", "sample responses first")
    kept = mask.any(dim=-1)
    ours, theirs, real = (values.detach()[kept].cpu() for values in (logprobs, base_logprobs, mask))
    if not bool(torch.isfinite(ours[real] - theirs[real]).all()):
        raise TrainingError(
            "The probe's log-probabilities are not finite", "finite numbers", "check the models"
        )
    responses = real.nonzero()[:, 0].numpy()
    k1 = kl_per_token(ours, theirs, real, kind="k1").double()
    k3 = kl_per_token(ours, theirs, real, kind="k3").double()
    return ProbeKL(
        k1=clustered_mean(k1[real].numpy(), responses),
        k3=clustered_mean(k3[real].numpy(), responses),
        per_response=clustered_mean(k1.sum(dim=1).numpy()),
    )
