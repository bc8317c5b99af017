"""Plots of the reward model's report: one figure with all of them, and each as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from tasks.algorithms.calibration import ReliabilityBin
from tasks.data.reward_report import AccuracyBin, RewardReport

_BLUE: Final = "#0072B2"
_ORANGE: Final = "#D55E00"
_GREY: Final = "#666666"
_HISTOGRAM_BINS: Final = 30
_DPI: Final = 120
# The area of a marker, in square points, where all pairs are in one bin.
_LARGEST_MARKER: Final = 400.0

Draw = Callable[[Any, RewardReport], None]


def draw_plots(report: RewardReport, directory: Path) -> list[Path]:
    """Write ``overview.png`` and one file for each plot; return them."""
    files = [directory / "overview.png"]
    overview = Figure(figsize=(14, 8))
    places = overview.subplots(2, 3).flat
    # Fixed margins: a computed layout takes several times as long as the drawing.
    overview.subplots_adjust(left=0.06, right=0.98, top=0.95, bottom=0.08, wspace=0.25, hspace=0.3)
    for name, draw in _PLOTS.items():
        draw(next(places), report)
        single = Figure(figsize=(6, 4.5))
        draw(single.subplots(), report)
        single.subplots_adjust(left=0.13, right=0.96, top=0.92, bottom=0.12)
        files.append(directory / f"{name}.png")
        single.savefig(files[-1], dpi=_DPI)
    for unused in places:
        unused.set_visible(False)
    overview.savefig(files[0], dpi=_DPI)
    return files


def _reliability(axes: Any, report: RewardReport) -> None:
    axes.plot([0.5, 1.0], [0.5, 1.0], color=_GREY, linewidth=0.8, label="calibrated")
    _draw_reliability(axes, report.reliability, _ORANGE, "o", f"raw, ECE {report.overall.ece:.3f}")
    after = f"T = {report.temperature.value:.3g}, ECE {report.overall.ece_calibrated:.3f}"
    _draw_reliability(axes, report.reliability_calibrated, _BLUE, "s", after)
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("mean confidence in the preferred response")
    axes.set_ylabel("accuracy (ties count half)")
    axes.set_title("Reliability (area: share of pairs)")
    axes.legend(loc="lower right")


def _draw_reliability(
    axes: Any, bins: Sequence[ReliabilityBin], colour: str, marker: str, label: str
) -> None:
    confidence = [b.confidence for b in bins]
    accuracy = [b.accuracy for b in bins]
    total = sum(b.count for b in bins)
    sizes = [max(8.0, _LARGEST_MARKER * b.count / total) for b in bins]
    axes.plot(confidence, accuracy, color=colour, linewidth=1.2, marker=marker, ms=3, label=label)
    axes.scatter(confidence, accuracy, s=sizes, color=colour, alpha=0.35, marker=marker)


def _margins(axes: Any, report: RewardReport) -> None:
    axes.hist([pair.margin for pair in report.test], bins=_HISTOGRAM_BINS, color=_BLUE)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("margin, chosen less rejected (raw score, nats)")
    axes.set_ylabel("test pairs")
    axes.set_title(f"Margins: accuracy {report.overall.accuracy:.3f}")


def _scores(axes: Any, report: RewardReport) -> None:
    columns = {
        "chosen": ([pair.chosen_score for pair in report.test], _BLUE),
        "rejected": ([pair.rejected_score for pair in report.test], _ORANGE),
    }
    low = min(min(values) for values, _ in columns.values())
    high = max(max(values) for values, _ in columns.values())
    for name, (values, colour) in columns.items():
        span = (low, high) if high > low else None
        style = {"color": colour, "alpha": 0.55, "label": name}
        axes.hist(values, bins=_HISTOGRAM_BINS, range=span, **style)
        axes.axvline(sum(values) / len(values), color=colour, linestyle="--", linewidth=1.2)
    axes.set_xlabel("score (raw, nats); dashed: mean")
    axes.set_ylabel("test responses")
    axes.set_title("Scores")
    axes.legend()


def _by_margin(axes: Any, report: RewardReport) -> None:
    _draw_accuracy(axes, report.overall.by_margin, report.overall.accuracy)
    axes.set_xlabel("mean absolute margin in the bin (raw score, nats)")
    axes.set_title("Accuracy by margin")


def _by_length(axes: Any, report: RewardReport) -> None:
    _draw_accuracy(axes, report.overall.by_length_difference, report.overall.accuracy)
    axes.axvline(0.0, color=_GREY, linewidth=0.8)
    axes.set_xlabel("mean length of chosen less rejected in the bin (tokens)")
    axes.set_title("Accuracy by length difference")


def _draw_accuracy(axes: Any, bins: Sequence[AccuracyBin], overall: float) -> None:
    below = [b.accuracy - b.accuracy_low for b in bins]
    above = [b.accuracy_high - b.accuracy for b in bins]
    axes.errorbar(
        [b.mean for b in bins],
        [b.accuracy for b in bins],
        yerr=[below, above],
        fmt="o-",
        color=_BLUE,
        capsize=3,
        label="bin, 95 % interval",
    )
    axes.axhline(overall, color=_ORANGE, linestyle="--", linewidth=1.0, label="all test pairs")
    axes.axhline(0.5, color=_GREY, linestyle=":", linewidth=1.0, label="chance")
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("accuracy (ties count half)")
    axes.legend(loc="lower right")


_PLOTS: Final[Mapping[str, Draw]] = {
    "reliability": _reliability,
    "margins": _margins,
    "scores": _scores,
    "accuracy_by_margin": _by_margin,
    "accuracy_by_length_difference": _by_length,
}
