"""Plots of the data card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from tasks.data.keys import SPLITS
from tasks.data.summary import Summary
from tasks.quarantine import REASONS

_COLOURS: Final = {"prompt": "#666666", "chosen": "#0072B2", "rejected": "#D55E00"}
_BINS: Final = 40
_DPI: Final = 100


def draw_plots(summary: Summary, directory: Path) -> list[Path]:
    """Write ``lengths.png`` and ``rows.png``; return them."""
    lengths = Figure(figsize=(7, 4))
    _draw_lengths(lengths.subplots(), summary)
    lengths.subplots_adjust(bottom=0.14, right=0.98)
    rows = Figure(figsize=(11, 4))
    left, right = rows.subplots(1, 2)
    rows.subplots_adjust(left=0.12, right=0.98, bottom=0.14, wspace=0.45)
    _draw_subsets(left, summary)
    _draw_reasons(right, summary)
    files = []
    for name, figure in (("lengths", lengths), ("rows", rows)):
        files.append(directory / f"{name}.png")
        figure.savefig(files[-1], dpi=_DPI)
    return files


def _draw_lengths(axes: Any, summary: Summary) -> None:
    longest = max((max(counts, default=1) for counts in summary.lengths.values()), default=1)
    edges = np.geomspace(1, max(longest, 2) + 1, _BINS)
    for name, counts in summary.lengths.items():
        # A logarithmic axis has no place for 0.
        values = np.maximum(np.fromiter(counts.keys(), float, len(counts)), 1)
        weights = np.fromiter(counts.values(), float, len(counts))
        axes.hist(values, edges, weights=weights, histtype="step", color=_COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("characters")
    axes.set_ylabel("pairs")
    axes.set_title("Lengths")
    axes.legend()


def _draw_subsets(axes: Any, summary: Summary) -> None:
    subsets = sorted({subset for subset, _ in summary.split_of})
    start = np.zeros(len(subsets))
    for name in SPLITS:
        counts = np.array([summary.split_of[subset, name] for subset in subsets], float)
        axes.barh(subsets, counts, left=start, label=name)
        start += counts
    axes.set_xlabel("pairs")
    axes.set_title("Kept, by subset and split")
    axes.legend()


def _draw_reasons(axes: Any, summary: Summary) -> None:
    found = [reason for reason in REASONS if summary.reasons[reason]]
    axes.barh(found, [summary.reasons[reason] for reason in found], color="#D55E00")
    axes.set_xlabel("rows")
    axes.set_title("Quarantined, by reason" if found else "Nothing quarantined")
