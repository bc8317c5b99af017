"""Baselines that lower the variance of rewards without a bias: none sees the reward that it meets.

A baseline that does not depend on a response, given its prompt, leaves the policy gradient's
expectation as it is. Leave-one-out and cross-fitting make that true of baselines that come from
the same rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.checks import check_finite, check_float, check_rank, check_shape
from tasks.errors import ConfigError, DataError

_RANK_TOLERANCE = 1e-10


class Adjusted(NamedTuple):
    """Hold rewards less their baseline.

    Attributes:
        rewards: ``(B,)`` fp32.
        variance_removed: ``1 - Var(adjusted) / Var(raw)``; below 0 the baseline adds variance; 0
            where the rewards do not vary.
    """

    rewards: Tensor
    variance_removed: float


def control_variate(rewards: Tensor, baseline: Tensor) -> Adjusted:
    """Subtract a baseline and say what share of the variance went with it.

    Args:
        rewards: ``(B,)``, B at least 1.
        baseline: ``(B,)`` of `leave_one_out_baseline` or `fitted_baseline`, or any other that does
            not depend on the response's own reward.

    Raises:
        DataError: shapes that differ, or no response. TrainingError: a value that is not finite.
    """
    raw = _values("rewards", rewards)
    check_shape("baseline", baseline, rewards.shape)
    adjusted = raw - _values("baseline", baseline)
    # Offsets from the first one: a constant then has a variance of exactly 0.
    total = float((raw - raw[0]).var(unbiased=False))
    left = float((adjusted - adjusted[0]).var(unbiased=False))
    return Adjusted(adjusted.float(), 1.0 - left / total if total > 0.0 else 0.0)


def leave_one_out_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return the mean reward of the OTHER responses of the prompt.

    ``b_i = mean_{j != i, same group}(r_j)``. A response that is alone with its prompt is compared
    with all other responses of the batch. With two responses of one prompt the rest is their
    difference: where prompts hardly differ that is twice the variance, and
    `Adjusted.variance_removed` says so.

    Args:
        rewards: ``(B,)``, B at least 2; group_ids: ``(B,)`` integers, equal = same prompt.

    Returns:
        ``(B,)`` fp64.
    """
    values = _values("rewards", rewards)
    if values.numel() < 2:
        raise DataError("one response", "at least 2 to leave one out", "raise the batch size")
    unique, index = _group_index(group_ids, rewards)
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
        group_ids: ``(B,)`` integers, equal = same prompt; at least 2 prompts.

    Returns:
        ``(B,)`` fp64.

    Raises:
        ConfigError: no feature.
        DataError: one group, or features of a half that do not determine the coefficients: too few
        responses, a constant feature, or one that follows from the others.
    """
    if not features:
        raise ConfigError("a fitted baseline without features", "at least one", "name a feature")
    values = _values("rewards", rewards)
    unique, index = _group_index(group_ids, rewards)
    if unique.numel() < 2:
        raise DataError(
            "the responses of one prompt", "at least 2 prompts to fit across", "raise batch_prompts"
        )
    columns = []
    for name, feature in features.items():
        check_shape(f"feature {name}", feature, rewards.shape)
        columns.append(_values(f"feature {name}", feature))
    design = torch.stack(columns, dim=1)
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


def _values(name: str, values: Tensor) -> Tensor:
    check_rank(name, values, 1)
    check_float(name, values)
    check_finite(name, values)
    if not values.numel():
        raise DataError(f"{name} of no response", "at least one response", "look at the filters")
    return values.detach().double()


def _group_index(group_ids: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    check_shape("group_ids", group_ids, rewards.shape)
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise DataError(
            f"group_ids has dtype {group_ids.dtype}", "integers", "pass group_ids.long()"
        )
    unique, index = torch.unique(group_ids, return_inverse=True)
    return unique, index
