"""Which rows are good enough to train on: filters by flag, reward margin and length."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tasks.algorithms.masking import (
    check_finite,
    check_in_range,
    check_mask,
    check_rank,
    check_shape,
)
from tasks.errors import ConfigError, DataError

Column = TypeVar("Column")


@dataclass(frozen=True)
class FilterRules:
    """Say what is dropped; the defaults drop nothing.

    Attributes:
        min_margin_quantile: from 0 to below 1; rows with a margin below this quantile go.
        max_length_quantile: above 0 to 1; rows longer than this quantile go.
        drop_flags: rows with any of these flags go.
    """

    min_margin_quantile: float = 0.0
    max_length_quantile: float = 1.0
    drop_flags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_margin_quantile < 1.0:
            raise ConfigError(
                f"min_margin_quantile is {self.min_margin_quantile}",
                "from 0 to below 1",
                "change min_margin_quantile",
            )
        if not 0.0 < self.max_length_quantile <= 1.0:
            raise ConfigError(
                f"max_length_quantile is {self.max_length_quantile}",
                "above 0, at most 1",
                "change max_length_quantile",
            )


@dataclass(frozen=True)
class FilterColumns:
    """Hold what N rows (pairs or responses) are judged by; a column that no rule needs may be None.

    Attributes:
        margins: ``(N,)`` reward of the chosen less that of the rejected response.
        lengths: ``(N,)`` response tokens; of a pair, those of the longer response.
        flags: N sets of names.
        valid: ``(N,)`` bool, True = a row. What lies under False is not read, is not counted and is
            not kept. None = all are rows.
    """

    margins: Tensor | None = None
    lengths: Tensor | None = None
    flags: Sequence[Collection[str]] | None = None
    valid: Tensor | None = None


class Filtered(NamedTuple):
    """Hold the outcome.

    Attributes:
        keep: ``(N,)`` bool, True = the row stays.
        dropped: rows by reason: ``flags``, ``margin``, ``length``.
        thresholds: lowest margin and highest length that stay, of the filters that are on.
    """

    keep: Tensor
    dropped: Mapping[str, int]
    thresholds: Mapping[str, float]


def lower_quantile_keep(values: Tensor, quantile: float, rows: Tensor) -> tuple[Tensor, float]:
    """Keep the rows at or above a quantile.

    With n rows the threshold is the value at place ``floor(quantile * n)`` of the sorted values,
    from 0. Equal values stay or go together: at most the share ``quantile`` goes, and the highest
    value never does.

    Args:
        values: ``(N,)``; quantile: from 0 to below 1.
        rows: ``(N,)`` bool, True = counts, at least one.

    Returns:
        ``(N,)`` bool (False where ``rows`` is) and the threshold.
    """
    check_in_range("quantile", quantile, 0.0, 1.0)
    ordered = _sorted_rows(values, rows)
    # 0.29 * 100 is 28.999999999999996.
    place = min(math.floor(round(quantile * len(ordered), 9)), len(ordered) - 1)
    threshold = float(ordered[place])
    return rows & (values.detach() >= threshold), threshold


def upper_quantile_keep(values: Tensor, quantile: float, rows: Tensor) -> tuple[Tensor, float]:
    """Keep the rows at or below a quantile: the mirror image of `lower_quantile_keep`.

    With n rows the threshold is the value at place ``ceil(quantile * n)`` of the sorted values,
    from 1: at least the share ``quantile`` stays.
    """
    check_in_range("quantile", quantile, 0.0, 1.0)
    ordered = _sorted_rows(values, rows)
    place = max(math.ceil(round(quantile * len(ordered), 9)), 1) - 1
    threshold = float(ordered[place])
    return rows & (values.detach() <= threshold), threshold


def flags_keep(flags: Sequence[Collection[str]], drop: Collection[str], rows: Tensor) -> Tensor:
    """Keep the rows that have none of the flags to drop.

    Args:
        flags: N sets of names; drop: names; rows: ``(N,)`` bool, True = counts.
    """
    if len(flags) != rows.shape[0]:
        raise DataError(
            f"{len(flags)} sets of flags for {rows.shape[0]} rows",
            "one for each row",
            "pass an empty set for a row without flags",
        )
    dropped = set(drop)
    clean = [dropped.isdisjoint(names) for names in flags]
    return rows & torch.tensor(clean, dtype=torch.bool, device=rows.device)


def filter_rows(columns: FilterColumns, rules: FilterRules) -> Filtered:
    """Apply the rules, and count each dropped row under the first reason it falls to.

    The order of reasons is flags, margin, length. Both quantiles are of the rows without a dropped
    flag, so that bad rows do not move them and neither depends on the other.

    Args:
        columns: of N rows; margins and lengths are compared in their own precision.
        rules: a rule that is on needs its column.

    Raises:
        ConfigError: a rule without its column.
        DataError: columns of different sizes, or nothing is left: with each filter's threshold and
        count. TrainingError: a margin of a row that is not finite.
    """
    rows = _rows_of(columns)
    keep = rows
    dropped: dict[str, int] = {}
    thresholds: dict[str, float] = {}
    if rules.drop_flags:
        flags = _needed("drop_flags", columns.flags)
        keep = flags_keep(flags, rules.drop_flags, rows)
        dropped["flags"] = int(rows.sum() - keep.sum())
        _check_left(keep, rows, rules, dropped, thresholds)
    unflagged = keep
    if rules.min_margin_quantile > 0.0:
        margins = _needed("min_margin_quantile", columns.margins)
        passed, thresholds["margin"] = lower_quantile_keep(
            margins, rules.min_margin_quantile, unflagged
        )
        keep, dropped["margin"] = keep & passed, int((keep & ~passed).sum())
    if rules.max_length_quantile < 1.0:
        lengths = _needed("max_length_quantile", columns.lengths)
        passed, thresholds["length"] = upper_quantile_keep(
            lengths, rules.max_length_quantile, unflagged
        )
        keep, dropped["length"] = keep & passed, int((keep & ~passed).sum())
    _check_left(keep, rows, rules, dropped, thresholds)
    return Filtered(keep, dropped, thresholds)


def missing_end_penalty(has_end: Tensor, penalty: float) -> Tensor:
    """Return ``-penalty`` for each response without an end of turn, 0 for the others.

    Args:
        has_end: ``(B,)`` bool, True = the response ends in the end-of-turn token, see
            `masking.ended_with`; False = it was cut, or never ended.
        penalty: finite, at least 0, in units of the reward that it is added to.

    Returns:
        ``(B,)`` fp32.
    """
    check_rank("has_end", has_end, 1)
    check_mask(has_end, has_end.shape, "has_end")
    check_in_range("penalty", penalty, 0.0, 1e6)
    return torch.where(has_end, 0.0, -float(penalty))


def _rows_of(columns: FilterColumns) -> Tensor:
    given = [c for c in (columns.margins, columns.lengths, columns.valid) if c is not None]
    if columns.flags is not None:
        n_rows = len(columns.flags)
    elif given:
        n_rows = given[0].shape[0] if given[0].dim() else 0
    else:
        raise ConfigError("a filter without any column", "at least one", "pass what rows have")
    named = {"margins": columns.margins, "lengths": columns.lengths, "valid": columns.valid}
    for name, column in named.items():
        if column is not None:
            check_shape(name, column, (n_rows,))
    if columns.valid is not None:
        check_mask(columns.valid, (n_rows,), "valid")
    device = given[0].device if given else None
    rows = torch.ones(n_rows, dtype=torch.bool, device=device)
    rows = rows if columns.valid is None else columns.valid
    if not bool(rows.any()):
        raise DataError("a filter over no row", "at least one", "look at what came before it")
    return rows


def _needed(rule: str, column: Column | None) -> Column:
    if column is None:
        raise ConfigError(
            f"{rule} is set, but its column is not given",
            "the column that the rule judges by",
            f"leave {rule} at its default, or compute the column",
        )
    return column


def _sorted_rows(values: Tensor, rows: Tensor) -> Tensor:
    check_rank("values", values, 1)
    check_mask(rows, values.shape, "rows")
    check_finite("values to filter by", values, rows)
    kept = values.detach()[rows]
    if not kept.numel():
        raise DataError("a quantile of no row", "at least one row", "look at earlier filters")
    return kept.sort().values


def _check_left(
    keep: Tensor,
    rows: Tensor,
    rules: FilterRules,
    dropped: Mapping[str, int],
    thresholds: Mapping[str, float],
) -> None:
    if bool(keep.any()):
        return
    limits = {
        "flags": f"any of {sorted(rules.drop_flags)}",
        "margin": f"below {thresholds.get('margin')}, quantile {rules.min_margin_quantile}",
        "length": f"above {thresholds.get('length')} tokens, quantile {rules.max_length_quantile}",
    }
    told = "; ".join(f"{reason} {n} ({limits[reason]})" for reason, n in dropped.items())
    raise DataError(
        f"the filters dropped all {int(rows.sum())} rows: {told}",
        "at least one row left",
        "lower min_margin_quantile, raise max_length_quantile, or take names out of drop_flags",
    )
