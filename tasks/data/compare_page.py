"""A comparison of runs as one page for a browser, which needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment

from tasks.data.markdown import plain

_WIDTH: Final = 320
_HEIGHT: Final = 140
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render_comparison(comparison: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        comparison: `tasks.comparison.Comparison` as plain values; each row may have ``differs``.
    """
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files("tasks.data").joinpath("compare_page.html").read_text("utf-8")
    )
    runs = [
        {**run, "colour": _COLOURS[index % len(_COLOURS)], "link": _link(run.get("url"))}
        for index, run in enumerate(comparison["runs"])
    ]
    page = template.render(
        policy=_POLICY,
        runs=runs,
        tables=comparison["tables"],
        charts=[_chart(curve) for curve in comparison["curves"]],
        width=_WIDTH,
        height=_HEIGHT,
    )
    return plain(page)


def _link(url: str | None) -> str | None:
    """Return an address that a browser may follow."""
    return url if url and url.startswith(("http://", "https://")) else None


def _chart(curve: Mapping[str, Any]) -> dict[str, Any]:
    points = [point for line in curve["lines"] for point in line]
    left, right = _bounds([step for step, _ in points])
    low, high = _bounds([value for _, value in points])
    lines = []
    for index, line in enumerate(curve["lines"]):
        if line:
            placed = [
                f"{_WIDTH * (step - left) / (right - left):.1f},"
                f"{_HEIGHT * (1 - (value - low) / (high - low)):.1f}"
                for step, value in line
            ]
            colour = _COLOURS[index % len(_COLOURS)]
            lines.append({"colour": colour, "points": " ".join(placed)})
    return {
        "name": curve["name"],
        "lines": lines,
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "left": f"{left:g}",
        "right": f"{right:g}",
    }


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # A line of equal values lies in the middle.
    return (low, high) if high > low else (low - 0.5, high + 0.5)
