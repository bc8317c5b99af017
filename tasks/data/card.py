"""The data card: what an ingested dataset holds and what was left out, in one page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from tasks.data.keys import SPLITS
from tasks.data.summary import Example, Summary, quantile
from tasks.quarantine import REASONS

_QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def render_card(name: str, source_names: Sequence[str], summary: Summary) -> str:
    """Return the data card; it depends on nothing but the data."""
    sections = [
        f"# Preference pairs: {name}",
        f"{_sources(source_names)}: {summary.rows} rows, {summary.kept} kept, "
        f"{summary.left_out} quarantined.",
        "## Splits",
        _split_table(summary, summary.prompts()),
        "A prompt belongs to one split, with all its pairs. "
        f"{summary.shared_rows} validation and test pairs begin like a conversation of train.",
        "## Sources",
        _source_table(summary),
        "## Lengths in characters",
        _length_table(summary),
        f"The longer response is the chosen one in {summary.longer_wins_share:.1%} of the pairs "
        "(equal length counts half).",
        f"Turns in a row with the same role: {summary.not_alternating} pairs, kept (column "
        "`alternating`).",
        f"Rows that repeat an earlier one: {summary.duplicate_share:.2%}.",
        *_flag_section(summary.flags),
        "## Quarantined rows",
        *_quarantine_sections(summary),
    ]
    return "\n\n".join(sections) + "\n"


def _sources(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:8])
    more = f" and {len(names) - 8} more files" if len(names) > 8 else ""
    return f"Source {shown}{more}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _split_table(summary: Summary, prompts: Mapping[str, int]) -> str:
    rows = [(name, summary.splits[name], prompts[name]) for name in SPLITS]
    return _table(("split", "pairs", "prompts"), rows)


def _source_table(summary: Summary) -> str:
    places = sorted({*summary.kept_of, *summary.left_out_of})
    rows = [
        (source, subset, summary.kept_of[source, subset], summary.left_out_of[source, subset])
        for source, subset in places
    ]
    return _table(("source", "subset", "kept", "quarantined"), rows)


def _length_table(summary: Summary) -> str:
    header = ("text", *(f"{q:.0%}" for q in _QUANTILES))
    rows = [
        (name, *(quantile(counts, q) for q in _QUANTILES))
        for name, counts in summary.lengths.items()
    ]
    return _table(header, rows)


def _flag_section(flags: Mapping[str, int]) -> list[str]:
    if not flags:
        return []
    rows = [(name, flags[name]) for name in REASONS if name in flags]
    return ["## Kept with a flag", _table(("flag", "pairs"), rows)]


def _quarantine_sections(summary: Summary) -> list[str]:
    found = [reason for reason in REASONS if summary.reasons[reason]]
    if not found:
        return ["None."]
    return [
        _reason_section(reason, summary.reasons[reason], summary.examples[reason])
        for reason in found
    ]


def _reason_section(reason: str, count: int, first: Example) -> str:
    # JSON escapes keep control characters of a broken row out of the page.
    raw = json.dumps(first.raw, ensure_ascii=False)
    ending = " ..." if first.is_cut else ""
    return (
        f"### {reason}: {count}\n\n"
        f"First at line {first.source_line} of `{first.source_file}`: {first.detail}\n\n"
        f"    {raw}{ending}"
    )
