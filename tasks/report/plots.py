"""Plots of the reports: the palette, figures, and how curves, spreads and intervals are drawn.

matplotlib is imported with the first figure, so that importing a stage does not cost it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tasks.algorithms.calibration import ReliabilityBin

# Told apart by the colour-blind (Okabe and Ito, 2008).
BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
YELLOW: Final = "#E69F00"
GREY: Final = "#666666"
_EVENT_COLOURS: Final = ("#CC79A7", GREEN, "#A6761D", "#3A7CA5", "#7F3C8D", "#8C564B")
# The name of an event starts at one of these heights, so that close ones do not cover each other.
_EVENT_HEIGHTS: Final = (0.98, 0.74, 0.5, 0.26)
# Events of one name closer than this share of the axis are named once.
_EVENT_GAP: Final = 0.03
# Below this many points each is marked, for a line of one point is not seen.
_MARKED_POINTS: Final = 40
_HISTOGRAM_BINS: Final = 30
# The area of a marker, in square points, where all pairs are in one bin.
_LARGEST_MARKER: Final = 400.0
_COLUMNS: Final = 3
_DPI: Final = 120

Axes = Any
Plot = Callable[[Axes], None]


def new_figure(width: float, height: float, **margins: float) -> Any:
    """Return an empty figure, in inches; without margins the layout is computed.

    Fixed margins are for figures of several plots, where computing them takes several times as
    long as the drawing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=None if margins else "constrained")
    if margins:
        figure.subplots_adjust(**margins)
    return figure


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG; return the file."""
    figure.savefig(path, dpi=_DPI)
    return path


def draw_plots(plots: Mapping[str, Plot], directory: Path) -> list[Path]:
    """Write ``overview.png`` with all plots, and one file for each; return them."""
    n_rows = -(-len(plots) // _COLUMNS)
    margins = {"left": 0.05, "right": 0.95, "top": 0.95, "bottom": 0.18 / n_rows}
    overview = new_figure(18, 5.5 * n_rows, wspace=0.25, hspace=0.35, **margins)
    files = [directory / "overview.png"]
    for place, (name, draw) in enumerate(plots.items(), start=1):
        draw(overview.add_subplot(n_rows, _COLUMNS, place))
        single = new_figure(8, 5.5, left=0.13, right=0.9, top=0.9, bottom=0.2)
        draw(single.subplots())
        files.append(save(single, directory / f"{name}.png"))
    save(overview, files[0])
    return files


def draw_curve(axes: Axes, points: Sequence[tuple[int, float]], label: str, colour: str) -> None:
    """Draw one metric's (step, value); without any nothing is drawn."""
    if points:
        marker = "o" if len(points) < _MARKED_POINTS else None
        style = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 1.2}
        axes.plot(*zip(*points, strict=True), label=label, **style)


def draw_line(axes: Axes, value: float, label: str | None = None, colour: str = ORANGE) -> None:
    """Draw a value that curves or points are compared with, as a dashed line."""
    axes.axhline(value, color=colour, linestyle="--", linewidth=1.0, label=label)


def draw_events(axes: Axes, events: Sequence[tuple[int, str]]) -> None:
    """Draw each (step, name), in order of steps, as a line in the colour of its name."""
    if not events:
        return
    names = list(dict.fromkeys(name for _, name in events))
    low, high = axes.get_xlim()
    gap = _EVENT_GAP * (max(high, events[-1][0]) - min(low, events[0][0]))
    named: dict[str, int] = {}
    n_labels = 0
    for step, name in events:
        colour = _EVENT_COLOURS[names.index(name) % len(_EVENT_COLOURS)]
        axes.axvline(step, color=colour, linestyle=":", linewidth=1.2)
        if name in named and step - named[name] < gap:
            continue
        named[name] = step
        height = _EVENT_HEIGHTS[n_labels % len(_EVENT_HEIGHTS)]
        n_labels += 1
        axes.text(
            step,
            height,
            name,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize="x-small",
            color=colour,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )


def draw_histograms(
    axes: Axes, columns: Mapping[str, tuple[Sequence[float], str]], **style: Any
) -> None:
    """Draw values, by label with their colour, in the same bins."""
    every = [value for values, _ in columns.values() for value in values]
    low, high = min(every), max(every)
    span = (low, high) if high > low else None
    for label, (values, colour) in columns.items():
        axes.hist(values, _HISTOGRAM_BINS, range=span, color=colour, label=label, **style)


def draw_intervals(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[float],
    ends: Sequence[tuple[float, float]],
    **style: Any,
) -> None:
    """Draw values with the ends of their intervals."""
    below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
    above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(places, values, yerr=[below, above], capsize=3, **style)


def draw_reliability(
    axes: Axes, bins: Sequence[ReliabilityBin], colour: str, marker: str, label: str
) -> None:
    """Draw accuracy by confidence; the area of a marker is the share of pairs."""
    confidence = [b.confidence for b in bins]
    accuracy = [b.accuracy for b in bins]
    total = sum(b.count for b in bins)
    sizes = [max(8.0, _LARGEST_MARKER * b.count / total) for b in bins]
    axes.plot(confidence, accuracy, color=colour, linewidth=1.2, marker=marker, ms=3, label=label)
    axes.scatter(confidence, accuracy, s=sizes, color=colour, alpha=0.35, marker=marker)


def add_legend(axes: Axes, **style: Any) -> None:
    """Name what is drawn; where nothing is, say so."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**style)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
