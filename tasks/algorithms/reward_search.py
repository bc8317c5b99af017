"""Weights of reward components, searched on preference pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import log

from torch import Tensor

from tasks.algorithms.calibration import fit_temperature, pair_accuracy, pair_log_loss
from tasks.algorithms.checks import check_in_range
from tasks.algorithms.rewards import combine_components


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
    check_in_range("resolution", resolution, 1, 1e6)
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
    margins = rewards[0::2] - rewards[1::2]
    return WeightTrial(
        dict(weights),
        _least_log_loss(margins),
        pair_accuracy(margins).value,
    )


def _least_log_loss(margins: Tensor) -> float:
    temperature = fit_temperature(margins)
    if temperature.outcome == "all_right":
        # The loss falls for ever as the temperature does, to log 2 for each tie and 0 for the rest.
        return log(2.0) * float((margins == 0).float().mean())
    return pair_log_loss(margins, temperature.value)


def best_trial(trials: Sequence[WeightTrial]) -> WeightTrial:
    """Return the trial of the lowest log loss; among equals the most accurate, then the first."""
    return min(trials, key=lambda trial: (trial.log_loss, -trial.accuracy))
