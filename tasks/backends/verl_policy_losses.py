"""Losses of actor and critic over verl's batches; see `verl_losses` for how shares add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from tasks.algorithms.importance import RatioLevel
from tasks.algorithms.kl import KLKind
from tasks.algorithms.likelihood_weights import (
    LikelihoodKind,
    current_log_ratio,
    likelihood_weights,
)
from tasks.algorithms.masking import LossMode, masked_sum
from tasks.algorithms.policy_losses import (
    ClipRange,
    PolicyBatch,
    decoupled_ppo_loss,
    dpo_loss,
    entropy_loss,
    kl_loss,
    value_loss,
    weighted_likelihood_loss,
)
from tasks.algorithms.reward_losses import split_interleaved
from tasks.backends.verl_batches import Loss, floats, n_ranks, padded, response_mask, totals


@dataclass(frozen=True)
class ActorTerms:
    """What every policy loss shares.

    Args:
        mode: how token losses are averaged.
        entropy_coef: bonus per nat of entropy; 0 is off.
        kl_coef: loss per nat of KL from the reference; 0 is off.
        kl_kind: estimator of that KL.
    """

    mode: LossMode = "token-mean"
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KLKind = "k2"


@dataclass(frozen=True)
class LikelihoodRule:
    """How a gradient without a proximal policy is weighted.

    Args:
        kind: which method.
        level: of the ratio to the behaviour policy.
        clip_range: of a_lol.
    """

    kind: LikelihoodKind
    level: RatioLevel = "sequence"
    clip_range: float = 0.2


def policy_loss(
    clip: ClipRange,
    terms: ActorTerms,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
) -> Loss:
    """Decoupled clipped surrogate; columns ``proximal_logprobs``, ``advantages``, ``weights``."""
    frozen = PolicyBatch(
        proximal_logprobs=padded(data, "proximal_logprobs"),
        advantages=padded(data, "advantages"),
        weights=padded(data, "weights"),
        response_mask=response_mask(data),
    )
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    loss = decoupled_ppo_loss(logprobs, frozen, totals=totals(data, terms.mode), clip=clip)
    return _with_terms(loss, logprobs, terms, model_output, data)


def likelihood_loss(
    rule: LikelihoodRule,
    terms: ActorTerms,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
) -> Loss:
    """Weighted log-likelihood; columns ``behavior_logprobs`` and ``advantages``.

    The weights follow the current policy, as their papers have it.
    """
    mask, advantages = response_mask(data), padded(data, "advantages")
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    ratio = current_log_ratio(logprobs, padded(data, "behavior_logprobs"), mask, level=rule.level)
    weights = likelihood_weights(rule.kind, ratio, advantages, mask, clip_range=rule.clip_range)
    loss = weighted_likelihood_loss(
        logprobs, advantages, weights, mask, totals=totals(data, terms.mode)
    )
    return _with_terms(loss, logprobs, terms, model_output, data)


def preference_loss(
    beta: float,
    label_smoothing: float,
    terms: ActorTerms,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
) -> Loss:
    """DPO over interleaved rows, chosen, rejected, chosen, ...; column ``ref_logprobs``."""
    mask = response_mask(data)
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    log_ratio = masked_sum(logprobs - padded(data, "ref_logprobs"), mask, dim=1)
    chosen, rejected = split_interleaved(log_ratio)
    loss, metrics = dpo_loss(
        chosen,
        rejected,
        beta=beta,
        total_pairs=float(data["global_batch_size"]) / 2,
        label_smoothing=label_smoothing,
    )
    # Counted per pair, unlike the terms below.
    pairs = {f"dpo_{name}": value for name, value in metrics.items()}
    return _with_terms((loss, pairs), logprobs, terms, model_output, data)


def _with_terms(
    loss: tuple[Tensor, dict[str, Tensor]],
    logprobs: Tensor,
    terms: ActorTerms,
    model_output: Any,
    data: Any,
) -> Loss:
    """Add entropy bonus and KL loss where they are on, and scale to this rank's share."""
    value, metrics = loss
    mask, counts = response_mask(data), totals(data, terms.mode)
    if terms.entropy_coef > 0.0:
        entropy = no_padding_2_padding(model_output["entropy"], data)
        bonus, found = entropy_loss(entropy, mask, coef=terms.entropy_coef, totals=counts)
        value, metrics = value + bonus, metrics | found
    if terms.kl_coef > 0.0:
        term, found = kl_loss(
            logprobs,
            padded(data, "ref_logprobs"),
            mask,
            kind=terms.kl_kind,
            coef=terms.kl_coef,
            totals=counts,
        )
        value, metrics = value + term, metrics | found
    return value * n_ranks(data), floats(metrics)


def critic_loss(
    clip_range: float,
    mode: LossMode,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
) -> Loss:
    """Clipped squared error of the values; columns ``old_values`` and ``returns``."""
    values = no_padding_2_padding(model_output["values"], data)
    loss, metrics = value_loss(
        values,
        padded(data, "old_values"),
        padded(data, "returns"),
        response_mask(data),
        clip_range=clip_range,
        totals=totals(data, mode),
    )
    return loss * n_ranks(data), floats(metrics)
