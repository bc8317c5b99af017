"""The data card: what an ingested dataset holds and what was left out, in one page of Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.data.hh import SPLITS
from tasks.data.quarantine import REASONS
from tasks.report import plots
from tasks.report.page import cell, join, table

# What an ingested dataset holds, counted while it is written; memory stays bounded.

LENGTH_COLUMNS: Final = {
    "prompt": "prompt_chars",
    "chosen": "chosen_chars",
    "rejected": "rejected_chars",
}
_EXAMPLE_CHARS: Final = 240
_NAMED_LINES: Final = 20
_PARTITIONS: Final = 16
_SMALL: Final = 2**14
_PENDING_ROWS: Final = 2**18

Array = np.ndarray[Any, Any]


class DistinctCounter:
    """Counts distinct ids of any number, which lie on disk meanwhile."""

    def __init__(self, directory: Path, name: str) -> None:
        self._paths = [directory / f"{name}-{part:02d}.ids" for part in range(_PARTITIONS)]
        self._pending: list[Array] = []

    def add(self, ids: pa.ChunkedArray) -> None:
        """Add ids, each of at least 16 hexadecimal digits of a hash."""
        for chunk in ids.chunks:
            if len(chunk):
                heads = pc.binary_slice(chunk.cast(pa.binary()), 0, 16).cast(pa.binary(16))
                raw = np.frombuffer(heads.buffers()[1], "u1").reshape(-1, 16)
                self._pending.append(_from_hex(raw[heads.offset : heads.offset + len(heads)]))
        if sum(map(len, self._pending)) > _PENDING_ROWS:
            self._flush()

    def count(self) -> int:
        """Return how many distinct ids there were."""
        if not any(path.is_file() for path in self._paths):
            return len(np.unique(np.concatenate(self._pending))) if self._pending else 0
        self._flush()
        found = (np.fromfile(path, "<u8") for path in self._paths if path.is_file())
        return sum(len(np.unique(ids)) for ids in found)

    def _flush(self) -> None:
        if not self._pending:
            return
        ids = np.concatenate(self._pending)
        part = ids % _PARTITIONS
        for number, path in enumerate(self._paths):
            with path.open("ab") as handle:
                ids[part == number].tofile(handle)
        self._pending.clear()


def _from_hex(digits: Array) -> Array:
    """Return the numbers that rows of 16 lower-case hexadecimal digits are."""
    values = (digits & 15) + 9 * (digits >> 6)
    pairs = values[:, ::2] << 4 | values[:, 1::2]
    numbers: Array = np.ascontiguousarray(pairs).view("<u8")[:, 0]
    return numbers


@dataclass
class Summary:
    """Counts of a dataset.

    Args:
        reasons: left-out rows by reason.
        flags: kept rows by what they were kept in spite of.
        kept_of, left_out_of: rows by (source, subset).
        lengths: for prompt, chosen and rejected: pairs by their characters.
        margins: pairs by characters of chosen minus rejected, in bins of 100.
        examples: the first row that was left out for each reason.
        shared_rows: validation and test rows whose conversation begins like one of train.
    """

    directory: Path
    splits: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    kept_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    split_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    longer_points: float = 0.0
    not_alternating: int = 0
    shared_rows: int = 0
    has_many_files: bool = False

    def __post_init__(self) -> None:
        self._prompts = {name: DistinctCounter(self.directory, name) for name in SPLITS}
        self.lengths = {name: Counter() for name in LENGTH_COLUMNS}

    @property
    def kept(self) -> int:
        """Rows kept."""
        return sum(self.splits.values())

    @property
    def left_out(self) -> int:
        """Rows left out."""
        return sum(self.reasons.values())

    @property
    def rows(self) -> int:
        """All rows."""
        return self.kept + self.left_out

    @property
    def longer_wins_share(self) -> float:
        """Share of pairs whose chosen response has more characters; a tie counts half."""
        return self.longer_points / self.kept if self.kept else 0.0

    @property
    def duplicate_share(self) -> float:
        """Share of all rows that repeat an earlier one."""
        repeated = self.reasons["duplicate"] + self.reasons["normalized_duplicate"]
        repeated += self.flags["duplicate"] + self.flags["normalized_duplicate"]
        return repeated / self.rows if self.rows else 0.0

    def prompts(self) -> dict[str, int]:
        """Return the distinct prompts of each split."""
        return {name: counter.count() for name, counter in self._prompts.items()}

    def add_pairs(self, split: str, pairs: pa.Table) -> None:
        """Count pairs of one split and one source."""
        self.splits[split] += pairs.num_rows
        self._prompts[split].add(pairs["prompt_id"])
        chosen, rejected = (pairs[f"{side}_chars"].to_numpy() for side in ("chosen", "rejected"))
        self.longer_points += float((0.5 + 0.5 * np.sign(chosen - rejected)).sum())
        self.not_alternating += pairs.num_rows - int(pc.sum(pairs["alternating"]).as_py() or 0)
        for name, column in LENGTH_COLUMNS.items():
            _count_into(self.lengths[name], pairs[column].to_numpy())
        flags = pc.list_flatten(pairs["flags"])
        self.flags.update(flags.to_pylist())
        self._add_places(split, pairs)

    def _add_places(self, split: str, pairs: pa.Table) -> None:
        source = pairs["source"][0].as_py()
        for entry in pc.value_counts(pairs["subset"]).to_pylist():
            subset, count = entry["values"], entry["counts"]
            self.kept_of[source, subset] += count
            self.split_of[subset, split] += count

    def add_left_out(self, entry: dict[str, Any]) -> None:
        """Count one row that was left out."""
        reason = entry["reason"]
        self.reasons[reason] += 1
        self.left_out_of[entry["source"], entry["subset"]] += 1
        named = self.lines.setdefault(reason, [])
        if len(named) < _NAMED_LINES:
            line = str(entry["source_line"])
            named.append(f"{entry['source_file']}:{line}" if self.has_many_files else line)
        self.examples.setdefault(reason, entry)

    def name_left_out(self) -> str:
        """Return how many rows were left out and, by reason, their lines."""
        parts = []
        for reason, lines in sorted(self.lines.items()):
            more = self.reasons[reason] - len(lines)
            ending = f" and {more} more" if more else ""
            parts.append(f"{reason} (lines {', '.join(lines)}{ending})")
        return f"{self.left_out} rows left out: {'; '.join(parts)}"

    def counts(self) -> dict[str, int]:
        """Return the counts for the manifest."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "quarantined": self.left_out,
            **{f"quarantined_{reason}": self.reasons[reason] for reason in REASONS},
            **{f"flagged_{name}": count for name, count in sorted(self.flags.items())},
            **{name: self.splits[name] for name in SPLITS},
            "held_out_sharing_a_first_turn_with_train": self.shared_rows,
        }


def _count_into(counter: Counter[int], values: Array) -> None:
    if len(values) and values.max() < _SMALL:
        # Faster than sorting, but with a place for every number.
        counts = np.bincount(values)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        counter[value] += count


def quantile(counts: Counter[int], q: float) -> int:
    r"""Return the value at rank $\max(1, \lceil q n \rceil)$ of $n$ counted values."""
    scaled = q * sum(counts.values())
    rank = max(int(scaled) + (scaled > int(scaled)), 1)
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    return 0


_QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def render_card(name: str, source_names: Sequence[str], summary: Summary) -> str:
    """Return the data card; it depends on nothing but the data."""
    shown = ", ".join(f"`{name}`" for name in source_names[:8])
    more = f" and {len(source_names) - 8} more files" if len(source_names) > 8 else ""
    flags = [(name, summary.flags[name]) for name in REASONS if name in summary.flags]
    reasons = [reason for reason in REASONS if summary.reasons[reason]]
    return join(
        [
            f"# Preference pairs: {name}",
            f"Source {shown}{more}: {summary.rows} rows, {summary.kept} kept, "
            f"{summary.left_out} quarantined.",
            "## Splits",
            _split_table(summary),
            "A prompt belongs to one split, with all its pairs. "
            f"{summary.shared_rows} validation and test pairs begin like a conversation of train.",
            "## Sources",
            _source_table(summary),
            "## Lengths in characters",
            _length_table(summary),
            f"The longer response is the chosen one in {summary.longer_wins_share:.1%} of the "
            "pairs (equal length counts half).",
            f"Turns in a row with the same role: {summary.not_alternating} pairs, kept (column "
            "`alternating`).",
            f"Rows that repeat an earlier one: {summary.duplicate_share:.2%}.",
            *(["## Kept with a flag", table(("flag", "pairs"), flags)] if flags else []),
            "## Quarantined rows",
            "" if reasons else "None.",
            *(_reason_section(reason, summary) for reason in reasons),
        ]
    )


def _split_table(summary: Summary) -> str:
    prompts = summary.prompts()
    rows = [(name, summary.splits[name], prompts[name]) for name in SPLITS]
    return table(("split", "pairs", "prompts"), rows)


def _source_table(summary: Summary) -> str:
    places = sorted({*summary.kept_of, *summary.left_out_of})
    rows = [
        (*map(cell, place), summary.kept_of[place], summary.left_out_of[place]) for place in places
    ]
    return table(("source", "subset", "kept", "quarantined"), rows)


def _length_table(summary: Summary) -> str:
    rows = [
        (name, *(quantile(counts, q) for q in _QUANTILES))
        for name, counts in summary.lengths.items()
    ]
    return table(("text", *(f"{q:.0%}" for q in _QUANTILES)), rows)


def _reason_section(reason: str, summary: Summary) -> str:
    first = summary.examples[reason]
    # JSON escapes keep control characters of a broken row out of the page.
    raw = json.dumps(first["raw"][:_EXAMPLE_CHARS], ensure_ascii=False)
    ending = " ..." if len(first["raw"]) > _EXAMPLE_CHARS else ""
    return (
        f"### {reason}: {summary.reasons[reason]}\n\n"
        f"First at line {first['source_line']} of `{first['source_file']}`: {first['detail']}\n\n"
        f"    {raw}{ending}"
    )


# The plots, as SVG written here: matplotlib takes half a second to import and to draw them, and a
# hundred thousand rows are ingested in one and a half.

_COLOURS: Final = {"prompt": plots.GREY, "chosen": plots.BLUE, "rejected": plots.ORANGE}
_SPLIT_COLOURS: Final = {"train": plots.BLUE, "validation": plots.YELLOW, "test": plots.GREEN}
_BINS: Final = 40
_FONT: Final = 'font-family="sans-serif" font-size="12"'
_TICKS: Final = 5
_BAR: Final = 22
_LONGEST_NAME: Final = 30


def draw_plots(summary: Summary, directory: Path) -> list[Path]:
    """Write ``lengths.svg`` and ``rows.svg``; return them."""
    files = [directory / "lengths.svg", directory / "rows.svg"]
    files[0].write_text(_draw_lengths(summary).finish(), encoding="utf-8")
    files[1].write_text(_draw_rows(summary).finish(), encoding="utf-8")
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
    _draw_bars(drawing, (580, 1080), reasons, [plots.ORANGE])
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
