"""Figures over seeds: mean with standard error, and differences of methods that share their seeds.

A seed decides the data, the models and the sampling, so two methods on the same seed have much in
common, and the difference within a seed varies less than either figure does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.errors import DataError


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
