"""Scores of answers by turn, in FastChat's judgment format, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.data.questions import get_field, get_number, read_objects, write_objects
from tasks.errors import DataError

_FAILED: Final = -1


@dataclass(frozen=True, slots=True)
class Score:
    """One judgment of one answer.

    Args:
        turn: 1 or 2.
        score: None when the judgment failed.
        judge: name and method, for instance ``("reward_model", "score")``.
        judgment: what the judge said.
        tstamp: seconds since 1970.
    """

    question_id: int
    model_id: str
    turn: int
    score: float | None
    judge: tuple[str, str]
    judgment: str = ""
    tstamp: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Mean scores of one model over its valid judgments.

    Args:
        turn_means: mean by turn; a turn without valid judgments is absent.
        mean: mean over all valid judgments of all turns, None without any.
        valid: judgments with a score.
        failed: judgments without one; they enter no mean.
    """

    turn_means: dict[int, float]
    mean: float | None
    valid: int
    failed: int

    @property
    def coverage(self) -> float:
        """Share of the judgments that have a score."""
        return self.valid / max(self.valid + self.failed, 1)


def summarize_scores(scores: Iterable[Score]) -> ScoreSummary:
    """Average the scores of one model by turn and pooled.

    Of judgments made several times give the latest only (`latest_scores`).
    """
    values: dict[int, list[float]] = {}
    failed = 0
    for score in scores:
        if score.score is None:
            failed += 1
        else:
            values.setdefault(score.turn, []).append(score.score)
    pooled = [value for turn in sorted(values) for value in values[turn]]
    return ScoreSummary(
        turn_means={turn: sum(values[turn]) / len(values[turn]) for turn in sorted(values)},
        mean=sum(pooled) / len(pooled) if pooled else None,
        valid=len(pooled),
        failed=failed,
    )


def latest_scores(scores: Iterable[Score]) -> list[Score]:
    """Keep one judgment of each question, model, turn and judge: the latest, the last at a tie."""
    latest: dict[tuple[int, str, int, tuple[str, str]], Score] = {}
    for score in scores:
        key = (score.question_id, score.model_id, score.turn, score.judge)
        if key not in latest or score.tstamp >= latest[key].tstamp:
            latest[key] = score
    return list(latest.values())


@dataclass(frozen=True, slots=True)
class WinRate:
    """Wins, ties and losses of one side."""

    wins: int
    ties: int
    losses: int

    @property
    def n(self) -> int:
        """Comparisons."""
        return self.wins + self.ties + self.losses

    @property
    def strict(self) -> float:
        """wins / n."""
        return self.wins / self.n

    @property
    def adjusted(self) -> float:
        """(wins + ties / 2) / n: a tie is half a win."""
        return (self.wins + self.ties / 2) / self.n


def compare_scores(ours: Sequence[float], theirs: Sequence[float]) -> WinRate:
    """Count how often ours is above, equal to and below theirs, item by item.

    Raises:
        DataError: no items, or lists of unequal length.
    """
    if len(ours) != len(theirs) or not ours:
        raise DataError(
            f"{len(ours)} and {len(theirs)} scores cannot be compared",
            "as many on both sides, at least one",
            "score both models on the same prompts",
        )
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    ties = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return WinRate(wins, ties, len(ours) - wins - ties)


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write scores as FastChat's ``model_judgment`` file; a failed judgment is -1 there."""
    ordered = sorted(scores, key=lambda s: (s.question_id, s.model_id, s.turn))
    write_objects(
        path,
        (
            {
                "question_id": score.question_id,
                "model": score.model_id,
                "judge": list(score.judge),
                "judgment": score.judgment,
                "score": _FAILED if score.score is None else score.score,
                "turn": score.turn,
                "tstamp": score.tstamp,
            }
            for score in ordered
        ),
    )


def read_scores(path: Path) -> list[Score]:
    """Read FastChat judgments in file order; a score of -1 is a failed judgment.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no judgment.
    """
    return [_parse_score(where, row) for where, row in read_objects(path)]


def _parse_score(where: str, row: dict[str, Any]) -> Score:
    value = get_number(where, row, "score")
    judge = get_field(where, row, "judge", list)
    if len(judge) != 2:
        raise DataError(f"{where}: judge is {judge}", "[name, method]", "correct the file")
    return Score(
        question_id=get_field(where, row, "question_id", int),
        model_id=get_field(where, row, "model", str),
        turn=get_field(where, row, "turn", int),
        score=None if value == _FAILED else value,
        judge=(str(judge[0]), str(judge[1])),
        judgment=str(row.get("judgment", "")),
        tstamp=get_number(where, row, "tstamp") or 0.0,
    )
