"""Scores of answers by turn, in FastChat's judgment format, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.algorithms.ratings import is_rating
from tasks.data.questions import get_field, get_number, get_turn, read_objects, write_objects
from tasks.errors import DataError

# Second part of the judge of scores that are a reward model's.
UNBOUNDED_METHOD: Final = "standardized-score"
_FAILED: Final = -1
JUDGMENT_FORM: Final = (
    'judgments, one object per line: {"question_id": 81, "model": "", "judge": ["gpt-4", '
    '"single-v1"], "score": 8, "turn": 1}'
)


@dataclass(frozen=True, slots=True)
class Score:
    """One judgment of one answer.

    Args:
        turn: 1 or 2.
        score: None when the judgment failed.
        judge: name and method, for instance ``("reward_model", "score")``.
        judgment: what the judge said.
        tstamp: seconds since 1970.
        repeat: 0-based, where a judge is asked several times.
        failure: why there is no score, empty where there is one.
    """

    question_id: int
    model_id: str
    turn: int
    score: float | None
    judge: tuple[str, str]
    judgment: str = ""
    tstamp: float = 0.0
    repeat: int = 0
    failure: str = ""

    @property
    def is_unbounded(self) -> bool:
        """Whether the score is on no scale from 1 to 10: a reward model's is not."""
        return self.judge[1] == UNBOUNDED_METHOD


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

    A (question, turn) counts once, with the mean of its valid repeats. Of judgments made several
    times give the latest only (`latest_scores`).
    """
    given = list(scores)
    failed = sum(score.score is None for score in given)
    by_turn: dict[int, list[float]] = {}
    for turns in scores_by_question(given).values():
        for turn, value in turns.items():
            by_turn.setdefault(turn, []).append(value)
    pooled = [value for turn in sorted(by_turn) for value in by_turn[turn]]
    return ScoreSummary(
        turn_means={turn: sum(by_turn[turn]) / len(by_turn[turn]) for turn in sorted(by_turn)},
        mean=sum(pooled) / len(pooled) if pooled else None,
        valid=len(given) - failed,
        failed=failed,
    )


def scores_by_question(scores: Iterable[Score]) -> dict[int, dict[int, float]]:
    """Return the score of each turn of each question, the mean of its valid repeats."""
    return {
        question: {turn: sum(values) / len(values) for turn, values in turns.items()}
        for question, turns in repeats_by_question(scores).items()
    }


def repeats_by_question(scores: Iterable[Score]) -> dict[int, dict[int, list[float]]]:
    """Return the valid scores of each turn of each question."""
    found: dict[int, dict[int, list[float]]] = {}
    for score in scores:
        if score.score is not None:
            turns = found.setdefault(score.question_id, {})
            turns.setdefault(score.turn, []).append(score.score)
    return found


def latest_scores(scores: Iterable[Score]) -> list[Score]:
    """Keep one judgment of each question, model, turn, judge and repeat: the latest, the last at a
    tie.

    A judge is its name: judged again with another template, the later judgment counts.
    """
    latest: dict[tuple[int, str, int, str, int], Score] = {}
    for score in scores:
        key = (score.question_id, score.model_id, score.turn, score.judge[0], score.repeat)
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
    ordered = sorted(scores, key=lambda s: (s.question_id, s.model_id, s.turn, s.repeat))
    write_objects(path, (score_row(score) for score in ordered))


def score_row(score: Score) -> dict[str, Any]:
    """Return a score as a row of FastChat's file; repeats and failures are fields of our own."""
    row: dict[str, Any] = {
        "question_id": score.question_id,
        "model": score.model_id,
        "judge": list(score.judge),
        "judgment": score.judgment,
        "score": _FAILED if score.score is None else score.score,
        "turn": score.turn,
        "tstamp": score.tstamp,
    }
    if score.repeat:
        row["repeat"] = score.repeat
    if score.failure:
        row["failure"] = score.failure
    return row


def read_scores(path: Path) -> list[Score]:
    """Read FastChat judgments in file order.

    A score of -1, none, or one that is not on the scale of 1 to 10 is a failed judgment.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no judgment.
    """
    return [parse_score(where, row) for where, row in read_objects(path, JUDGMENT_FORM)]


def parse_score(where: str, row: dict[str, Any]) -> Score:
    """Return the judgment in a row of FastChat's file.

    Raises:
        DataError: it is none.
    """
    value = get_number(where, row, "score")
    judge = get_field(where, row, "judge", list, JUDGMENT_FORM)
    if len(judge) != 2:
        raise DataError(f"{where}: judge is {judge}", "[name, method]", "correct the file")
    failure = str(row.get("failure", ""))
    if value == _FAILED or value is None:
        value = None
    elif str(judge[1]) != UNBOUNDED_METHOD and not is_rating(value):
        value, failure = None, f"score {value:g} is not on the scale of 1 to 10"
    return Score(
        question_id=get_field(where, row, "question_id", int, JUDGMENT_FORM),
        model_id=get_field(where, row, "model", str, JUDGMENT_FORM),
        turn=get_turn(where, row, JUDGMENT_FORM),
        score=value,
        judge=(str(judge[0]), str(judge[1])),
        judgment=str(row.get("judgment", "")),
        tstamp=get_number(where, row, "tstamp") or 0.0,
        repeat=get_field(where, {"repeat": 0, **row}, "repeat", int, JUDGMENT_FORM),
        failure=failure,
    )
