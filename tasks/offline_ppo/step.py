"""From a batch to advantages and weights: what is computed before an optimizer step is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.advantages import (
    adaptive_gae_lambda,
    control_variate,
    explained_variance,
    fitted_baseline,
    generalized_advantage_estimate,
    group_statistics,
    grpo_advantages,
    leave_one_out_baseline,
    reinforce_pp_advantages,
    rloo_advantages,
)
from tasks.algorithms.importance import (
    adapt_tau,
    effective_sample_size_from_sums,
    geometric_mean_veto,
    sequence_log_ratio,
    sequence_weights,
    smooth_tau,
    truncated_importance_weights,
    weight_metrics,
)
from tasks.algorithms.kl import weighted_kl_on_data
from tasks.algorithms.masking import broadcast_to_tokens, masked_mean, masked_whiten
from tasks.algorithms.rewards import token_level_rewards
from tasks.errors import TrainingError
from tasks.offline_ppo.batches import Minibatch
from tasks.offline_ppo.config import SequenceThresholdConfig
from tasks.pipeline_config import AdvantageConfig, ImportanceConfig, OfflinePPOConfig
from tasks.runtime.rows import Batch, Trajectories, pad, unpad


@dataclass(frozen=True)
class StepInputs:
    """What a step is taken with; (B, T) over response tokens.

    Args:
        advantages: per token.
        weights: truncated, of the frozen proximal to the behaviour policy.
        returns: the critic's targets, where there is a critic.
        report: metrics of the batch.
        log_tau: where the adaptive sequence threshold stands.
        sizes: (B,) how far each response is from its baseline, in units of the reward; what a
            prioritised draw prefers. None where there are no advantages.
    """

    advantages: Tensor
    weights: Tensor
    returns: Tensor | None = None
    report: dict[str, float] = field(default_factory=dict)
    log_tau: float | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True)
class StepState:
    """What adapts from step to step.

    Args:
        kl_coef: present coefficient of the KL-in-reward.
        log_tau: where the adaptive sequence threshold stands; None before its first batch.
    """

    kl_coef: float
    log_tau: float | None = None


def prepare_step(
    cfg: OfflinePPOConfig, data: Trajectories, batch: Minibatch, state: StepState
) -> StepInputs:
    """Compute advantages, weights and what to report of a batch.

    Args:
        cfg: the stage's config.
        data: the fixed dataset.
        batch: rows with what the snapshot says of them.
        state: of the adaptive parts.

    Raises:
        TrainingError: the sequence threshold leaves nothing of the step.
    """
    rewards = data.rewards[list(batch.indices)]
    report = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    if cfg.policy_loss == "dpo":
        empty = torch.zeros(batch.mask.shape)
        return StepInputs(empty, empty, None, report)
    advantages, returns, removed = advantages_of(cfg.advantage, data, batch, state.kl_coef)
    report |= removed | {"advantage_mean": float(masked_mean(advantages, batch.mask))}
    sizes = sizes_of(data, batch, returns)
    if batch.values is not None and returns is not None:
        explained = explained_variance(batch.values, returns, batch.mask)
        report["explained_variance"] = float(explained)
    advantages = advantages * batch.corrections[:, None]
    if cfg.policy_loss != "ppo":
        ones = torch.ones(batch.mask.shape)
        return StepInputs(advantages, ones, returns, report, sizes=sizes)
    weights, found = weights_of(cfg.importance, data, batch, advantages)
    ref = pad([data.ref_logprobs[i] for i in batch.indices])
    kl = weighted_kl_on_data(batch.proximal_logprobs, ref, weights, batch.mask)
    report |= found | {"kl_data": float(kl), "kl_coef": state.kl_coef}
    veto = sequence_veto(cfg.filters.sequence, data, batch, weights, state.log_tau)
    kept = weights if veto is None else weights * veto.keep[:, None]
    report |= {} if veto is None else veto.report
    log_tau = None if veto is None else veto.log_tau
    return StepInputs(advantages, kept, returns, report, log_tau, sizes)


def advantages_of(
    cfg: AdvantageConfig, data: Trajectories, batch: Minibatch, kl_coef: float
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return (B, T) advantages, with a critic (B, T) returns, and what a control variate did."""
    groups = data.group_of[list(batch.indices)]
    rewards, removed = token_rewards_of(cfg, data, batch, kl_coef)
    if batch.values is not None:
        return *gae_of(cfg, rewards, batch.values, batch.mask), removed
    return sequence_advantages(cfg, rewards, batch.mask, groups), None, removed


def token_rewards_of(
    cfg: AdvantageConfig, data: Trajectories, batch: Minibatch, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Return (B, T) token rewards less the control variate, and what that did."""
    groups = data.group_of[list(batch.indices)]
    scores, removed = _less_baseline(cfg, data, batch, groups)
    rewards = token_level_rewards(
        scores,
        batch.proximal_logprobs,
        pad([data.ref_logprobs[i] for i in batch.indices]) if kl_coef else None,
        batch.mask,
        kl_coef=kl_coef,
    )
    return rewards, removed


def sizes_of(data: Trajectories, batch: Minibatch, returns: Tensor | None) -> Tensor:
    """Return (B,) how far each response is from what was expected, in units of the reward: from the
    critic's values, or from the mean of its prompt's responses."""
    if batch.values is not None and returns is not None:
        return masked_mean((returns - batch.values).abs(), batch.mask, dim=1)
    groups = data.group_of[list(batch.indices)]
    return group_statistics(data.rewards[list(batch.indices)], groups).centred.abs()


def _less_baseline(
    cfg: AdvantageConfig, data: Trajectories, batch: Minibatch, groups: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the rewards (B,) less the configured control variate."""
    rewards = data.rewards[list(batch.indices)]
    variate = cfg.control_variate
    if variate.kind == "none":
        return rewards, {}
    baseline = leave_one_out_baseline(rewards, groups)
    if variate.kind == "fitted":
        known: dict[str, Tensor] = {
            "length": batch.mask.sum(dim=1).double(),
            "prompt_mean": baseline,
        }
        if batch.values is not None:
            known["value"] = batch.values[:, 0].double()
        baseline = fitted_baseline(
            rewards, {name: known[name] for name in variate.features}, groups
        )
    adjusted, removed = control_variate(rewards, baseline)
    return adjusted, {"variance_removed": removed}


def weights_of(
    cfg: ImportanceConfig, data: Trajectories, batch: Minibatch, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return (B, T) truncated weights and how they are distributed."""
    behavior = pad([data.behavior_logprobs[i] for i in batch.indices])
    ratio = sequence_log_ratio(batch.proximal_logprobs, behavior, batch.mask, level=cfg.level)
    weights = truncated_importance_weights(ratio, advantages, batch.mask, cap=cfg.cap)
    sums = weight_metrics(ratio, weights, batch.mask, cap=cfg.cap)
    return weights, weight_report(sums)


@dataclass(frozen=True)
class SequenceVeto:
    """Which responses of a step are too far from the behaviour policy.

    Args:
        keep: (B,) bool, True = trained on.
        report: metrics.
        log_tau: where the adaptive threshold stands.
    """

    keep: Tensor
    report: dict[str, float]
    log_tau: float | None


def sequence_veto(
    cfg: SequenceThresholdConfig,
    data: Trajectories,
    batch: Minibatch,
    weights: Tensor,
    log_tau: float | None,
) -> SequenceVeto | None:
    """Judge the responses of a step by their geometric-mean ratio; None where that is off.

    Args:
        weights: (B, T), truncated.
        log_tau: where the adaptive threshold stood.

    Raises:
        TrainingError: nothing is left.
    """
    if cfg.mode == "off":
        return None
    behavior = pad([data.behavior_logprobs[i] for i in batch.indices])
    ratio = sequence_log_ratio(batch.proximal_logprobs, behavior, batch.mask, level="geometric")
    tau = cfg.tau
    if cfg.mode == "adaptive":
        bounds = {"tau_min": cfg.tau_min, "tau_max": cfg.tau_max}
        tau = adapt_tau(
            ratio,
            sequence_weights(weights, batch.mask),
            ess_share=cfg.target_ess_share,
            keep_share=cfg.target_keep_share,
            **bounds,
        )
        tau, log_tau = smooth_tau(tau, log_tau, decay=cfg.smoothing, **bounds)
    keep = geometric_mean_veto(ratio, tau)
    if not bool(keep.any()):
        raise TrainingError(
            f"All {len(keep)} responses of a step are further than tau {tau:.3g} from the "
            f"behaviour policy; the nearest is at {float(ratio.abs().min().exp()):.3g}",
            "at least one response",
            "raise filters.sequence.tau or tau_max, or lower the learning rate",
        )
    vetoed = 1.0 - float(keep.float().mean())
    return SequenceVeto(keep, {"tau": tau, "vetoed_share": vetoed}, log_tau)


def gae_of(
    cfg: AdvantageConfig, rewards: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages and the returns, both (B, T).

    An adaptive lambda follows the share of the returns' variance that the values leave unexplained.
    """
    gae_lambda = cfg.gae_lambda
    if gae_lambda == "adaptive":
        _, returns = generalized_advantage_estimate(
            rewards, values, mask, gamma=cfg.gamma, gae_lambda=1.0
        )
        unexplained = 1.0 - float(explained_variance(values, returns, mask))
        gae_lambda = adaptive_gae_lambda(unexplained)
    advantages, returns = generalized_advantage_estimate(
        rewards, values, mask, gamma=cfg.gamma, gae_lambda=gae_lambda
    )
    return masked_whiten(advantages, mask), returns


def sequence_advantages(
    cfg: AdvantageConfig, rewards: Tensor, mask: Tensor, groups: Tensor
) -> Tensor:
    """Return (B, T) advantages from token rewards without a critic.

    Args:
        cfg: estimator and its options.
        rewards: (B, T) token rewards.
        mask: (B, T) bool, True = a real response token.
        groups: (B,) int64, the prompt of each row.
    """
    if cfg.estimator == "reinforce_pp":
        return reinforce_pp_advantages(rewards, mask, gamma=cfg.gamma)
    scores = rewards.sum(dim=1)
    if cfg.estimator == "rloo":
        advantages = rloo_advantages(scores, groups)
    else:
        advantages = grpo_advantages(scores, groups, normalize_std=cfg.normalize_std)
    spread = broadcast_to_tokens(advantages, mask)
    return masked_whiten(spread, mask) if cfg.whiten else spread


def weight_report(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return readable metrics from the sums of `importance.weight_metrics`."""
    n = float(sums["n_weights"])
    used = effective_sample_size_from_sums(sums["weight_sum"], sums["weight_sq_sum"])
    raw = effective_sample_size_from_sums(sums["raw_weight_sum"], sums["raw_weight_sq_sum"])
    return {
        "ess_share": float(used) / n,
        "ess_share_raw": float(raw) / n,
        "weight_mean": float(sums["weight_sum"]) / n,
        "weight_max": float(sums["weight_max"]),
        "weight_above_cap": float(sums["above_cap_sum"]) / n,
    }


# The policy losses by name: what the workers compute, and the columns that they need.


def actor_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the loss of ``policy_loss`` for the workers."""
    from tasks.runtime.verl_losses import (
        ActorTerms,
        likelihood_loss,
        policy_loss,
        preference_loss,
    )

    loss = cfg.loss
    terms = ActorTerms(loss.aggregation, loss.entropy_coef, loss.kl_coef, loss.kl_kind)
    if cfg.policy_loss == "ppo":
        return partial(
            policy_loss,
            terms,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
        )
    if cfg.policy_loss == "dpo":
        return partial(
            preference_loss, terms, beta=loss.dpo_beta, label_smoothing=loss.dpo_label_smoothing
        )
    return partial(
        likelihood_loss,
        terms,
        kind=cfg.policy_loss,
        level=cfg.importance.level,
        clip_range=loss.clip_high,
    )


def critic_step_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the critic's loss for the workers."""
    from tasks.runtime.verl_losses import critic_loss

    return partial(critic_loss, clip_range=cfg.critic.value_clip, mode=cfg.loss.aggregation)


def actor_batch(
    cfg: OfflinePPOConfig,
    data: Trajectories,
    batch: Minibatch,
    inputs: StepInputs,
    n_rows: int,
) -> Batch:
    """Return a step's rows with the columns that its loss reads.

    Args:
        inputs: advantages and weights of the whole step.
        n_rows: the first rows, which are trained on.
    """
    padded: dict[str, Tensor] = {}
    stored: dict[str, Sequence[Tensor]] = {}
    if cfg.policy_loss == "ppo":
        padded = {
            "proximal_logprobs": batch.proximal_logprobs,
            "advantages": inputs.advantages,
            "weights": inputs.weights,
        }
    elif cfg.policy_loss != "dpo":
        padded = {"advantages": inputs.advantages}
        stored = {"behavior_logprobs": data.behavior_logprobs}
    if cfg.policy_loss == "dpo" or cfg.loss.kl_coef > 0.0:
        stored = {**stored, "ref_logprobs": data.ref_logprobs}
    rows, indices = batch.rows[:n_rows], batch.indices[:n_rows]
    columns = {name: unpad(tensor[:n_rows], rows) for name, tensor in padded.items()}
    columns |= {name: [column[i] for i in indices] for name, column in stored.items()}
    return Batch(
        rows,
        columns,
        group_size=2 if cfg.policy_loss == "dpo" else 1,
        scalars={"calculate_entropy": cfg.loss.entropy_coef > 0.0},
    )


def critic_batch(batch: Minibatch, returns: Tensor, n_rows: int) -> Batch:
    """Return the first ``n_rows`` rows of a step with old values and returns, (B, T)."""
    assert batch.values is not None
    columns = {"old_values": batch.values, "returns": returns}
    rows = batch.rows[:n_rows]
    return Batch(rows, {name: unpad(tensor[:n_rows], rows) for name, tensor in columns.items()})
