"""Judgments: failed, repeated and tied ones, and the files of FastChat and AlpacaEval."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError
from tasks.evaluate.judgments import (
    UNBOUNDED_METHOD,
    PairJudgment,
    Score,
    Verdict,
    WinRate,
    compare_scores,
    is_annotations,
    latest_pairs,
    latest_scores,
    read_judgments,
    score_annotations,
    score_model,
    summarize_pairs,
    write_model_outputs,
    write_pairs,
    write_scores,
)

SharedCases = Callable[[str], list[dict[str, Any]]]

JUDGE = ("reward_model", UNBOUNDED_METHOD)


def score_of(question_id: int, turn: int, value: float | None, tstamp: float = 0.0) -> Score:
    return Score(question_id, "m", turn, value, JUDGE, tstamp=tstamp)


def test_failed_judgments_enter_no_mean(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-02")
    scores = []
    for turn in (1, 2):
        given = case["input"][f"turn{turn}"]
        # Any values with the given sum and number have the right mean.
        scores += [score_of(q, turn, given["sum"] / given["valid"]) for q in range(given["valid"])]
        scores += [score_of(99, turn, None) for _ in range(given["failed"])]
    summary = score_model(scores)
    right = case["expected"]
    assert summary.turns[1] == pytest.approx(right["turn1"], abs=1e-6)
    assert summary.turns[2] == pytest.approx(right["turn2"], abs=1e-6)
    assert summary.mean is not None
    assert summary.mean.value == pytest.approx(right["average_pooled"], abs=1e-6)
    assert summary.coverage == pytest.approx(right["coverage"])


def test_summary_of_nothing_has_no_mean() -> None:
    summary = score_model([score_of(1, 1, None)], {1: "math"})
    assert (summary.mean, summary.turns, summary.coverage) == (None, {}, 0.0)
    assert summary.categories == {"math": None}


def test_latest_judgment_wins() -> None:
    first, later, other = score_of(1, 1, 3.0, 10.0), score_of(1, 1, 9.0, 20.0), score_of(1, 2, 5.0)
    assert latest_scores([first, later, other]) == [later, other]
    assert latest_scores([later, first]) == [later]
    tie = score_of(1, 1, 4.0, 20.0)
    assert latest_scores([later, tie]) == [tie]


def test_scores_survive_writing_and_a_failure_is_minus_one(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    scores = [score_of(1, 1, 0.25, 5.5), score_of(1, 2, None), score_of(2, 1, -3.5)]
    write_scores(path, reversed(scores))
    assert read_judgments(path) == (scores, [])
    assert path.read_text().count('"score": -1,') == 1


def test_bad_judgments_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    head = '{"question_id": 1, "model": "m", "turn": 1, '
    for tail, found in (
        ('"judge": ["a", "b"], "score": "9"}', "score is '9'"),
        ('"judge": ["a", "b"], "score": NaN}', "score is nan"),
        ('"judge": ["a", "b"], "score": 1, "tstamp": "x"}', "tstamp is 'x'"),
        (f'"judge": ["a", "b"], "score": {"9" * 400}}}', "score is 9"),
        ('"judge": ["a"], "score": 1}', "no field 'judge.1'"),
        ('"judge": ["a", "b"], "score": 1, "turn": 3}', "turn is 3"),
    ):
        path.write_text(head + tail)
        with pytest.raises(DataError, match=rf"s\.jsonl, line 1: {found}"):
            read_judgments(path)


def test_ties_are_half_wins(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-04")
    rates = [WinRate(*case["input"][side]) for side in "AB"]
    assert [rate.strict for rate in rates] == pytest.approx(case["expected"]["win_rate"])
    assert [rate.adjusted for rate in rates] == pytest.approx(case["expected"]["win_rate_adjusted"])


def test_comparison_counts_each_item_once() -> None:
    assert compare_scores([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 4.0, -1.0]) == WinRate(2, 1, 1)


# Pairs, judged in both orders.


def game(question: int, first: Any, swapped: Any, **more: Any) -> PairJudgment:
    return PairJudgment(question, "ours", "theirs", 1, first, swapped, ("j", "pair-v2"), **more)


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
    assert read_judgments(path) == ([], games)


def test_later_judgment_replaces_whatever_the_order_of_the_models() -> None:
    again = PairJudgment(1, "theirs", "ours", 1, "A", "B", ("j", "pair-v2"), tstamp=9.0)
    assert latest_pairs([GAMES[0], again]) == [again]
    assert again.winner_for("ours") == "B"


def test_bad_pairs_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = {"question_id": 1, "model_1": "a", "model_2": "b", "turn": 1, "judge": ["j", "p"]}
    for change, found in (
        ({"g1_winner": "a", "g2_winner": "tie"}, "g1_winner is 'a'"),
        ({"g1_winner": "tie"}, "no field 'g2_winner'"),
        ({"g1_winner": "tie", "g2_winner": "tie", "judge": ["j"]}, "no field 'judge.1'"),
    ):
        path.write_text(json.dumps(row | change))
        with pytest.raises(DataError, match=rf"p\.jsonl, line 1: {found}"):
            read_judgments(path)


def test_orders_that_disagree_are_a_tie() -> None:
    # (ours in place A, ours in place B): B in the swapped game means that ours won it.
    expected: dict[tuple[Verdict, Verdict], Verdict] = {
        ("A", "B"): "A",
        ("B", "A"): "B",
        ("A", "A"): "tie",
        ("B", "B"): "tie",
        ("tie", "tie"): "tie",
        ("A", "tie"): "tie",
        ("tie", "A"): "tie",
    }
    for (first, swapped), winner in expected.items():
        assert game(1, first, swapped).winner == winner


def test_failed_order_gives_no_winner() -> None:
    sides: tuple[Verdict | None, ...] = ("A", "B", "tie", None)
    for first, swapped in itertools.product(sides, repeat=2):
        if None in (first, swapped):
            assert game(1, first, swapped).winner is None


# AlpacaEval's two file formats.


def _write(path: Path, preferences: list[Any]) -> Path:
    rows = [{"generator_1": "base", "generator_2": "ours", "preference": p} for p in preferences]
    path.write_text(json.dumps(rows))
    return path


def test_win_rate_and_standard_error_by_hand(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.json", [1, 2, 2, 1.5, None, 0, float("nan")])
    (score,) = score_annotations(path)
    # Of 0, 1, 1, 0.5, 0.5 (an early file's 0 is a draw): 3 / 5. Sum of squared deviations
    # 0.36 + 0.16 + 0.16 + 0.01 + 0.01 = 0.7; sqrt(0.7 / 4 / 5).
    assert score.win_rate == pytest.approx(0.6)
    assert score.standard_error == pytest.approx((0.7 / 20) ** 0.5)
    assert (score.wins, score.draws, score.losses, score.failed) == (2, 2, 1, 2)
    assert (score.model, score.baseline) == ("ours", "base")


def test_soft_preferences_and_models_apart(tmp_path: Path) -> None:
    rows = [
        {"generator_1": "b", "generator_2": "x", "preference": 1.25},
        {"generator_1": "b", "generator_2": "y", "preference": 1.75},
        {"generator_1": "b", "generator_2": "z", "preference": None},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    found = score_annotations(path)
    assert [(score.model, score.win_rate) for score in found] == [
        ("y", 0.75),
        ("x", 0.25),
        ("z", None),
    ]


@pytest.mark.parametrize("preference", [3, 0.5, -1, "2", True])
def test_bad_preference_names_its_row(tmp_path: Path, preference: Any) -> None:
    path = _write(tmp_path / "a.json", [1, preference])
    with pytest.raises(DataError, match=r"a\.json, row 2: preference is"):
        score_annotations(path)


def test_files_that_are_no_annotations(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, found in (
        ("[]", "no annotations"),
        ("[{}]", "row 1: no field"),
        ("[1]", "row 1"),
        ("[", "not JSON"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=found):
            score_annotations(path)
    path.write_text('{"a": [1]}')
    assert not is_annotations(path)
    path.write_text("\n [1]")
    assert is_annotations(path)


def test_export(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    write_model_outputs(path, ["q"], ["ü"], "ours", "hh")
    assert json.loads(path.read_text()) == [
        {"instruction": "q", "output": "ü", "generator": "ours", "dataset": "hh"}
    ]
    with pytest.raises(DataError, match="cannot hold a text"):
        write_model_outputs(path, ["q"], ["\ud800"], "ours", "hh")
