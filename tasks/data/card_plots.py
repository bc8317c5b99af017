"""Plots of the data card, as SVG.

They are a few hundred lines of text, written here: a plotting library takes longer to import and to
draw them than a hundred thousand rows take to parse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import numpy as np

from tasks.data.keys import SPLITS
from tasks.data.summary import Summary
from tasks.quarantine import REASONS

_COLOURS: Final = {"prompt": "#666666", "chosen": "#0072B2", "rejected": "#D55E00"}
_SPLIT_COLOURS: Final = {"train": "#0072B2", "validation": "#E69F00", "test": "#009E73"}
_QUARANTINE_COLOUR: Final = "#D55E00"
_BINS: Final = 40
_FONT: Final = 'font-family="sans-serif" font-size="12"'
_TICKS: Final = 5
_BAR: Final = 22
_LONGEST_NAME: Final = 30


def draw_plots(summary: Summary, directory: Path) -> list[Path]:
    """Write ``lengths.svg`` and ``rows.svg``; return them."""
    drawings = {"lengths": _draw_lengths(summary), "rows": _draw_rows(summary)}
    files = []
    for name, drawing in drawings.items():
        files.append(directory / f"{name}.svg")
        files[-1].write_text(drawing.finish(), encoding="utf-8")
    return files


class _Drawing:
    """Shapes with places in pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self._parts: list[str] = []
        self.box((0, 0), width, height, "white")

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
        )

    def box(self, corner: tuple[float, float], width: float, height: float, colour: str) -> None:
        """Fill a rectangle."""
        self._parts.append(
            f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{colour}"/>'
        )

    def text(self, place: tuple[float, float], text: str, anchor: str = "start") -> None:
        """Write text that starts, ends or has its middle at a place."""
        self._parts.append(
            f'<text x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def legend(self, place: tuple[float, float], colours: Mapping[str, str]) -> None:
        """Name colours, one below another."""
        x, y = place
        for name, colour in colours.items():
            self.box((x, y - 9), 10, 10, colour)
            self.text((x + 15, y), name)
            y += 18

    def finish(self) -> str:
        """Return the file's text."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} {_FONT}>'
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


def _draw_lengths(summary: Summary) -> _Drawing:
    """Draw how many texts have how many characters, on a logarithmic axis."""
    drawing = _Drawing(700, 400)
    left, right, top, bottom = 80.0, 680.0, 40.0, 350.0
    longest = max((max(counts, default=1) for counts in summary.lengths.values()), default=1)
    edges = np.geomspace(1, max(longest, 2) + 1, _BINS)
    heights = {}
    for name, counts in summary.lengths.items():
        # A logarithmic axis has no place for 0.
        values = np.maximum(np.fromiter(counts.keys(), float, len(counts)), 1)
        weights = np.fromiter(counts.values(), float, len(counts))
        heights[name] = np.histogram(values, edges, weights=weights)[0]
    most = max(1.0, *(float(found.max()) for found in heights.values()))
    x = left + (right - left) * np.log(edges) / np.log(edges[-1])
    for name, found in heights.items():
        y = bottom - (bottom - top) * found / most
        corners = zip(np.repeat(x, 2)[1:-1], np.repeat(y, 2), strict=True)
        points = [(left, bottom), *((float(a), float(b)) for a, b in corners), (right, bottom)]
        drawing.line(points, _COLOURS[name], 1.5)
    drawing.line([(left, top), (left, bottom), (right, bottom)], "black")
    for power in range(int(np.log10(edges[-1])) + 1):
        place = left + (right - left) * power * np.log(10) / float(np.log(edges[-1]))
        drawing.line([(place, bottom), (place, bottom + 5)], "black")
        drawing.text((place, bottom + 20), f"{10**power:,}", "middle")
    for tick in _ticks(most):
        drawing.text((left - 6, bottom - (bottom - top) * tick / most + 4), f"{tick:,}", "end")
    drawing.text(((left + right) / 2, 390), "characters", "middle")
    drawing.text(((left + right) / 2, 22), "Lengths: pairs by characters", "middle")
    drawing.legend((right - 80, top + 15), {name: _COLOURS[name] for name in heights})
    return drawing


def _draw_rows(summary: Summary) -> _Drawing:
    """Draw what was kept, by subset and split, beside what was left out, by reason."""
    subsets = sorted({subset for subset, _ in summary.split_of})
    kept = {name: [summary.split_of[name, split] for split in SPLITS] for name in subsets}
    reasons = {name: [summary.reasons[name]] for name in REASONS if summary.reasons[name]}
    drawing = _Drawing(1100, 110 + _BAR * max(len(kept), len(reasons), len(SPLITS)))
    drawing.text((330, 22), "Kept, by subset and split", "middle")
    _draw_bars(drawing, (30, 460), kept, list(_SPLIT_COLOURS.values()))
    drawing.legend((470, 60), _SPLIT_COLOURS)
    title = "Quarantined, by reason" if reasons else "Nothing quarantined"
    drawing.text((870, 22), title, "middle")
    _draw_bars(drawing, (580, 1080), reasons, [_QUARANTINE_COLOUR])
    return drawing


def _draw_bars(
    drawing: _Drawing,
    span: tuple[float, float],
    bars: Mapping[str, Sequence[int]],
    colours: Sequence[str],
) -> None:
    """Draw a horizontal bar for each name, of parts one behind another."""
    left, right, y = span[0] + 190, span[1], 45.0
    most = max((sum(parts) for parts in bars.values()), default=1) or 1
    for name, parts in bars.items():
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
        drawing.text((left - 6, y + 14), shown, "end")
        x = left
        for part, colour in zip(parts, colours, strict=True):
            width = (right - left) * part / most
            drawing.box((x, y + 3), width, _BAR - 6, colour)
            x += width
        y += _BAR
    drawing.line([(left, 45), (left, y), (right, y)], "black")
    for tick in _ticks(most) if bars else []:
        drawing.text((left + (right - left) * tick / most, y + 18), f"{tick:,}", "middle")
    drawing.text(((left + right) / 2, y + 38), "rows", "middle")


def _ticks(most: float) -> list[int]:
    """Return round numbers from 0 to the largest value."""
    rough = most / _TICKS
    unit = 10 ** int(np.floor(np.log10(max(rough, 1))))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return list(range(0, int(most) + 1, step))
