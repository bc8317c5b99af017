"""The data card."""

from __future__ import annotations

import pytest

from tasks.data.card import longer_wins_share, quantile, render_card
from tasks.data.hh import Message, Pair, Quarantined, QuarantineReason


def pair_of(name: str, chosen: str, rejected: str) -> Pair:
    return Pair(name, name, "demo", (Message("user", "four"),), chosen, rejected, "f", 1)


PAIRS = [pair_of("a", "xxx", "x"), pair_of("b", "x", "xx"), pair_of("c", "xy", "yx")]


def test_longer_wins_counts_a_tie_half() -> None:
    # one win, one loss, one tie: (1 + 0 + 0.5) / 3
    assert longer_wins_share(PAIRS) == pytest.approx(0.5)
    assert longer_wins_share(PAIRS[:1]) == 1.0


def test_quantile_is_a_value_that_occurs() -> None:
    values = [40, 10, 30, 20]
    # ranks ceil(4 q): 0 -> 1, 0.25 -> 1, 0.5 -> 2, 0.6 -> ceil(2.4) = 3, 1 -> 4
    assert [quantile(values, q) for q in (0, 0.25, 0.5, 0.6, 1)] == [10, 10, 20, 30, 40]


def test_card_shows_counts_lengths_and_an_example_per_reason() -> None:
    left_out = [
        Quarantined(
            QuarantineReason.INVALID_JSON, "cut off", "f", 5, '{"chosen": \x1b' + "x" * 300
        ),
        Quarantined(QuarantineReason.EMPTY_RESPONSE, "chosen is empty", "f", 8, "{}"),
        Quarantined(QuarantineReason.EMPTY_RESPONSE, "chosen is empty", "f", 9, "{}"),
    ]
    splits = {"train": PAIRS[:2], "validation": PAIRS[2:], "test": []}
    card = render_card("demo", "f.jsonl", splits, left_out)
    assert "6 rows, 3 kept, 3 quarantined" in card
    assert "| train | 2 | 2 |" in card
    assert "| test | 0 | 0 |" in card
    # chosen lengths 1, 2, 3: ranks 1, 1, 2, 3, 3, 3
    assert "| chosen | 1 | 1 | 2 | 3 | 3 | 3 |" in card
    assert "50.0%" in card
    assert "### empty_response: 2\n\nFirst at line 8" in card
    assert "### invalid_json: 1\n\nFirst at line 5: cut off" in card
    assert "\x1b" not in card and "\\u001b" in card and "x" * 241 not in card
    assert render_card("demo", "f.jsonl", splits, left_out) == card


def test_card_without_quarantine_says_so() -> None:
    assert "## Quarantined rows\n\nNone." in render_card("demo", "f", {"train": PAIRS}, [])
