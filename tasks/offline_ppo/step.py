"""From a batch to advantages and weights: what is computed before an optimizer step is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
from tasks.offline_ppo.config import (
    AdvantageConfig,
    ImportanceConfig,
    OfflinePPOConfig,
    SequenceThresholdConfig,
)
from tasks.offline_ppo.objectives import OBJECTIVES
from tasks.runtime.rows import Batch


def prepare_step(
    cfg: OfflinePPOConfig, batch: Minibatch, kl_coef: float, log_tau: float | None
) -> tuple[Minibatch, dict[str, float], float | None]:
    """Add the advantages, weights and returns that the policy loss needs.

    Args:
        batch: rows with what the snapshot says of them.
        kl_coef: present coefficient of the KL-in-reward.
        log_tau: where the adaptive sequence threshold stands; None before its first batch.

    Returns:
        the batch, what to report of it, and where the threshold stands now.

    Raises:
        TrainingError: the sequence threshold leaves nothing of the step.
    """
    objective, mask = OBJECTIVES[cfg.policy_loss], batch.mask
    report = {"reward_mean": float(batch.rewards.mean()), "reward_std": float(batch.rewards.std())}
    if not objective.uses_advantages:
        return batch, report, log_tau

    advantages, returns, removed = advantages_of(cfg.advantage, batch, kl_coef)
    report |= removed | {"advantage_mean": float(masked_mean(advantages, mask))}
    if batch.values is not None and returns is not None:
        report["explained_variance"] = float(explained_variance(batch.values, returns, mask))
    advantages = advantages * batch.corrections[:, None]
    batch = replace(batch, advantages=advantages, returns=returns)
    if not objective.uses_weights:
        return batch, report, log_tau

    weights, spread = weights_of(cfg.importance, batch, advantages)
    kl = weighted_kl_on_data(batch.proximal_logprobs, batch.ref_logprobs, weights, mask)
    report |= spread | {"kl_data": float(kl), "kl_coef": kl_coef}
    if cfg.filters.sequence.mode != "off":
        keep, tau, log_tau = sequence_veto(cfg.filters.sequence, batch, weights, log_tau)
        report |= {"tau": tau, "vetoed_share": 1.0 - float(keep.float().mean())}
        weights = weights * keep[:, None]
    return replace(batch, weights=weights), report, log_tau


def advantages_of(
    cfg: AdvantageConfig, batch: Minibatch, kl_coef: float
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return (B, T) advantages, with a critic (B, T) returns, and what a control variate did."""
    rewards, removed = token_rewards_of(cfg, batch, kl_coef)
    if batch.values is not None:
        return *gae_of(cfg, rewards, batch.values, batch.mask, batch.bootstrap_values), removed
    return sequence_advantages(cfg, rewards, batch.mask, batch.groups), None, removed


def token_rewards_of(
    cfg: AdvantageConfig, batch: Minibatch, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Return (B, T) token rewards less the control variate, and what that did."""
    scores, removed = _less_baseline(cfg, batch)
    rewards = token_level_rewards(
        scores,
        batch.proximal_logprobs,
        batch.ref_logprobs if kl_coef else None,
        batch.mask,
        kl_coef=kl_coef,
    )
    return rewards, removed


def sizes_of(batch: Minibatch) -> Tensor:
    """Return (B,) how far each response is from what was expected, in units of the reward: from the
    critic's values, or from the mean of its prompt's responses."""
    if batch.values is not None and batch.returns is not None:
        return masked_mean((batch.returns - batch.values).abs(), batch.mask, dim=1)
    return group_statistics(batch.rewards, batch.groups).centred.abs()


def _less_baseline(cfg: AdvantageConfig, batch: Minibatch) -> tuple[Tensor, dict[str, float]]:
    """Return the rewards (B,) less the configured control variate."""
    rewards, groups, variate = batch.rewards, batch.groups, cfg.control_variate
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
    cfg: ImportanceConfig, batch: Minibatch, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return (B, T) truncated weights and how they are distributed."""
    ratio = sequence_log_ratio(
        batch.proximal_logprobs, batch.behavior_logprobs, batch.mask, level=cfg.level
    )
    weights = truncated_importance_weights(ratio, advantages, batch.mask, cap=cfg.cap)
    sums = weight_metrics(ratio, weights, batch.mask, cap=cfg.cap)
    return weights, weight_report(sums)


def sequence_veto(
    cfg: SequenceThresholdConfig, batch: Minibatch, weights: Tensor, log_tau: float | None
) -> tuple[Tensor, float, float | None]:
    """Judge the responses of a step by their geometric-mean ratio to the behaviour policy.

    Args:
        weights: (B, T), truncated.
        log_tau: where the adaptive threshold stood.

    Returns:
        (B,) bool, True = near enough to be trained on; the threshold; where the adaptive one
        stands.

    Raises:
        TrainingError: nothing is left.
    """
    ratio = sequence_log_ratio(
        batch.proximal_logprobs, batch.behavior_logprobs, batch.mask, level="geometric"
    )
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
    return keep, tau, log_tau


def gae_of(
    cfg: AdvantageConfig,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages and the returns, both (B, T).

    An adaptive lambda follows the share of the returns' variance that the values leave unexplained.
    """
    estimate = partial(
        generalized_advantage_estimate,
        rewards,
        values,
        mask,
        gamma=cfg.gamma,
        bootstrap_values=bootstrap_values,
    )
    gae_lambda = cfg.gae_lambda
    if gae_lambda == "adaptive":
        _, returns = estimate(gae_lambda=1.0)
        gae_lambda = adaptive_gae_lambda(1.0 - float(explained_variance(values, returns, mask)))
    advantages, returns = estimate(gae_lambda=gae_lambda)
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


# What goes to the workers.


def actor_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the loss of ``policy_loss`` for the workers."""
    from tasks.runtime import verl_losses

    objective, loss = OBJECTIVES[cfg.policy_loss], cfg.loss
    return partial(
        verl_losses.actor_loss,
        objective.formula(cfg),
        objective.columns,
        mode=loss.aggregation,
        entropy_coef=loss.entropy_coef,
        kl_coef=loss.kl_coef,
        kl_kind=loss.kl_kind,
    )


def critic_step_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the critic's loss for the workers."""
    from tasks.runtime.verl_losses import critic_loss

    return partial(critic_loss, clip_range=cfg.critic.value_clip, mode=cfg.loss.aggregation)


def actor_batch(cfg: OfflinePPOConfig, batch: Minibatch, n_rows: int) -> Batch:
    """Return the first ``n_rows`` rows of a step with the columns that the actor's loss reads."""
    objective = OBJECTIVES[cfg.policy_loss]
    columns = {*objective.columns, *(["ref_logprobs"] if cfg.loss.kl_coef > 0.0 else [])}
    return Batch(
        batch.rows[:n_rows],
        batch.columns(sorted(columns), n_rows),
        group_size=objective.group_size,
        scalars={"calculate_entropy": cfg.loss.entropy_coef > 0.0},
    )


def critic_batch(batch: Minibatch, n_rows: int) -> Batch:
    """Return the first ``n_rows`` rows of a step with old values and returns."""
    columns = batch.columns(("values", "returns"), n_rows)
    columns["old_values"] = columns.pop("values")
    return Batch(batch.rows[:n_rows], columns)
