"""Means and intervals of rows that come in clusters: several responses to one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.checks import check_count, check_finite, check_in_range, check_shape
from tasks.errors import DataError

# Rows of all replicates that are in memory at once.
_BLOCK: Final = 2_000_000

Statistic = Callable[[Tensor], Tensor]


class Interval(NamedTuple):
    """Hold the ends of a confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Bootstrap:
    """How an interval is drawn: prompts with replacement, each with all its rows (percentiles).

    Attributes:
        replicates: at least 1.
        level: coverage, from 0 to 1.
    """

    replicates: int = 1000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        check_count("bootstrap.replicates", self.replicates)
        check_in_range("bootstrap.level", self.level, 0.0, 1.0)


@dataclass(frozen=True)
class ClusteredMean:
    """A mean of n values that are not independent within a cluster.

    Attributes:
        standard_error: None for one cluster, which says nothing of the spread between clusters.
    """

    value: float
    standard_error: float | None
    n: int
    n_clusters: int


def clustered_mean(values: Tensor, clusters: Tensor | None = None) -> ClusteredMean:
    """Return a mean and its standard error when values of one cluster move together.

    With ``d_g`` the sum over cluster g of ``value - mean``, G clusters and n values::

        SE = sqrt(G / (G - 1) * sum_g d_g^2) / n

    which for clusters of one is the usual ``std / sqrt(n)``.

    Args:
        values: ``(N,)``, N at least 1.
        clusters: ``(N,)`` integers, or None for independent values.
    """
    column = real_column("values", values, values.shape)
    index = cluster_index(clusters, column.numel())
    n, n_clusters = column.numel(), int(index.max()) + 1
    mean = column.mean()
    sums = torch.zeros(n_clusters, dtype=torch.float64).index_add(0, index, column - mean)
    error = None
    if n_clusters > 1:
        error = math.sqrt(n_clusters / (n_clusters - 1) * float(sums.square().sum())) / n
    return ClusteredMean(float(mean), error, n, n_clusters)


def replicate(bootstrap: Bootstrap, clusters: Tensor, statistic: Statistic) -> Tensor:
    """Return the statistic of each replicate.

    Args:
        clusters: ``(N,)`` from 0 to G - 1.
        statistic: from ``(R, N)`` weights, each row's sum 1, to ``(R,)``.
    """
    n_clusters = int(clusters.max()) + 1
    generator = torch.Generator().manual_seed(bootstrap.seed)
    block = max(1, _BLOCK // clusters.numel())
    found = []
    for start in range(0, bootstrap.replicates, block):
        shape = (min(block, bootstrap.replicates - start), n_clusters)
        drawn = torch.randint(n_clusters, shape, generator=generator)
        counts = torch.zeros(shape, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones(shape, dtype=torch.float64))
        weights = counts[:, clusters]
        found.append(statistic(weights / weights.sum(dim=1, keepdim=True)))
    return torch.cat(found)


def percentiles(values: Tensor, level: float) -> Interval:
    """Return the interval between which the middle ``level`` of ``(R,)`` values lies."""
    tails = torch.tensor([0.5 - 0.5 * level, 0.5 + 0.5 * level], dtype=torch.float64)
    low, high = torch.quantile(values, tails).tolist()
    return Interval(low, high)


def cluster_index(groups: Tensor | None, n: int) -> Tensor:
    """Return ``(N,)`` indices from 0 to G - 1, in the order of the ids.

    Args:
        groups: ``(N,)`` integers, equal = one cluster; None = every row is its own.

    Raises:
        DataError: no rows, another shape, or ids that are not integers.
    """
    if n == 0:
        raise DataError("There are no rows", "at least one", "generate for some prompts")
    if groups is None:
        return torch.arange(n)
    check_shape("prompts or clusters", groups, (n,))
    if groups.is_floating_point() or groups.dtype == torch.bool:
        raise DataError(f"Ids have dtype {groups.dtype}", "integers", "pass them as .long()")
    index: Tensor = torch.unique(groups.cpu(), return_inverse=True)[1]
    return index


def real_column(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """Return finite values of this shape in fp64, on the CPU and without a gradient."""
    check_shape(name, values, shape)
    column = values.detach().cpu().double()
    check_finite(name, column)
    return column
