"""Estimates of the KL divergence from sampled tokens, and the control of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tasks.algorithms.logprobs import LOG_RATIO_LIMIT
from tasks.algorithms.masking import masked_sum, real_only
from tasks.algorithms.statistics import ClusteredMean, clustered_mean
from tasks.errors import DataError, TrainingError

KLKind = Literal["k1", "k2", "k3"]
KL_ERROR_LIMIT = 0.2


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: KLKind) -> Tensor:
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
    """
    diff = real_only(logprobs, mask) - real_only(ref_logprobs, mask)
    if kind == "k1":
        return diff
    if kind == "k2":
        return 0.5 * diff.square()
    # expm1 keeps the small values that exp(x) - 1 rounds away; the clamp at 0 removes the last
    # rounding error.
    negative = (-diff).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (negative.expm1() - negative).clamp(min=0.0)


def weighted_kl_on_data(
    logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, mask: Tensor
) -> Tensor:
    """Estimate the per-token KL on stored responses that another policy wrote (kl_data).

    ``sum_t w_t k3_t / sum_t w_t`` with ``w`` the importance weight of the current policy against
    the writer. Unweighted, an estimate over the writer's tokens is biased; the truncated weights
    leave a small bias.

    Args:
        logprobs, ref_logprobs: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        weights: ``(B, T)``, at least 0.

    Returns:
        nats per token, a scalar without a gradient; 0 where all weights are 0.
    """
    k3 = kl_per_token(logprobs.detach(), ref_logprobs.detach(), mask, kind="k3")
    kept = real_only(weights.detach(), mask)
    return masked_sum(kept * k3, mask) / kept.sum().clamp(min=1e-12)


def adapted_kl_coef(
    coef: float, *, observed: float, target: float, horizon: float, n: float
) -> float:
    """Move a KL coefficient so that the observed KL approaches a target (Ziegler et al. 2019).

    ``coef * (1 + clip(observed / target - 1, -0.2, 0.2) * n / horizon)``: up when the KL is above
    the target.

    Args:
        coef: reward per nat.
        observed, target: KL of the policy from the reference, in the same unit.
        horizon: sequences over which the coefficient may move.
        n: sequences of the step, at most the horizon: beyond, the factor could turn negative.

    Raises:
        TrainingError: the observed KL is not finite, and would stay in the coefficient.
    """
    if not math.isfinite(observed):
        raise TrainingError(
            f"the observed KL is {observed}",
            "a finite number of nats",
            "check the log-probabilities",
        )
    assert 0 <= n <= horizon
    error = min(max(observed / target - 1.0, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return coef * (1.0 + error * n / horizon)


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
