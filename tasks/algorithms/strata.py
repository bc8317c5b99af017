"""Named parts of a data set, and how many groups of each a batch holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tasks.errors import ConfigError, DataError


@dataclass(frozen=True)
class Strata:
    """Name the subset of each group.

    Attributes:
        names: subset of each group.
        weights: by subset, above 0: how often its groups are drawn against those of a subset of
            weight 1, which is what a subset without one has.
    """

    names: Sequence[str]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(self.names))
        if unknown:
            raise DataError(
                f"weights for the subsets {unknown}, of which there is no group",
                f"subsets among {sorted(set(self.names))}",
                "correct the names, or take the weights out",
            )
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0.0):
                raise ConfigError(
                    f"the weight of subset {name!r} is {weight}",
                    "a finite number above 0",
                    "change it; to leave a subset out, filter it before the sampler",
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Groups of each subset, by name in alphabetical order."""
        return dict(sorted(Counter(self.names).items()))

    def shares(self) -> dict[str, Fraction]:
        """Return each subset's share of a batch: ``weight * size``, divided by their sum."""
        parts = {
            name: Fraction(self.weights.get(name, 1.0)) * size for name, size in self.sizes.items()
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()}


def next_quota(
    shares: Sequence[Fraction], drawn: Sequence[int], batch_size: int
) -> tuple[int, ...]:
    """Return how many groups of each subset the next batch holds.

    Subset s gets ``floor(batch_size * share_s)``, and the places that are left go one each to the
    subsets that are most behind ``share_s`` of everything drawn so far, the first of equals. So no
    batch is a whole group away from the shares, and what rounding takes comes back later.

    Args:
        shares: exact, adding up to 1.
        drawn: groups of each subset drawn before.
        batch_size: groups of the batch, at least 1.
    """
    exact = [share * batch_size for share in shares]
    quota = [math.floor(count) for count in exact]
    total = sum(drawn) + batch_size
    behind = [
        total * share - before - n for share, before, n in zip(shares, drawn, quota, strict=True)
    ]
    # A subset whose exact count is whole never takes part in the rounding.
    rounded = [s for s, count in enumerate(exact) if count != quota[s]]
    rounded.sort(key=lambda s: (-behind[s], s))
    for s in rounded[: batch_size - sum(quota)]:
        quota[s] += 1
    return tuple(quota)
