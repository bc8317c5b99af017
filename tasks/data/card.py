"""The data card: what an ingested dataset holds and what was left out, in one page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tasks.data.hh import Pair, Quarantined, QuarantineReason

_EXAMPLE_CHARS = 240
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def quantile(values: Sequence[int], q: float) -> int:
    r"""Return the value at rank $\max(1, \lceil q n \rceil)$ of the $n$ sorted values."""
    ordered = sorted(values)
    scaled = q * len(ordered)
    rank = int(scaled) + (scaled > int(scaled))
    return ordered[max(rank, 1) - 1]


def longer_wins_share(pairs: Sequence[Pair]) -> float:
    """Return the share of pairs whose chosen response has more characters; a tie counts half."""
    points = [
        0.5 + 0.5 * ((len(p.chosen) > len(p.rejected)) - (len(p.chosen) < len(p.rejected)))
        for p in pairs
    ]
    return sum(points) / len(points)


def render_card(
    subset: str,
    source_name: str,
    splits: Mapping[str, Sequence[Pair]],
    quarantined: Sequence[Quarantined],
) -> str:
    """Return the data card; it depends on nothing but the data."""
    pairs = [pair for members in splits.values() for pair in members]
    rows = len(pairs) + len(quarantined)
    sections = [
        f"# Preference pairs: {subset}",
        f"Source `{source_name}`: {rows} rows, {len(pairs)} kept, {len(quarantined)} quarantined.",
        "## Splits",
        _split_table(splits),
        "A prompt belongs to one split, with all its pairs.",
        "## Lengths in characters",
        _length_table(pairs),
        f"The longer response is the chosen one in {longer_wins_share(pairs):.1%} of the pairs "
        "(equal length counts half).",
        f"Turns in a row with the same role: {sum(not pair.alternating for pair in pairs)} pairs, "
        "kept (column `alternating`).",
        "## Quarantined rows",
        *_quarantine_sections(quarantined),
    ]
    return "\n\n".join(sections) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _split_table(splits: Mapping[str, Sequence[Pair]]) -> str:
    rows = [
        (name, len(pairs), len({pair.prompt_id for pair in pairs}))
        for name, pairs in splits.items()
    ]
    return _table(("split", "pairs", "prompts"), rows)


def _length_table(pairs: Sequence[Pair]) -> str:
    lengths = {
        "prompt": [sum(len(turn.content) for turn in pair.prompt) for pair in pairs],
        "chosen": [len(pair.chosen) for pair in pairs],
        "rejected": [len(pair.rejected) for pair in pairs],
    }
    header = ("text", *(f"{q:.0%}" for q in _QUANTILES))
    rows = [(name, *(quantile(chars, q) for q in _QUANTILES)) for name, chars in lengths.items()]
    return _table(header, rows)


def _quarantine_sections(quarantined: Sequence[Quarantined]) -> list[str]:
    if not quarantined:
        return ["None."]
    sections = []
    for reason in QuarantineReason:
        rows = [row for row in quarantined if row.reason is reason]
        if rows:
            sections.append(_reason_section(reason, rows))
    return sections


def _reason_section(reason: QuarantineReason, rows: Sequence[Quarantined]) -> str:
    first = rows[0]
    # JSON escapes keep control characters of a broken row out of the page.
    raw = json.dumps(first.raw[:_EXAMPLE_CHARS], ensure_ascii=False)
    ending = " ..." if len(first.raw) > _EXAMPLE_CHARS else ""
    return (
        f"### {reason.value}: {len(rows)}\n\n"
        f"First at line {first.source_line}: {first.detail}\n\n    {raw}{ending}"
    )
