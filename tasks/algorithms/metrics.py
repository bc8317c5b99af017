"""Metrics of micro-batches and ranks, put together without a mean of means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from tasks.errors import DataError


def merge_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Merge the metrics of micro-batches and ranks exactly.

    Names that end in ``_sum`` and counts ``n_*`` are added, names that end in ``_max`` take the
    maximum.

    Args:
        parts: at least one mapping; all hold the same names.

    Raises:
        DataError: no part, names that differ between parts, or a name that tells no way to merge.
    """
    rows = [{name: float(value) for name, value in part.items()} for part in parts]
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(
            f"{len(rows)} sets of metrics with the names {[sorted(row) for row in rows]}",
            "at least one set, all with the same names",
            "merge the metrics of one loss function only",
        )
    return {name: _merge(name, [row[name] for row in rows]) for name in rows[0]}


def average_metrics(metrics: Mapping[str, float], *, count: str = "n_tokens") -> dict[str, float]:
    """Turn merged sums into means: ``x_sum`` becomes ``x = x_sum / metrics[count]``; others stay.

    Args:
        metrics: from `merge_metrics`.
        count: ``n_tokens``, ``n_sequences``, ``n_pairs`` or ``n_weights``, the unit of the sums.

    Raises:
        DataError: the count is missing or 0.
    """
    if not metrics.get(count, 0.0) > 0:
        raise DataError(
            f"{count} is {metrics.get(count, 'missing')} in the metrics {sorted(metrics)}",
            "a count above 0",
            "name the unit of these sums",
        )
    return {
        name.removesuffix("_sum"): value / metrics[count] if name.endswith("_sum") else value
        for name, value in metrics.items()
    }


def _merge(name: str, values: list[float]) -> float:
    if name.endswith("_sum") or name.startswith("n_"):
        return sum(values)
    if name.endswith("_max"):
        return max(values)
    raise DataError(
        f"the metric {name!r} tells no way to merge it",
        "a name that ends in _sum or _max or begins with n_",
        "return a sum and its count instead of a mean",
    )
