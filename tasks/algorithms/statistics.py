"""Means of judgments and how far they can be trusted, with the question as the unit.

Both turns of a question, and its repeats, stand on one answer: they are not independent, so that
resampling draws whole questions (a cluster bootstrap; Cameron, Gelbach and Miller, 2008).
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Final, NamedTuple, TypeVar

from tasks.errors import DataError

Q = TypeVar("Q", bound=Hashable)

N_RESAMPLES: Final = 2000
_LEVEL: Final = 0.95


class Interval(NamedTuple):
    """Hold a value and its interval.

    Attributes:
        value: the estimate on all questions.
        low, high: 95 % percentile interval; both equal the value for a single question.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Agreement:
    """How far repeats of one judgment agree.

    Attributes:
        n_pairs: pairs of repeats that were compared.
        equal: share of the pairs with the same outcome.
        mean_difference: mean absolute difference of a pair; None for outcomes without a distance.
    """

    n_pairs: int
    equal: float
    mean_difference: float | None


def clustered_interval(
    clusters: Sequence[Sequence[float]], seed: int = 0, n_resamples: int = N_RESAMPLES
) -> Interval:
    """Return the mean over all values and its bootstrap interval over clusters.

    Args:
        clusters: the values of each question; a question without values counts for nothing.

    Raises:
        DataError: no values at all.
    """
    sums = [(sum(values), len(values)) for values in clusters if values]
    if not sums:
        raise DataError("No judgment has a score", "at least one", "look at what the judge said")
    return _bootstrap(sums, seed, n_resamples)


def paired_interval(
    ours: Mapping[Q, Mapping[int, float]],
    theirs: Mapping[Q, Mapping[int, float]],
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
) -> tuple[Interval, int]:
    """Return the mean of ours - theirs over what both were judged on, and how many that were.

    Args:
        ours, theirs: score by turn, by question. What only one side has is left out.

    Raises:
        DataError: nothing was judged on both sides.
    """
    differences = [
        [ours[question][turn] - theirs[question][turn] for turn in sorted(shared)]
        for question in ours
        if (shared := set(ours[question]) & set(theirs.get(question, {})))
    ]
    if not differences:
        raise DataError(
            "The two models have no judged question in common",
            "judgments of the same questions",
            "judge both models on the same question file",
        )
    interval = clustered_interval(differences, seed, n_resamples)
    return interval, sum(map(len, differences))


def agreement(groups: Sequence[Sequence[float]]) -> Agreement | None:
    """Compare all pairs of repeats of each rating; None where nothing was repeated."""
    pairs = [pair for values in groups for pair in combinations(values, 2)]
    if not pairs:
        return None
    return Agreement(
        n_pairs=len(pairs),
        equal=fmean(a == b for a, b in pairs),
        mean_difference=fmean(abs(a - b) for a, b in pairs),
    )


def label_agreement(groups: Sequence[Sequence[str]]) -> Agreement | None:
    """Compare all pairs of repeats of each verdict; None where nothing was repeated."""
    pairs = [pair for values in groups for pair in combinations(values, 2)]
    if not pairs:
        return None
    return Agreement(len(pairs), fmean(a == b for a, b in pairs), None)


def standard_error(values: Sequence[float]) -> float | None:
    """Return s / sqrt(n) with the n - 1 variance; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float((variance / len(values)) ** 0.5)


def _ratio(sums: Sequence[tuple[float, int]]) -> float:
    return sum(total for total, _ in sums) / sum(n for _, n in sums)


def _bootstrap(
    items: Sequence[tuple[float, int]],
    seed: int,
    n_resamples: int,
) -> Interval:
    value = _ratio(items)
    if len(items) == 1:
        return Interval(value, value, value)
    draw = random.Random(seed)
    found = sorted(_ratio(draw.choices(items, k=len(items))) for _ in range(n_resamples))
    tail = (1 - _LEVEL) / 2
    return Interval(value, _quantile(found, tail), _quantile(found, 1 - tail))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


#
# Figures over seeds: mean with standard error, and differences of methods that share their seeds.
#
# A seed decides the data, the models and the sampling, so two methods on the same seed have much in
# common, and the difference within a seed varies less than either figure does.


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes:
        standard_error: ``s / sqrt(n)`` with ``s^2 = sum (x - mean)^2 / (n - 1)``; None for one
            seed, which says nothing about the spread.
        n: seeds.
    """

    mean: float
    standard_error: float | None
    n: int


def seed_mean(values: Sequence[float]) -> SeedMean:
    """Return mean and standard error of one figure per seed.

    Raises:
        DataError: no value, or one that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise DataError(
            f"The figures over seeds are {list(values)}",
            "one finite figure at least",
            "look at the runs of these seeds",
        )
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return SeedMean(mean, None, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return SeedMean(mean, math.sqrt(variance / n), n)


def paired_difference(
    values: Mapping[int, float], reference: Mapping[int, float]
) -> SeedMean | None:
    """Return mean and standard error of ``values - reference`` within the seeds that both have.

    Args:
        values, reference: figures by seed.

    Returns:
        None where no seed is in both.

    Raises:
        DataError: a figure that is not finite.
    """
    shared = [seed for seed in values if seed in reference]
    if not shared:
        return None
    return seed_mean([values[seed] - reference[seed] for seed in shared])
