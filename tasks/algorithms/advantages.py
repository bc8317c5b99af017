"""Advantage estimates on real response tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_finite,
    check_float,
    check_in_range,
    check_mask,
    check_positive,
    check_rank,
    check_shape,
    check_token_values,
)
from tasks.algorithms.groups import group_statistics
from tasks.algorithms.masking import masked_whiten, sanitize
from tasks.errors import DataError, TrainingError


def generalized_advantage_estimate(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns by GAE (Schulman et al. 2016).

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lambda * A_{t+1}``,
    where t + 1 is the next REAL token: each row equals GAE on its unpadded tokens. Returns are
    ``A_t + V_t``.

    Args:
        token_rewards: ``(B, T)`` reward of each token.
        values: ``(B, T)`` value of the state BEFORE each token, see
            `logprobs.take_response_states`.
        response_mask: ``(B, T)`` bool, True = a real response token.
        gamma, gae_lambda: from 0 to 1, per token.
        bootstrap_values: ``(B,)`` value of the state after the last real token: 0 for a response
            that ended, the critic's value for one cut off by the length limit. None = all ended.

    Returns:
        advantages and returns, ``(B, T)`` fp32 without a gradient, 0 under the mask.

    Raises:
        DataError: shapes that differ. ConfigError: gamma or lambda out of range.
        TrainingError: a real reward or value that is not finite.
    """
    check_token_values(response_mask, token_rewards=token_rewards, values=values)
    check_in_range("gamma", gamma, 0.0, 1.0)
    check_in_range("gae_lambda", gae_lambda, 0.0, 1.0)
    check_finite("token_rewards", token_rewards, response_mask)
    check_finite("values", values, response_mask)
    rewards = sanitize(token_rewards.detach(), response_mask)
    state_values = sanitize(values.detach(), response_mask)
    next_value = _bootstrap(bootstrap_values, response_mask)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for step in reversed(range(rewards.shape[1])):
        real, value = response_mask[:, step], state_values[:, step]
        delta = rewards[:, step] + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(real, value, next_value)
        next_advantage = torch.where(real, advantage, next_advantage)
        advantages[:, step] = torch.where(real, advantage, 0.0)
    return advantages, advantages + state_values


def _bootstrap(bootstrap_values: Tensor | None, mask: Tensor) -> Tensor:
    if bootstrap_values is None:
        return torch.zeros(mask.shape[0], device=mask.device)
    check_shape("bootstrap_values", bootstrap_values, mask.shape[:1])
    check_float("bootstrap_values", bootstrap_values)
    check_finite("bootstrap_values", bootstrap_values)
    return bootstrap_values.detach().float()


def adaptive_gae_lambda(variance_ratio: float) -> float:
    """Return ``0.95 + 0.03 * (1 - variance_ratio)``, from 0.95 to 0.98.

    Args:
        variance_ratio: variance of the critic's errors over variance of the returns (1 - explained
            variance); clamped to 0 to 1 first.

    Raises:
        TrainingError: the ratio is NaN.
    """
    if math.isnan(variance_ratio):
        raise TrainingError(
            "the variance ratio is NaN",
            "a number from 0 to 1",
            "check the critic's values and returns",
        )
    return 0.95 + 0.03 * (1.0 - min(max(variance_ratio, 0.0), 1.0))


def grpo_advantages(
    scores: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Compare each response with its prompt's other responses (GRPO, Shao et al. 2024).

    ``A_i = (s_i - mean(group)) / (std(group) + eps)``, std over n - 1; without ``normalize_std``
    the numerator only.

    Args:
        scores: ``(B,)``; group_ids: ``(B,)`` integers, any order and any group size.

    Returns:
        ``(B,)`` fp32. A group of one, or of equal scores, tells nothing and gets exactly 0.
    """
    check_positive("eps", eps)
    stats = group_statistics(scores, group_ids)
    return stats.centred / (stats.std + eps) if normalize_std else stats.centred


def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean of the OTHER responses of the prompt (RLOO, Ahmadian et al. 2024).

    ``A_i = s_i - mean_{j != i}(s_j) = n / (n - 1) * (s_i - mean(group))``.

    Args:
        scores: ``(B,)``; group_ids: ``(B,)`` integers, any order and any group size.

    Returns:
        ``(B,)`` fp32; 0 for a group of one.
    """
    stats = group_statistics(scores, group_ids)
    return stats.centred * stats.size / (stats.size - 1).clamp(min=1)


def reinforce_pp_advantages(
    token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Whiten discounted returns over the whole batch (REINFORCE++, Hu 2025).

    ``G_t = r_t + gamma * G_{t+1}`` over real tokens, then mean 0 and variance 1 over all real
    tokens of the batch.

    Args:
        token_rewards: ``(B, T)`` of the WHOLE batch, from `rewards.token_level_rewards`.
        response_mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        advantages (whitened) and returns, ``(B, T)``, 0 under the mask.
    """
    zeros = torch.zeros_like(token_rewards)
    # With values of 0 and lambda 1, GAE is the discounted return.
    returns, _ = generalized_advantage_estimate(
        token_rewards, zeros, response_mask, gamma=gamma, gae_lambda=1.0
    )
    return masked_whiten(returns, response_mask), returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return ``1 - Var(returns - values) / Var(returns)``.

    1 = a perfect critic, 0 or less = no better than a constant.

    Args:
        values, returns: ``(B, T)`` of the whole batch; mask: ``(B, T)`` bool, True = a real
            response token.

    Returns:
        a scalar; 0 where the returns do not vary, since nothing can be explained.

    Raises:
        DataError: no real token. TrainingError: a real value or return that is not finite.
    """
    check_token_values(mask, values=values, returns=returns)
    check_finite("values", values, mask)
    check_finite("returns", returns, mask)
    if not bool(mask.any()):
        raise DataError("the mask has no real token", "at least one True", "drop empty responses")
    kept_returns = returns.detach()[mask].float()
    errors = kept_returns - values.detach()[mask].float()
    # Offsets from the first token: a constant then has a variance of exactly 0.
    total = (kept_returns - kept_returns[:1]).var(unbiased=False)
    return torch.where(total > 0, 1.0 - errors.var(unbiased=False) / total, 0.0)


def broadcast_to_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Give every real token its sequence's score.

    Args:
        scores: ``(B,)``; mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.
    """
    check_rank("scores", scores, 1)
    check_mask(mask, mask.shape)
    check_shape("scores", scores, mask.shape[:1])
    return sanitize(scores.unsqueeze(1).expand(mask.shape), mask)
