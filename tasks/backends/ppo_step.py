"""From a batch to advantages and weights: what is computed before an optimizer step is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tasks.algorithms.advantages import (
    adaptive_gae_lambda,
    broadcast_to_tokens,
    explained_variance,
    generalized_advantage_estimate,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
)
from tasks.algorithms.importance import (
    effective_sample_size_from_sums,
    sequence_log_ratio,
    truncated_importance_weights,
    weight_metrics,
)
from tasks.algorithms.kl import weighted_kl_on_data
from tasks.algorithms.masking import masked_mean, masked_whiten
from tasks.algorithms.rewards import token_level_rewards
from tasks.backends.ppo_batches import Minibatch
from tasks.backends.trajectories import Trajectories, pad
from tasks.config import AdvantageConfig, ImportanceConfig, OfflinePPOConfig


@dataclass(frozen=True)
class StepInputs:
    """What a step is taken with; (B, T) over response tokens.

    Args:
        advantages: per token.
        weights: truncated, of the frozen proximal to the behaviour policy.
        returns: the critic's targets, where there is a critic.
        report: metrics of the batch.
    """

    advantages: Tensor
    weights: Tensor
    returns: Tensor | None = None
    report: dict[str, float] = field(default_factory=dict)


def prepare_step(
    cfg: OfflinePPOConfig, data: Trajectories, batch: Minibatch, kl_coef: float
) -> StepInputs:
    """Compute advantages, weights and what to report of a batch.

    Args:
        cfg: the stage's config.
        data: the fixed dataset.
        batch: rows with what the snapshot says of them.
        kl_coef: present coefficient of the KL-in-reward.
    """
    rewards = data.rewards[list(batch.indices)]
    report = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    if cfg.policy_loss == "dpo":
        empty = torch.zeros(batch.mask.shape)
        return StepInputs(empty, empty, None, report)
    advantages, returns = advantages_of(cfg.advantage, data, batch, kl_coef)
    report["advantage_mean"] = float(masked_mean(advantages, batch.mask))
    if cfg.policy_loss != "ppo":
        return StepInputs(advantages, torch.ones(batch.mask.shape), returns, report)
    weights, found = weights_of(cfg.importance, data, batch, advantages)
    ref = pad([data.ref_logprobs[i] for i in batch.indices])
    kl, _ = weighted_kl_on_data(batch.proximal_logprobs, ref, weights, batch.mask)
    report |= found | {"kl_data": float(kl), "kl_coef": kl_coef}
    return StepInputs(advantages, weights, returns, report)


def advantages_of(
    cfg: AdvantageConfig, data: Trajectories, batch: Minibatch, kl_coef: float
) -> tuple[Tensor, Tensor | None]:
    """Return (B, T) advantages and, with a critic, (B, T) returns."""
    rewards = token_level_rewards(
        data.rewards[list(batch.indices)],
        batch.proximal_logprobs,
        pad([data.ref_logprobs[i] for i in batch.indices]) if kl_coef else None,
        batch.mask,
        kl_coef=kl_coef,
    )
    if batch.values is not None:
        return gae_of(cfg, rewards, batch.values, batch.mask)
    groups = data.group_of[list(batch.indices)]
    return sequence_advantages(cfg, rewards, batch.mask, groups), None


def weights_of(
    cfg: ImportanceConfig, data: Trajectories, batch: Minibatch, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return (B, T) truncated weights and how they are distributed."""
    behavior = pad([data.behavior_logprobs[i] for i in batch.indices])
    ratio = sequence_log_ratio(batch.proximal_logprobs, behavior, batch.mask, level=cfg.level)
    weights = truncated_importance_weights(
        ratio, advantages, batch.mask, level=cfg.level, cap=cfg.cap
    )
    sums = weight_metrics(ratio, weights, batch.mask, level=cfg.level, cap=cfg.cap)
    return weights, weight_report(sums)


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
        gae_lambda = adaptive_gae_lambda(min(max(unexplained, 0.0), 1.0))
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
        return reinforce_pp_advantages(rewards, mask, gamma=cfg.gamma)[0]
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
