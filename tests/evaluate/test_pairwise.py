"""Pairwise judgments in FastChat's format, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError
from tasks.evaluate.judgments import (
    PairJudgment,
    WinRate,
    latest_pairs,
    read_pair_judgments,
    summarize_pairs,
    write_pairs,
)

JUDGE = ("j", "pair-v2")


def game(question: int, first: Any, swapped: Any, **more: Any) -> PairJudgment:
    return PairJudgment(question, "ours", "theirs", 1, first, swapped, JUDGE, **more)


GAMES = [
    game(1, "A", "B"),  # ours in both orders
    game(2, "B", "A"),  # theirs in both orders
    game(3, "A", "A"),  # the first place in both orders
    game(4, "tie", "tie"),
    game(5, None, "B"),  # failed
]


def test_wins_ties_and_losses_of_both_sides() -> None:
    ours, theirs = (summarize_pairs(GAMES, name) for name in ("ours", "theirs"))
    assert ours.rate == WinRate(1, 2, 1) and theirs.rate == WinRate(1, 2, 1)
    assert (ours.failed, ours.coverage) == (1, 0.8)
    # Games 1, 2 and 4 of the four valid ones.
    assert ours.consistent == 0.75
    only = summarize_pairs([GAMES[0]], "theirs")
    assert only.rate == WinRate(0, 0, 1)


def test_all_failed_gives_no_rate() -> None:
    summary = summarize_pairs([GAMES[4]], "ours")
    assert (summary.rate, summary.consistent, summary.coverage) == (None, None, 0.0)


def test_winners_are_models_in_the_file_and_survive_reading(tmp_path: Path) -> None:
    path = tmp_path / "j_pair.jsonl"
    games = [*GAMES, game(6, "A", "B", texts=("x", "y"), tstamp=2.0, repeat=1)]
    write_pairs(path, games)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["g1_winner"], row["g2_winner"]) for row in rows] == [
        ("model_1", "model_1"),
        ("model_2", "model_2"),
        ("model_1", "model_2"),
        ("tie", "tie"),
        ("error", "model_1"),
        ("model_1", "model_1"),
    ]
    assert read_pair_judgments(path) == games


def test_later_judgment_replaces_whatever_the_order_of_the_models() -> None:
    again = PairJudgment(1, "theirs", "ours", 1, "A", "B", JUDGE, tstamp=9.0)
    assert latest_pairs([GAMES[0], again]) == [again]
    assert again.winner_for("ours") == "B"


def test_bad_rows_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = {"question_id": 1, "model_1": "a", "model_2": "b", "turn": 1, "judge": ["j", "p"]}
    for change, found in (
        ({"g1_winner": "a", "g2_winner": "tie"}, "g1_winner is 'a'"),
        ({"g1_winner": "tie"}, "no field 'g2_winner'"),
        ({"g1_winner": "tie", "g2_winner": "tie", "judge": ["j"]}, "judge is"),
    ):
        path.write_text(json.dumps(row | change))
        with pytest.raises(DataError, match=rf"p\.jsonl, line 1: {found}"):
            read_pair_judgments(path)
