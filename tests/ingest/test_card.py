"""The data card and what it is made from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tasks.data.hh import Message, Pair
from tasks.data.schemas import PAIR_SCHEMA, to_table
from tasks.ingest.card import Summary, draw_plots, quantile, render_card

SVG = "{http://www.w3.org/2000/svg}"


def pair_of(number: int, chosen: str, rejected: str) -> Pair:
    name = f"{number}".ljust(20, "0")
    return Pair(name, name, "demo", (Message("user", "four"),), chosen, rejected, "f", number)


def row_of(pair: Pair, split: str) -> dict[str, Any]:
    return {
        "pair_id": pair.pair_id,
        "prompt_id": pair.prompt_id,
        "group_id": pair.prompt_id,
        "split": split,
        "source": pair.subset,
        "subset": pair.subset,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in pair.prompt],
        "chosen": pair.chosen,
        "rejected": pair.rejected,
        "n_turns": len(pair.prompt) + 1,
        "prompt_chars": sum(len(turn.content) for turn in pair.prompt),
        "chosen_chars": len(pair.chosen),
        "rejected_chars": len(pair.rejected),
        "alternating": True,
        "flags": [],
        "source_file": pair.source_file,
        "source_line": pair.source_line,
        "row_number": pair.source_line,
    }


PAIRS = [pair_of(1, "xxx", "x"), pair_of(2, "x", "xx"), pair_of(3, "xy", "yx")]


def left_out(reason: str, line: int, detail: str, raw: str) -> dict[str, Any]:
    place = {"source": "demo", "subset": "demo", "source_file": "f", "source_line": line}
    return {"reason": reason, "detail": detail, "raw": raw, **place}


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    made = Summary(tmp_path)
    for split, pairs in (("train", PAIRS[:2]), ("validation", PAIRS[2:])):
        made.add_pairs(split, to_table([row_of(pair, split) for pair in pairs], PAIR_SCHEMA))
    return made


def test_longer_wins_counts_a_tie_half(summary: Summary) -> None:
    # one win, one loss, one tie: (1 + 0 + 0.5) / 3
    assert summary.longer_wins_share == pytest.approx(0.5)


def test_quantile_is_a_value_that_occurs() -> None:
    values = Counter([40, 10, 30, 20])
    # ranks ceil(4 q): 0 -> 1, 0.25 -> 1, 0.5 -> 2, 0.6 -> ceil(2.4) = 3, 1 -> 4
    assert [quantile(values, q) for q in (0, 0.25, 0.5, 0.6, 1)] == [10, 10, 20, 30, 40]
    assert quantile(Counter({7: 3, 9: 1}), 0.75) == 7


def test_distinct_prompts_are_counted_by_split(summary: Summary) -> None:
    again = to_table([row_of(PAIRS[0], "train")], PAIR_SCHEMA)
    summary.add_pairs("train", again)
    assert summary.prompts() == {"train": 2, "validation": 1, "test": 0}
    assert summary.splits["train"] == 3


def test_card_shows_counts_lengths_and_an_example_per_reason(summary: Summary) -> None:
    summary.add_left_out(left_out("invalid_json", 5, "cut off", '{"chosen": \x1b' + "x" * 300))
    for line in (8, 9):
        summary.add_left_out(left_out("empty_response", line, "chosen is empty", "{}"))
    card = render_card("demo", ["f.jsonl"], summary)
    assert "6 rows, 3 kept, 3 quarantined" in card
    assert "| train | 2 | 2 |" in card
    assert "| test | 0 | 0 |" in card
    assert "| demo | demo | 3 | 3 |" in card
    # chosen lengths 1, 2, 3: ranks 1, 1, 2, 3, 3, 3
    assert "| chosen | 1 | 1 | 2 | 3 | 3 | 3 |" in card
    assert "50.0%" in card
    assert "### empty_response: 2\n\nFirst at line 8" in card
    assert "### invalid_json: 1\n\nFirst at line 5 of `f`: cut off" in card
    assert "\x1b" not in card and "\\u001b" in card and "x" * 241 not in card
    assert render_card("demo", ["f.jsonl"], summary) == card


def test_card_without_quarantine_says_so(summary: Summary) -> None:
    assert "## Quarantined rows\n\nNone." in render_card("demo", ["f"], summary)


def test_plots_are_the_same_for_the_same_data(summary: Summary, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in draw_plots(summary, tmp_path)]
    lengths, rows = (ElementTree.fromstring(data) for data in first)
    named = [{text.text for text in image.iter(f"{SVG}text")} for image in (lengths, rows)]
    assert {"prompt", "chosen", "rejected", "characters"} <= named[0]
    assert {"demo", "train", "validation", "test", "Nothing quarantined"} <= named[1]
    # Two pairs in train, one in validation, none in test: the bar's parts are as 2 to 1 to 0.
    widths = [float(box.attrib["width"]) for box in rows.iter(f"{SVG}rect")][1:4]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2) and widths[2] == 0
    assert [path.read_bytes() for path in draw_plots(summary, tmp_path)] == first


def test_plots_of_an_empty_dataset(tmp_path: Path) -> None:
    assert len(draw_plots(Summary(tmp_path), tmp_path)) == 2
