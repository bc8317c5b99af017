"""A draw without replacement that prefers some groups, and the factors that undo the preference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasks.algorithms.checks import check_in_range
from tasks.errors import ConfigError, DataError


@dataclass(frozen=True)
class Priorities:
    """Hold how much each group is preferred.

    Attributes:
        values: one finite number per group, at least 0, such as \\|reward margin\\|.
        exponent: 0 = no preference, 1 = in proportion to the value.
        uniform_share: share of the draw that ignores the values, above 0 to 1, so that a group of
            value 0 is drawn too.
        epoch_share: share of the groups that one epoch draws, above 0 to 1. No epoch draws a group
            twice, so a group comes at most ``1 / epoch_share`` times as often as the average one;
            at 1 every group comes once per epoch, whatever its value.
    """

    values: Sequence[float]
    exponent: float = 1.0
    uniform_share: float = 0.1
    epoch_share: float = 0.5

    def __post_init__(self) -> None:
        check_priorities(self.values)
        check_in_range("exponent", self.exponent, 0.0, 100.0)
        for name in ("uniform_share", "epoch_share"):
            share = getattr(self, name)
            if not 0.0 < share <= 1.0:
                raise ConfigError(f"{name} is {share}", "above 0, at most 1", f"change {name}")

    def n_selected(self, n_groups: int) -> int:
        """Return how many of so many groups one epoch draws, at least 1."""
        # Rounding first keeps 0.07 * 100 = 7.000000000000001 from becoming 8.
        return max(1, math.ceil(round(self.epoch_share * n_groups, 9)))


class Selected(NamedTuple):
    """Hold one drawn item: its place in the values, and its correction factor."""

    item: int
    correction: float


def check_priorities(values: Sequence[float]) -> None:
    """Refuse a priority that is negative or not finite (DataError, naming the group)."""
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0.0):
            raise DataError(
                f"the priority of group {index} is {value}",
                "a finite number of at least 0",
                "pass absolute margins or advantages, and 0 where there is none",
            )


def draw_probabilities(values: Sequence[float], priorities: Priorities) -> list[float]:
    """Return the probability of each item to be drawn first.

    ``p_i = (1 - uniform_share) * v_i^exponent / sum_j v_j^exponent + uniform_share / n``; uniform
    where all values are 0.

    Args:
        values: n priorities; those held by ``priorities`` are not read.
        priorities: exponent and uniform share.
    """
    n, highest = len(values), max(values)
    if highest == 0.0:
        return [1.0 / n] * n
    # Scaled by the highest, no power overflows and the sum is at least 1.
    powers = [(value / highest) ** priorities.exponent for value in values]
    total = math.fsum(powers)
    uniform = priorities.uniform_share
    return [(1.0 - uniform) * power / total + uniform / n for power in powers]


def select_prioritized(
    values: Sequence[float], priorities: Priorities, rng: random.Random
) -> list[Selected]:
    """Draw m = epoch_share * n items without replacement, one after the other in proportion to p.

    Each item gets the key ``t_i = e_i / p_i`` with ``e_i`` exponential of mean 1, and the m lowest
    keys are drawn, lowest first (Efraimidis & Spirakis 2006). With the next key ``kappa``, item i
    was drawn with probability ``1 - exp(-p_i * kappa)``, hence the correction

        c_i = (m / n) / (1 - exp(-p_i * kappa))

    with which ``sum_drawn(c_i * x_i) / m`` has the expectation ``sum_all(x_i) / n`` exactly
    (bottom-k estimator, Cohen & Kaplan 2007). At m = n nothing is left out and ``c_i = 1``.

    Args:
        values: n priorities, n at least 1.
        priorities: how values become probabilities.
        rng: one number per item is drawn from it.
    """
    probabilities = draw_probabilities(values, priorities)
    n, m = len(values), priorities.n_selected(len(values))
    keyed = sorted(
        (-math.log(1.0 - rng.random()) / probability, index)
        for index, probability in enumerate(probabilities)
    )
    kappa = keyed[m][0] if m < n else math.inf
    return [
        Selected(index, (m / n) / -math.expm1(-probabilities[index] * kappa))
        for _, index in keyed[:m]
    ]
