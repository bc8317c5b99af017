"""Scores of answers by turn, in FastChat's judgment format, and what is computed from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tasks.algorithms.statistics import (
    Agreement,
    Estimate,
    agreement,
    clustered_interval,
    paired_interval,
    standard_error,
)
from tasks.errors import DataError, MissingInputError
from tasks.evaluate.questions import get_field, get_number, get_turn, read_objects, write_objects

# What a judge decided, read from what it wrote; text without a decision has none.

Verdict = Literal["A", "B", "tie"]

LOWEST_RATING: Final = 1.0
HIGHEST_RATING: Final = 10.0

_NUMBER: Final = r"([0-9]{1,3}(?:\.[0-9]{1,6})?)"
_DOUBLE: Final = re.compile(rf"\[\[\s*{_NUMBER}\s*\]\]")
# A single bracket decides only where the text ends with it: elsewhere it is an index or a citation.
_SINGLE: Final = re.compile(rf"(?<![\w\])\[]){re.escape('[')}\s*{_NUMBER}\s*\][\s.*_`\"']*\Z")
_BEFORE: Final = re.compile(
    r"(?:\A|[\n.!?:*_`\"'>)-]|\b(?:rat\w*|scor\w*|grad\w*|verdict|give\w*|deserve\w*|assign\w*)\b"
    r"[^\n.!?]*)\s*\Z",
    re.IGNORECASE,
)
_LOOKED_AT: Final = 200
_VERDICT: Final = re.compile(r"\[\[\s*([ABC])\s*\]\]")
_MEANING: Final[dict[str, Verdict]] = {"A": "A", "B": "B", "C": "tie"}


def is_rating(value: float) -> bool:
    """Tell whether a number is on the scale of 1 to 10."""
    return LOWEST_RATING <= value <= HIGHEST_RATING


def parse_rating(text: str) -> float | None:
    """Return the last ``[[n]]`` with n in 1 to 10, or None.

    Without one, a single ``[n]`` counts where the text ends with it and it stands for itself or
    after a word such as rating or score.
    """
    found = [float(number) for number in _DOUBLE.findall(text)]
    on_scale = [value for value in found if is_rating(value)]
    if on_scale:
        return on_scale[-1]
    single = _SINGLE.search(text)
    if single is None or not _stands_as_verdict(text[: single.start()]):
        return None
    value = float(single.group(1))
    return value if is_rating(value) else None


def _stands_as_verdict(before: str) -> bool:
    """Tell whether what precedes a closing bracket makes it a rating."""
    # The end alone: a long text in which rating words abound would take quadratic time.
    end = before if len(before) <= _LOOKED_AT else "x" + before[-_LOOKED_AT:]
    return _BEFORE.search(end) is not None


def parse_verdict(text: str) -> Verdict | None:
    """Return who won by the last ``[[A]]``, ``[[B]]`` or ``[[C]]`` (a tie), or None."""
    found = _VERDICT.findall(text)
    return _MEANING[found[-1]] if found else None


def settle_orders(first: Verdict | None, swapped: Verdict | None) -> Verdict | None:
    """Return the verdict of two judgments that saw the same answers in both orders.

    Args:
        first: with our answer in place A.
        swapped: with our answer in place B.

    Returns:
        ``A`` (ours) or ``B`` when both orders agree, ``tie`` when they do not, None when either
        judgment failed.
    """
    if first is None or swapped is None:
        return None
    turned: Verdict = {"A": "B", "B": "A", "tie": "tie"}[swapped]  # type: ignore[assignment]
    return first if first == turned else "tie"


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


# AlpacaEval: answers in its ``model_outputs`` format, and win rates of annotation files.

_FIX: Final = 'rows with "preference": 1 (the baseline is better) to 2 (the model is better)'
_LOWEST: Final = 1.0
_HIGHEST: Final = 2.0
_DRAW: Final = 1.5
_OLD_DRAW: Final = 0.0


@dataclass(frozen=True)
class AnnotationScore:
    """Win rate of one model over annotated comparisons.

    Args:
        model, baseline: generators of output_2 and output_1.
        win_rate: mean preference - 1, so that a draw is half a win; None without any.
        standard_error: of the win rate; None for fewer than two.
        wins, draws, losses: preferences above, at and below 1.5.
        failed: rows without a preference; they enter nothing else.
    """

    model: str
    baseline: str
    win_rate: float | None
    standard_error: float | None
    wins: int
    draws: int
    losses: int
    failed: int


def write_model_outputs(
    path: Path, instructions: Sequence[str], outputs: Sequence[str], generator: str, dataset: str
) -> None:
    """Write a JSON list of instruction, output and generator, as AlpacaEval reads it.

    Raises:
        DataError: text that UTF-8 cannot hold.
    """
    rows = [
        {"instruction": asked, "output": said, "generator": generator, "dataset": dataset}
        for asked, said in zip(instructions, outputs, strict=True)
    ]
    try:
        content = (json.dumps(rows, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path.name} cannot hold a text: {error}", "valid text", "") from error
    path.write_bytes(content)


def is_annotations(path: Path) -> bool:
    """Tell whether a file is a JSON list, as annotation files are."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def score_annotations(path: Path) -> list[AnnotationScore]:
    """Return the win rate of each model in an annotation file, the best first.

    Raises:
        MissingInputError: no such file.
        DataError: no list of annotations, or a preference that is none.
    """
    found: dict[tuple[str, str], list[float | None]] = {}
    for where, row in _rows(path):
        names = (str(row.get("generator_2", "output_2")), str(row.get("generator_1", "output_1")))
        found.setdefault(names, []).append(_preference(where, row))
    scores = [_score(model, baseline, values) for (model, baseline), values in found.items()]
    return sorted(scores, key=lambda s: -1.0 if s.win_rate is None else s.win_rate, reverse=True)


def _rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingInputError(f"No file {path}", "an annotation file", _FIX) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", "a JSON list", _FIX) from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} holds no annotations", "a JSON list with rows", _FIX)
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or "preference" not in row:
            raise DataError(f"{path}, row {index + 1}: no field 'preference'", "a number", _FIX)
    return [(f"{path}, row {index + 1}", row) for index, row in enumerate(rows)]


def _preference(where: str, row: Mapping[str, Any]) -> float | None:
    value = row["preference"]
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Early files mark a draw with 0.
    if is_number and value == _OLD_DRAW:
        return _DRAW
    # NaN is how pandas writes a missing preference.
    if is_number and value != value:
        return None
    if not is_number or not _LOWEST <= value <= _HIGHEST:
        raise DataError(f"{where}: preference is {value!r}", "1 to 2, 0 or null", _FIX)
    return float(value)


def _score(model: str, baseline: str, values: Sequence[float | None]) -> AnnotationScore:
    valid = [value - 1.0 for value in values if value is not None]
    return AnnotationScore(
        model=model,
        baseline=baseline,
        win_rate=sum(valid) / len(valid) if valid else None,
        standard_error=standard_error(valid),
        wins=sum(value > 0.5 for value in valid),
        draws=sum(value == 0.5 for value in valid),
        losses=sum(value < 0.5 for value in valid),
        failed=len(values) - len(valid),
    )


# Judgments of several models as a leaderboard.


@dataclass(frozen=True)
class ModelScore:
    """One model's scores by one judge.

    Args:
        turns: mean by turn; a turn without a valid judgment is absent.
        mean: over both turns, with its interval over questions; None without a valid judgment.
        categories: mean by category; None where a category has no valid judgment.
        agreement: of repeats; None where nothing was repeated.
    """

    model: str
    judge: str
    turns: Mapping[int, float]
    mean: Estimate | None
    valid: int
    failed: int
    categories: Mapping[str, float | None]
    agreement: Agreement | None

    @property
    def coverage(self) -> float:
        """Share of the judgments that have a score."""
        return self.valid / max(self.valid + self.failed, 1)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "model": self.model,
            "judge": self.judge,
            "turn_1": self.turns.get(1),
            "turn_2": self.turns.get(2),
            "mean": self.mean.value if self.mean else None,
            "interval": [self.mean.low, self.mean.high] if self.mean else None,
            "valid": self.valid,
            "failed": self.failed,
            "coverage": self.coverage,
            "categories": dict(self.categories),
            "agreement": asdict(self.agreement) if self.agreement else None,
        }


@dataclass(frozen=True)
class Difference:
    """Mean score of a model minus a baseline's on the same questions.

    Args:
        n: judged (question, turn)s that both have.
    """

    model: str
    baseline: str
    judge: str
    difference: Estimate
    n: int

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        value, low, high = self.difference
        return {
            "model": self.model,
            "baseline": self.baseline,
            "judge": self.judge,
            "difference": value,
            "interval": [low, high],
            "n": self.n,
        }


def score_model(
    scores: Sequence[Score], category_of: Mapping[int, str] | None = None
) -> ModelScore:
    """Summarise the latest judgments of one model by one judge."""
    kept = latest_scores(scores)
    summary = summarize_scores(kept)
    by_question = scores_by_question(kept)
    repeats = [values for turns in repeats_by_question(kept).values() for values in turns.values()]
    clusters = [list(by_question[question].values()) for question in sorted(by_question)]
    return ModelScore(
        model=kept[0].model_id,
        judge=kept[0].judge[0],
        turns=summary.turn_means,
        mean=clustered_interval(clusters) if clusters else None,
        valid=summary.valid,
        failed=summary.failed,
        categories=_categories(kept, category_of or {}),
        agreement=agreement(repeats),
    )


def leaderboard(
    scores: Iterable[Score], category_of: Mapping[int, str] | None = None
) -> list[ModelScore]:
    """Return a row per model and judge, the best first; rows without a score come last."""
    rows = [score_model(group, category_of) for group in grouped(scores).values()]
    return sorted(rows, key=_order)


def differences(scores: Iterable[Score], baseline: str) -> list[Difference]:
    """Compare every model with a baseline on what both were judged on, judge by judge.

    Raises:
        DataError: no judgment of the baseline, or none in common with a model.
    """
    groups = grouped(scores)
    judges = {judge for model, judge in groups if model == baseline}
    if not judges:
        known = ", ".join(sorted({model for model, _ in groups}))
        raise DataError(f"No judgment of the baseline {baseline!r}", f"one of {known}", "name it")
    return [
        compare(groups[model, judge], groups[baseline, judge])
        for model, judge in sorted(groups)
        if judge in judges and model != baseline
    ]


def compare(ours: Sequence[Score], theirs: Sequence[Score]) -> Difference:
    """Return the paired difference of two models.

    Raises:
        DataError: they have no judged question in common.
    """
    interval, n = paired_interval(
        scores_by_question(latest_scores(ours)), scores_by_question(latest_scores(theirs))
    )
    return Difference(ours[0].model_id, theirs[0].model_id, ours[0].judge[0], interval, n)


def grouped(scores: Iterable[Score]) -> dict[tuple[str, str], list[Score]]:
    """Return the scores by model and name of the judge."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.model_id, score.judge[0]), []).append(score)
    return groups


def _order(row: ModelScore) -> tuple[str, bool, float]:
    return row.judge, row.mean is None, -row.mean.value if row.mean else 0.0


def _categories(scores: Sequence[Score], category_of: Mapping[int, str]) -> dict[str, float | None]:
    parts: dict[str, list[Score]] = {}
    for score in scores:
        if score.question_id in category_of:
            parts.setdefault(category_of[score.question_id], []).append(score)
    return {name: summarize_scores(parts[name]).mean for name in sorted(parts)}


# Pairwise judgments in both orders, in FastChat's ``*_pair.jsonl`` format.

PAIR_FORM: Final = (
    'judgments of pairs, one object per line: {"question_id": 81, "model_1": "", "model_2": "", '
    '"g1_winner": "model_1", "g2_winner": "tie", "judge": ["gpt-4", "pair-v2"], "turn": 1}'
)
_FAILED_GAME: Final = "error"
# FastChat names the winner of the swapped game by model too, not by place.
_WINNERS: Final[dict[str, Verdict]] = {"model_1": "A", "model_2": "B", "tie": "tie"}
_NAMES: Final = {verdict: name for name, verdict in _WINNERS.items()}
_PLACES_TURNED: Final[dict[Verdict, Verdict]] = {"A": "B", "B": "A", "tie": "tie"}


@dataclass(frozen=True, slots=True)
class PairJudgment:
    """Two judgments of one turn: the answers shown in both orders.

    Args:
        model_1: in place A of the first game.
        first: verdict of the game with model_1 in place A; None when the judgment failed.
        swapped: verdict of the game with model_1 in place B.
        texts: what the judge said in both games.
    """

    question_id: int
    model_1: str
    model_2: str
    turn: int
    first: Verdict | None
    swapped: Verdict | None
    judge: tuple[str, str]
    texts: tuple[str, str] = ("", "")
    tstamp: float = 0.0
    repeat: int = 0

    @property
    def winner(self) -> Verdict | None:
        """``A`` is model_1, ``B`` is model_2; a tie when the orders disagree, None when either
        failed."""
        return settle_orders(self.first, self.swapped)

    def winner_for(self, model: str) -> Verdict | None:
        """Return the winner with ``model`` as ``A``."""
        found = self.winner
        return found if model == self.model_1 or found is None else _PLACES_TURNED[found]


@dataclass(frozen=True, slots=True)
class PairSummary:
    """One model's games.

    Args:
        rate: None when all judgments failed.
        failed: judgments without a verdict; they count nowhere else.
        consistent: share of the judgments in which both orders agree; None without any.
    """

    model: str
    rate: WinRate | None
    failed: int
    consistent: float | None

    @property
    def coverage(self) -> float:
        """Share of the judgments with a verdict."""
        valid = self.rate.n if self.rate else 0
        return valid / max(valid + self.failed, 1)


def summarize_pairs(judgments: Sequence[PairJudgment], model: str) -> PairSummary:
    """Count a model's wins, ties and losses over all its games."""
    games = [j for j in judgments if model in (j.model_1, j.model_2)]
    found = [verdict for j in games if (verdict := j.winner_for(model)) is not None]
    rate = None
    consistent = None
    if found:
        rate = WinRate(found.count("A"), found.count("tie"), found.count("B"))
        valid = [j for j in games if j.winner is not None]
        same = sum(j.winner != "tie" or (j.first, j.swapped) == ("tie", "tie") for j in valid)
        consistent = same / len(valid)
    return PairSummary(model, rate, len(games) - len(found), consistent)


def latest_pairs(judgments: Iterable[PairJudgment]) -> list[PairJudgment]:
    """Keep one judgment of each question, pair of models, turn, judge and repeat: the latest."""
    latest: dict[tuple[Any, ...], PairJudgment] = {}
    for j in judgments:
        key = (j.question_id, frozenset((j.model_1, j.model_2)), j.turn, j.judge[0], j.repeat)
        if key not in latest or j.tstamp >= latest[key].tstamp:
            latest[key] = j
    return list(latest.values())


def write_pairs(path: Path, judgments: Iterable[PairJudgment]) -> None:
    """Write judgments as FastChat's ``*_pair.jsonl``; a failed game has the winner ``error``."""
    ordered = sorted(judgments, key=lambda j: (j.question_id, j.model_1, j.turn, j.repeat))
    write_objects(path, (_row(judgment) for judgment in ordered))


def read_pair_judgments(path: Path) -> list[PairJudgment]:
    """Read FastChat's pairwise judgments in file order.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no pairwise judgment.
    """
    return [parse_pair(where, row) for where, row in read_objects(path, PAIR_FORM)]


def _row(j: PairJudgment) -> dict[str, Any]:
    swapped = None if j.swapped is None else _PLACES_TURNED[j.swapped]
    row: dict[str, Any] = {
        "question_id": j.question_id,
        "model_1": j.model_1,
        "model_2": j.model_2,
        "g1_winner": _FAILED_GAME if j.first is None else _NAMES[j.first],
        "g2_winner": _FAILED_GAME if swapped is None else _NAMES[swapped],
        "judge": list(j.judge),
        "g1_judgment": j.texts[0],
        "g2_judgment": j.texts[1],
        "turn": j.turn,
        "tstamp": j.tstamp,
    }
    return row | ({"repeat": j.repeat} if j.repeat else {})


def parse_pair(where: str, row: dict[str, Any]) -> PairJudgment:
    """Return the judgment in a row.

    Raises:
        DataError: it is none.
    """
    judge = get_field(where, row, "judge", list, PAIR_FORM)
    if len(judge) != 2:
        raise DataError(f"{where}: judge is {judge}", "[name, method]", "correct the file")
    swapped = _winner(where, row, "g2_winner")
    return PairJudgment(
        question_id=get_field(where, row, "question_id", int, PAIR_FORM),
        model_1=get_field(where, row, "model_1", str, PAIR_FORM),
        model_2=get_field(where, row, "model_2", str, PAIR_FORM),
        turn=get_turn(where, row, PAIR_FORM),
        first=_winner(where, row, "g1_winner"),
        swapped=None if swapped is None else _PLACES_TURNED[swapped],
        judge=(str(judge[0]), str(judge[1])),
        texts=(str(row.get("g1_judgment", "")), str(row.get("g2_judgment", ""))),
        tstamp=get_number(where, row, "tstamp") or 0.0,
        repeat=get_field(where, {"repeat": 0, **row}, "repeat", int, PAIR_FORM),
    )


def _winner(where: str, row: dict[str, Any], name: str) -> Verdict | None:
    value = get_field(where, row, name, str, PAIR_FORM)
    if value != _FAILED_GAME and value not in _WINNERS:
        raise DataError(
            f"{where}: {name} is {value!r}",
            f"{', '.join(_WINNERS)} or {_FAILED_GAME}",
            "correct the file",
        )
    return _WINNERS.get(value)
