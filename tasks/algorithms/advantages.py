"""Advantage estimates on real response tokens, and baselines of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.masking import masked_whiten, real_only
from tasks.errors import DataError

#
# Baselines that lower the variance of rewards without a bias: none sees the reward that it meets.
#
# A baseline that does not depend on a response, given its prompt, leaves the policy gradient's
# expectation as it is. Leave-one-out and cross-fitting make that true of baselines that come from
# the same rewards.

_RANK_TOLERANCE = 1e-10


def control_variate(rewards: Tensor, baseline: Tensor) -> tuple[Tensor, float]:
    """Subtract a baseline and say what share of the variance went with it.

    Args:
        rewards: ``(B,)``, B at least 1.
        baseline: ``(B,)`` of `leave_one_out_baseline` or `fitted_baseline`, or any other that does
            not depend on the response's own reward.

    Returns:
        the rest, ``(B,)`` fp32, and ``1 - Var(rest) / Var(rewards)``: below 0 the baseline adds
        variance; 0 where the rewards do not vary.
    """
    raw = rewards.double()
    rest = raw - baseline.double()
    # Offsets from the first one: a constant then has a variance of exactly 0.
    total = float((raw - raw[0]).var(unbiased=False))
    left = float((rest - rest[0]).var(unbiased=False))
    return rest.float(), 1.0 - left / total if total > 0.0 else 0.0


def leave_one_out_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return the mean reward of the OTHER responses of the prompt.

    ``b_i = mean_{j != i, same group}(r_j)``. A response that is alone with its prompt is compared
    with all other responses of the batch. With two responses of one prompt the rest is their
    difference: where prompts hardly differ that is twice the variance, and `control_variate` says
    so.

    Args:
        rewards: ``(B,)``, B at least 2; group_ids: ``(B,)`` integers, equal = same prompt.

    Returns:
        ``(B,)`` fp64.
    """
    values = rewards.double()
    unique, index = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(unique.numel(), dtype=torch.float64, device=values.device)
    size = zeros.index_add(0, index, torch.ones_like(values))[index]
    others = zeros.index_add(0, index, values)[index] - values
    rest = (values.sum() - values) / (values.numel() - 1)
    return torch.where(size > 1, others / (size - 1).clamp(min=1), rest)


def fitted_baseline(rewards: Tensor, features: Mapping[str, Tensor], group_ids: Tensor) -> Tensor:
    """Predict rewards by least squares on features, fitted on the other half of the prompts.

    ``b_i = c_0 + sum_k c_k * f_ik``. The groups, by rising id, go to two halves in turn; each half
    is predicted with coefficients of the other one, so no response fits its own baseline. In fp64,
    without a ridge.

    Args:
        rewards: ``(B,)``.
        features: by name, ``(B,)`` each: length, value, ... Whatever is made of rewards must leave
            the response's own out: for the prompt's mean take `leave_one_out_baseline`.
        group_ids: ``(B,)`` integers, equal = same prompt.

    Returns:
        ``(B,)`` fp64.

    Raises:
        DataError: one prompt, or features of a half that do not determine the coefficients: too few
        responses, a constant feature, or one that follows from the others.
    """
    values = rewards.double()
    unique, index = torch.unique(group_ids, return_inverse=True)
    if unique.numel() < 2:
        raise DataError(
            "the responses of one prompt", "at least 2 prompts to fit across", "raise batch_prompts"
        )
    design = torch.stack([feature.double() for feature in features.values()], dim=1)
    first = index % 2 == 0
    baseline = torch.empty_like(values)
    for half in (first, ~first):
        baseline[half] = _predict(design[~half], values[~half], design[half], list(features))
    return baseline


def _predict(design: Tensor, targets: Tensor, new: Tensor, names: list[str]) -> Tensor:
    """Fit targets on the standardised design and predict for the new rows."""
    mean, std = design.mean(dim=0), design.std(dim=0, unbiased=False)
    # A constant column is told by its own size, since rounding leaves its deviation above 0.
    constant = std <= _RANK_TOLERANCE * design.abs().amax(dim=0)
    scaled = (design - mean) / torch.where(constant, 1.0, std)
    rank = int(torch.linalg.matrix_rank(scaled, rtol=_RANK_TOLERANCE)) + 1
    if bool(constant.any()) or rank <= len(names):
        told = [name for name, same in zip(names, constant.tolist(), strict=True) if same]
        raise DataError(
            f"the features {names} of {len(targets)} responses have rank {rank} with the constant"
            + (f"; constant: {told}" if told else ""),
            f"rank {len(names) + 1} in each half of the prompts",
            "leave out a feature that is constant or follows from others, or raise the batch size",
        )
    # By QR, not by normal equations, which would square the condition number.
    q, r = torch.linalg.qr(scaled)
    centre = targets.mean()
    slopes = torch.linalg.solve_triangular(r, (q.T @ (targets - centre)).unsqueeze(1), upper=True)
    prediction: Tensor = centre + (((new - mean) / std) @ slopes).squeeze(1)
    return prediction


# Statistics by group: all responses of one prompt, of any number and in any order.


class GroupStats(NamedTuple):
    """Hold each row's deviation from its group, row by row.

    Attributes:
        centred: ``(B,)`` score minus group mean; exactly 0 where all scores of the group are equal.
        std: ``(B,)`` standard deviation of the group over n - 1, 0 for a group of one.
        size: ``(B,)`` rows in the group.
    """

    centred: Tensor
    std: Tensor
    size: Tensor


def group_statistics(scores: Tensor, group_ids: Tensor) -> GroupStats:
    """Compare each score with its group, in fp32.

    Args:
        scores: ``(B,)``; group_ids: ``(B,)`` integers, equal = one group.
    """
    unique, index = torch.unique(group_ids, return_inverse=True)
    values = scores.detach().float()
    zeros = torch.zeros(unique.shape[0], device=values.device)
    size = zeros.index_add(0, index, torch.ones_like(values))
    # Measured from the group's lowest score, equal scores differ by exactly 0 and not by a
    # rounding error, which a division by the group's tiny standard deviation would blow up.
    lowest = zeros.scatter_reduce(0, index, values, reduce="amin", include_self=False)
    offset = values - lowest[index]
    mean = zeros.index_add(0, index, offset) / size
    centred = offset - mean[index]
    squares = zeros.index_add(0, index, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(centred, std[index], size[index])


def grpo_advantages(scores: Tensor, group_ids: Tensor, *, normalize_std: bool) -> Tensor:
    """Compare each response with its prompt's other responses (GRPO, Shao et al. 2024).

    ``A_i = (s_i - mean(group)) / (std(group) + 1e-6)``, std over n - 1; without ``normalize_std``
    the numerator only.

    Args:
        scores: ``(B,)``; group_ids: ``(B,)`` integers, any order and any group size.

    Returns:
        ``(B,)`` fp32. A group of one, or of equal scores, tells nothing and gets exactly 0.
    """
    stats = group_statistics(scores, group_ids)
    return stats.centred / (stats.std + 1e-6) if normalize_std else stats.centred


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


# Estimates token by token.


def generalized_advantage_estimate(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
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
        rewards: ``(B, T)`` of each token.
        values: ``(B, T)`` of the state BEFORE each token.
        mask: ``(B, T)`` bool, True = a real response token.
        gamma, gae_lambda: from 0 to 1, per token.
        bootstrap_values: ``(B,)`` value of the state after the last real token: 0 for a response
            that ended, the critic's value for one that was cut off. None = all ended.

    Returns:
        advantages and returns, ``(B, T)`` fp32 without a gradient, 0 under the mask.
    """
    rewards, values = real_only(rewards.detach(), mask), real_only(values.detach(), mask)
    next_value = torch.zeros(len(mask), device=mask.device)
    if bootstrap_values is not None:
        assert bootstrap_values.shape == next_value.shape
        next_value = bootstrap_values.detach().float()
    next_advantage = torch.zeros_like(next_value)
    backwards = []
    for reward, value, real in zip(
        *(reversed(x.unbind(dim=1)) for x in (rewards, values, mask)), strict=True
    ):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(real, value, next_value)
        next_advantage = torch.where(real, advantage, next_advantage)
        backwards.append(next_advantage)
    advantages = real_only(torch.stack(backwards[::-1], dim=1), mask)
    return advantages, advantages + values


def adaptive_gae_lambda(variance_ratio: float) -> float:
    """Return ``0.95 + 0.03 * (1 - variance_ratio)``, from 0.95 to 0.98.

    Args:
        variance_ratio: variance of the critic's errors over variance of the returns (1 - explained
            variance); clamped to 0 to 1 first.
    """
    return 0.95 + 0.03 * (1.0 - min(max(variance_ratio, 0.0), 1.0))


def reinforce_pp_advantages(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Whiten discounted returns over the whole batch (REINFORCE++, Hu 2025).

    ``G_t = r_t + gamma * G_{t+1}`` over real tokens, then mean 0 and variance 1 over all real
    tokens of the batch.

    Args:
        rewards: ``(B, T)`` of each token of the WHOLE batch.
        mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.
    """
    # With values of 0 and lambda 1, GAE is the discounted return.
    returns, _ = generalized_advantage_estimate(
        rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0
    )
    return masked_whiten(returns, mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return ``1 - Var(returns - values) / Var(returns)``.

    1 = a perfect critic, 0 or less = no better than a constant.

    Args:
        values, returns: ``(B, T)`` of the whole batch; mask: ``(B, T)`` bool, True = a real
            response token.

    Returns:
        a scalar; 0 where the returns do not vary, since nothing can be explained.
    """
    kept_returns = returns.detach()[mask].float()
    errors = kept_returns - values.detach()[mask].float()
    # Offsets from the first token: a constant then has a variance of exactly 0.
    total = (kept_returns - kept_returns[:1]).var(unbiased=False)
    return torch.where(total > 0, 1.0 - errors.var(unbiased=False) / total, 0.0)
