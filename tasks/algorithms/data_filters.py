"""Which rows are good enough to train on: filters by flag, reward margin and length."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.errors import DataError


class Filtered(NamedTuple):
    """Hold the outcome.

    Attributes:
        keep: ``(N,)`` bool, True = the row stays.
        dropped: rows by reason, of the filters that are on: ``flags``, ``margin``, ``length``.
    """

    keep: Tensor
    dropped: Mapping[str, int]


def filter_rows(
    margins: Tensor,
    lengths: Tensor,
    flags: Sequence[Collection[str]],
    *,
    min_margin_quantile: float,
    max_length_quantile: float,
    drop_flags: Collection[str],
) -> Filtered:
    """Drop rows by flag, margin and length, each counted under the first reason it falls to.

    Both quantiles are of the rows without a dropped flag, so that bad rows do not move them and
    neither depends on the other. Equal values stay or go together.

    Args:
        margins: ``(N,)`` reward of the chosen less that of the rejected response.
        lengths: ``(N,)`` response tokens; of a pair, those of the longer response.
        flags: N sets of names.
        min_margin_quantile: rows with a margin below this quantile go; 0 is off.
        max_length_quantile: rows longer than this quantile go; 1 is off.
        drop_flags: rows with any of these flags go.

    Raises:
        DataError: nothing is left; with each filter's threshold and count.
    """
    keep = torch.ones(len(flags), dtype=torch.bool)
    dropped: dict[str, int] = {}
    limits: dict[str, str] = {}
    if drop_flags:
        clean = [set(drop_flags).isdisjoint(names) for names in flags]
        keep = torch.tensor(clean, dtype=torch.bool)
        dropped["flags"] = int((~keep).sum())
        limits["flags"] = f"any of {sorted(drop_flags)}"
    unflagged = keep
    if min_margin_quantile > 0.0 and bool(unflagged.any()):
        lowest = lower_quantile(margins[unflagged], min_margin_quantile)
        passed = margins >= lowest
        keep, dropped["margin"] = keep & passed, int((keep & ~passed).sum())
        limits["margin"] = f"below {lowest}, quantile {min_margin_quantile}"
    if max_length_quantile < 1.0 and bool(unflagged.any()):
        longest = upper_quantile(lengths[unflagged], max_length_quantile)
        passed = lengths <= longest
        keep, dropped["length"] = keep & passed, int((keep & ~passed).sum())
        limits["length"] = f"above {longest} tokens, quantile {max_length_quantile}"
    if not bool(keep.any()):
        told = "; ".join(f"{reason} {n} ({limits[reason]})" for reason, n in dropped.items())
        raise DataError(
            f"the filters dropped all {len(flags)} rows: {told}",
            "at least one row left",
            "lower min_margin_quantile, raise max_length_quantile, or take names out of drop_flags",
        )
    return Filtered(keep, dropped)


def lower_quantile(values: Tensor, quantile: float) -> float:
    """Return the value at place ``floor(quantile * n)`` of the sorted values, from 0.

    Of n values at most the share ``quantile`` is below it.
    """
    # 0.29 * 100 is 28.999999999999996.
    place = min(math.floor(round(quantile * len(values), 9)), len(values) - 1)
    return float(values.sort().values[place])


def upper_quantile(values: Tensor, quantile: float) -> float:
    """Return the value at place ``ceil(quantile * n)`` of the sorted values, from 1.

    Of n values at least the share ``quantile`` is at or below it.
    """
    place = max(math.ceil(round(quantile * len(values), 9)), 1) - 1
    return float(values.sort().values[place])


def missing_end_penalty(has_end: Tensor, penalty: float) -> Tensor:
    """Return ``-penalty`` for each response without an end of turn, 0 for the others.

    Args:
        has_end: ``(B,)`` bool, True = the response ends in the end-of-turn token; False = it was
            cut, or never ended.
        penalty: at least 0, in units of the reward that it is added to.

    Returns:
        ``(B,)`` fp32.
    """
    return torch.where(has_end, 0.0, -float(penalty))
