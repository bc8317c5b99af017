"""Rewards: normalised scores, weighted components, and their place among the response tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import torch
from torch import Tensor

from tasks.algorithms.advantages import group_statistics
from tasks.algorithms.calibration import fit_temperature, pair_accuracy, pair_log_loss
from tasks.algorithms.masking import last_token_index, real_only
from tasks.algorithms.statistics import Column
from tasks.errors import ConfigError, RewardError

ScoreMode = Literal["standardize", "unit_range", "raw", "binary"]


def normalize_scores(
    scores: Tensor, *, mean: float, std: float, mode: ScoreMode, clip: float
) -> Tensor:
    """Bring reward-model scores to a fixed scale with statistics of the training split.

    With ``z = clamp((score - mean) / std, -clip, clip)``:

    - standardize: ``z``
    - unit_range: ``z / clip``, from -1 to 1
    - binary: +1 where ``score >= mean``, else -1
    - raw: the score as it is (neither statistics nor clip)

    Args:
        scores: ``(B,)``.
        mean, std: of the training split's scores, in units of the score.
        clip: bound on |z|, in standard deviations.

    Raises:
        RewardError: a std of 0: the scores tell nothing apart.
    """
    values = scores.detach().float()
    if mode == "raw":
        return values
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise RewardError(
            f"the reward statistics are mean {mean} and std {std}",
            "finite numbers and a std above 0",
            "recompute them on the training split; with a std of 0 all responses score the same",
        )
    if mode == "binary":
        return torch.where(values >= mean, 1.0, -1.0)
    standard = ((values - mean) / std).clamp(-clip, clip)
    return standard / clip if mode == "unit_range" else standard


def center_by_group(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean score of a prompt's responses.

    A Bradley-Terry score is known only up to a constant per prompt; this removes it.

    Args:
        scores: ``(B,)``; group_ids: ``(B,)`` long, equal = same prompt. A group of one becomes 0.
    """
    return group_statistics(scores, group_ids).centred


def combine_components(components: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Add reward components up: ``sum_k weight_k * component_k``.

    Args:
        components: by name, ``(B,)`` each.
        weights: by the same names.

    Raises:
        ConfigError: no component, or a component without a weight or a weight without a component,
        by name. RewardError: a component that is not finite.
    """
    unmatched = sorted(set(components) ^ set(weights))
    if unmatched or not components:
        raise ConfigError(
            f"components {sorted(components)} and weights {sorted(weights)}, "
            f"unmatched: {unmatched or 'none given'}",
            "one weight for every component and the other way round",
            "add the missing name, or give it the weight 0",
        )
    names = sorted(components)
    total = torch.zeros_like(components[names[0]], dtype=torch.float32)
    for name in names:
        values = components[name].detach().float()
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            # In fp32: what a reward function returned as a large number may be infinite here.
            raise RewardError(
                f"component {name} holds {len(bad)} value(s) that are not finite, "
                f"the first in row {int(bad[0])}",
                "a finite score for every response",
                "look at that response and at the reward model or reward function that scored it",
            )
        total = total + weights[name] * values
    return total


def token_level_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    *,
    kl_coef: float,
) -> Tensor:
    """Place the score at the last real response token, less a KL penalty on every token.

    ``r_t = -kl_coef * (logprob_t - ref_logprob_t) + score * [t is the last real token]`` (Stiennon
    et al. 2020).

    Args:
        scores: ``(B,)``.
        logprobs, ref_logprobs: ``(B, T)`` in nats; None = no reference, then ``kl_coef`` is 0.
        mask: ``(B, T)`` bool, True = a real response token, the end token included; at least one in
            each row.
        kl_coef: at least 0, reward per nat.

    Returns:
        ``(B, T)`` fp32 without a gradient, 0 under the mask.
    """
    penalty = torch.zeros_like(logprobs, dtype=torch.float32)
    if ref_logprobs is not None:
        log_ratio = logprobs.detach().float() - ref_logprobs.detach().float()
        penalty = -kl_coef * real_only(log_ratio, mask)
    assert ref_logprobs is not None or kl_coef == 0.0
    last = last_token_index(mask).unsqueeze(1)
    return penalty.scatter_add(1, last, scores.detach().float().unsqueeze(1))


# Weights of reward components, searched on preference pairs.


@dataclass(frozen=True)
class WeightTrial:
    """One point of the grid, judged on N pairs.

    Args:
        weights: by component; they add up to 1.
        log_loss: nats per pair, at the temperature that suits these weights best, so that only
            their proportions count.
        accuracy: share of pairs ranked as labelled, ties half.
    """

    weights: Mapping[str, float]
    log_loss: float
    accuracy: float


def simplex_grid(names: Sequence[str], resolution: int) -> Iterator[dict[str, float]]:
    """Yield all weights that are multiples of ``1 / resolution`` and add up to 1.

    There are ``C(resolution + n - 1, n - 1)`` of them for n names; the first gives all to the last
    name.
    """
    n_bars = len(names) - 1
    for bars in combinations(range(resolution + n_bars), n_bars):
        edges = [-1, *bars, resolution + n_bars]
        shares = [right - left - 1 for left, right in pairwise(edges)]
        yield {name: share / resolution for name, share in zip(names, shares, strict=True)}


def judge_weights(components: Mapping[str, Tensor], weights: Mapping[str, float]) -> WeightTrial:
    """Judge weights by how well the weighted sum predicts the labels of pairs.

    Args:
        components: by name, ``(2P,)`` normalised scores: chosen, rejected, chosen, rejected, ...
        weights: by the same names.
    """
    rewards = combine_components(components, weights)
    margins = (rewards[0::2] - rewards[1::2]).double().numpy()
    return WeightTrial(dict(weights), _least_log_loss(margins), pair_accuracy(margins).value)


def _least_log_loss(margins: Column) -> float:
    temperature = fit_temperature(margins)
    if temperature.outcome == "all_right":
        # The loss falls for ever as the temperature does, to log 2 for each tie and 0 for the rest.
        return math.log(2.0) * float((margins == 0).mean())
    return pair_log_loss(margins, temperature.value)


def best_trial(trials: Sequence[WeightTrial]) -> WeightTrial:
    """Return the trial of the lowest log loss; among equals the most accurate, then the first."""
    return min(trials, key=lambda trial: (trial.log_loss, -trial.accuracy))
