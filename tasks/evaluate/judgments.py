"""Judgments: their files in FastChat's and AlpacaEval's formats, and what is computed from them.

A judgment that failed has no score: it is counted, and it enters no mean. Neither torch nor Prefect
is imported here, so that a leaderboard is there at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Strict, StrictInt, TypeAdapter

from tasks.algorithms.statistics import (
    Agreement,
    Estimate,
    agreement,
    clustered_interval,
    paired_interval,
    standard_error,
)
from tasks.errors import DataError
from tasks.evaluate.questions import Number, Timestamp, parse, read_objects, write_objects

Text = Annotated[str, BeforeValidator(str)]
Turn = Annotated[int, Strict(), Field(ge=1, le=2)]

# Second part of the judge of scores that are a reward model's, which are on no scale.
UNBOUNDED_METHOD: Final = "standardized-score"


def is_rating(value: float) -> bool:
    """Tell whether a number is on the scale of 1 to 10."""
    return 1.0 <= value <= 10.0


@dataclass(frozen=True, slots=True)
class Score:
    """One judgment of one answer.

    Args:
        turn: 1 or 2.
        score: None when the judgment failed.
        judge: name and method, for instance ``("gpt-4", "single-v1")``.
        judgment: what the judge said.
        tstamp: seconds since 1970.
        repeat: 0-based, where a judge is asked several times.
        failure: why there is no score, empty where there is one.
    """

    question_id: StrictInt
    model_id: Annotated[str, Field(validation_alias="model")]
    turn: Turn
    score: Number | None
    judge: tuple[Text, Text]
    judgment: Text = ""
    tstamp: Timestamp = 0.0
    repeat: StrictInt = 0
    failure: Text = ""

    @property
    def is_unbounded(self) -> bool:
        """Whether the score is on no scale from 1 to 10: a reward model's is not."""
        return self.judge[1] == UNBOUNDED_METHOD


Verdict = Literal["A", "B", "tie"]
# None is the verdict of a judgment that failed.
_TURNED: Final[Mapping[Verdict | None, Verdict | None]] = {
    "A": "B",
    "B": "A",
    "tie": "tie",
    None: None,
}
# FastChat names the winner by model, in the swapped game too.
_WINNERS: Final[Mapping[Verdict | None, str]] = {
    "A": "model_1",
    "B": "model_2",
    "tie": "tie",
    None: "error",
}


def _verdict(winner: object) -> Verdict | None:
    for verdict, name in _WINNERS.items():
        if name == winner:
            return verdict
    raise ValueError(f"one of {', '.join(_WINNERS.values())}")


def _swapped_verdict(winner: object) -> Verdict | None:
    return _TURNED[_verdict(winner)]


@dataclass(frozen=True, slots=True)
class PairJudgment:
    """Two judgments of one turn: the answers shown in both orders.

    Args:
        model_1: in place A of the first game.
        first: verdict of the game with model_1 in place A; None when the judgment failed.
        swapped: verdict of the game with model_1 in place B.
        texts: what the judge said in both games.
    """

    question_id: StrictInt
    model_1: str
    model_2: str
    turn: Turn
    first: Annotated[Verdict | None, Field(validation_alias="g1_winner"), BeforeValidator(_verdict)]
    swapped: Annotated[
        Verdict | None, Field(validation_alias="g2_winner"), BeforeValidator(_swapped_verdict)
    ]
    judge: tuple[Text, Text]
    texts: tuple[Text, Text] = ("", "")
    tstamp: Timestamp = 0.0
    repeat: StrictInt = 0

    @property
    def winner(self) -> Verdict | None:
        """``A`` is model_1, ``B`` is model_2; a tie when the orders disagree, None when either
        failed."""
        if self.first is None or self.swapped is None:
            return None
        return self.first if self.first == _TURNED[self.swapped] else "tie"

    def winner_for(self, model: str) -> Verdict | None:
        """Return the winner with ``model`` as ``A``."""
        return self.winner if model == self.model_1 else _TURNED[self.winner]


# Files of judgments.

_JUDGMENT_FORM: Final = (
    'judgments, one object per line: {"question_id": 81, "model": "", "judge": ["gpt-4", '
    '"single-v1"], "score": 8, "turn": 1}'
)
_PAIR_FORM: Final = (
    'judgments of pairs, one object per line: {"question_id": 81, "model_1": "", "model_2": "", '
    '"g1_winner": "model_1", "g2_winner": "tie", "judge": ["gpt-4", "pair-v2"], "turn": 1}'
)
_FAILED: Final = -1
_SCORE: Final = TypeAdapter(Score)
_PAIR: Final = TypeAdapter(PairJudgment)


def read_judgments(path: Path) -> tuple[list[Score], list[PairJudgment]]:
    """Read FastChat judgments, of single answers and of pairs, in file order.

    A score of -1, none, or one that is not on the scale of 1 to 10 is a failed judgment.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no judgment.
    """
    scores, pairs = [], []
    for where, row in read_objects(path, _JUDGMENT_FORM):
        # Files that lie beside judgments.
        for field, what in (("turns", "a question"), ("choices", "an answer")):
            if field in row and "judge" not in row:
                fix = "give for instance model_judgment/gpt-4_single.jsonl"
                raise DataError(f"{where} is {what}", "a judgment of answers", fix)
        if "g1_winner" in row:
            texts = [row.get(f"{game}_judgment", "") for game in ("g1", "g2")]
            pairs.append(parse(where, {**row, "texts": texts}, _PAIR, _PAIR_FORM))
        else:
            scores.append(_parse_score(where, row))
    return scores, pairs


def _parse_score(where: str, row: Mapping[str, Any]) -> Score:
    score = parse(where, {"score": None, **row}, _SCORE, _JUDGMENT_FORM)
    if score.score is None or score.score == _FAILED:
        return replace(score, score=None)
    if score.is_unbounded or is_rating(score.score):
        return score
    failure = f"score {score.score:g} is not on the scale of 1 to 10"
    return replace(score, score=None, failure=failure)


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write scores as FastChat's ``model_judgment`` file; a failed judgment is -1 there.

    Repeats and failures are fields of our own.
    """
    rows = []
    for s in sorted(scores, key=lambda s: (s.question_id, s.model_id, s.turn, s.repeat)):
        row = {
            "question_id": s.question_id,
            "model": s.model_id,
            "judge": s.judge,
            "judgment": s.judgment,
            "score": _FAILED if s.score is None else s.score,
            "turn": s.turn,
            "tstamp": s.tstamp,
        }
        own = {"repeat": s.repeat, "failure": s.failure}
        rows.append(row | {name: value for name, value in own.items() if value})
    write_objects(path, rows)


def write_pairs(path: Path, judgments: Iterable[PairJudgment]) -> None:
    """Write judgments as FastChat's ``*_pair.jsonl``; a failed game has the winner ``error``."""
    rows = []
    for j in sorted(judgments, key=lambda j: (j.question_id, j.model_1, j.turn, j.repeat)):
        row = {
            "question_id": j.question_id,
            "model_1": j.model_1,
            "model_2": j.model_2,
            "g1_winner": _WINNERS[j.first],
            "g2_winner": _WINNERS[_TURNED[j.swapped]],
            "judge": j.judge,
            "g1_judgment": j.texts[0],
            "g2_judgment": j.texts[1],
            "turn": j.turn,
            "tstamp": j.tstamp,
        }
        rows.append(row | ({"repeat": j.repeat} if j.repeat else {}))
    write_objects(path, rows)


# Scores of single answers. Of judgments made several times the latest counts.


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


@dataclass(frozen=True)
class ModelScore:
    """One model's scores by one judge.

    Args:
        turns: mean by turn; a turn without a valid judgment is absent.
        mean: over both turns, with its interval over questions; None without a valid judgment.
        valid: judgments with a score.
        failed: judgments without one; they enter no mean.
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
        return self.valid / (self.valid + self.failed)

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


def score_model(
    scores: Sequence[Score], category_of: Mapping[int, str] | None = None
) -> ModelScore:
    """Summarise the latest judgments of one model by one judge.

    A (question, turn) counts once, with the mean of its valid repeats.
    """
    latest = latest_scores(scores)
    failed = sum(score.score is None for score in latest)
    category_of = category_of or {}
    repeats = _repeats_by_question(latest)
    by_question = _means_by_question(latest)
    clusters = [list(by_question[question].values()) for question in sorted(by_question)]
    categories: dict[str, float | None] = {}
    for name in sorted(
        {category_of[s.question_id] for s in latest if s.question_id in category_of}
    ):
        members = [turns for q, turns in by_question.items() if category_of.get(q) == name]
        pooled = [value for values in _values_by_turn(members).values() for value in values]
        categories[name] = sum(pooled) / len(pooled) if pooled else None
    return ModelScore(
        model=latest[0].model_id,
        judge=latest[0].judge[0],
        turns={
            turn: sum(values) / len(values)
            for turn, values in _values_by_turn(by_question.values()).items()
        },
        mean=clustered_interval(clusters) if clusters else None,
        valid=len(latest) - failed,
        failed=failed,
        categories=categories,
        agreement=agreement([values for turns in repeats.values() for values in turns.values()]),
    )


def _repeats_by_question(scores: Iterable[Score]) -> dict[int, dict[int, list[float]]]:
    """Return the valid scores of each turn of each question."""
    repeats: dict[int, dict[int, list[float]]] = {}
    for score in scores:
        if score.score is not None:
            turns = repeats.setdefault(score.question_id, {})
            turns.setdefault(score.turn, []).append(score.score)
    return repeats


def _means_by_question(scores: Iterable[Score]) -> dict[int, dict[int, float]]:
    """Return the score of each turn of each question, the mean of its valid repeats."""
    return {
        question: {turn: sum(values) / len(values) for turn, values in turns.items()}
        for question, turns in _repeats_by_question(scores).items()
    }


def _values_by_turn(questions: Iterable[Mapping[int, float]]) -> dict[int, list[float]]:
    by_turn: dict[int, list[float]] = {}
    for turns in questions:
        for turn, value in turns.items():
            by_turn.setdefault(turn, []).append(value)
    return dict(sorted(by_turn.items()))


def leaderboard(
    scores: Iterable[Score], category_of: Mapping[int, str] | None = None
) -> list[ModelScore]:
    """Return a row per model and judge, the best first; rows without a score come last."""

    def order(row: ModelScore) -> tuple[str, bool, float]:
        return row.judge, row.mean is None, -row.mean.value if row.mean else 0.0

    groups = _by_model_and_judge(scores).values()
    return sorted((score_model(group, category_of) for group in groups), key=order)


def _by_model_and_judge(scores: Iterable[Score]) -> dict[tuple[str, str], list[Score]]:
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.model_id, score.judge[0]), []).append(score)
    return groups


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


def compare(ours: Sequence[Score], theirs: Sequence[Score]) -> Difference:
    """Return the paired difference of two models.

    Raises:
        DataError: they have no judged question in common.
    """
    interval, n = paired_interval(
        _means_by_question(latest_scores(ours)), _means_by_question(latest_scores(theirs))
    )
    return Difference(ours[0].model_id, theirs[0].model_id, ours[0].judge[0], interval, n)


def differences(scores: Iterable[Score], baseline: str) -> list[Difference]:
    """Compare every model with a baseline on what both were judged on, judge by judge.

    Raises:
        DataError: no judgment of the baseline, or none in common with a model.
    """
    groups = _by_model_and_judge(scores)
    judges = {judge for model, judge in groups if model == baseline}
    if not judges:
        known = ", ".join(sorted({model for model, _ in groups}))
        raise DataError(f"No judgment of the baseline {baseline!r}", f"one of {known}", "name it")
    return [
        compare(groups[model, judge], groups[baseline, judge])
        for model, judge in sorted(groups)
        if judge in judges and model != baseline
    ]


# Wins, ties and losses: of judged pairs, or of two models' scores.


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
    """Count how often ours is above, equal to and below theirs, item by item."""
    assert len(ours) == len(theirs) > 0, "as many on both sides, at least one"
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    ties = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return WinRate(wins, ties, len(ours) - wins - ties)


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
    valid = [j for j in games if j.winner is not None]
    if not valid:
        return PairSummary(model, None, len(games), None)
    winners = [j.winner_for(model) for j in valid]
    rate = WinRate(winners.count("A"), winners.count("tie"), winners.count("B"))
    same = sum(j.winner != "tie" or (j.first, j.swapped) == ("tie", "tie") for j in valid)
    return PairSummary(model, rate, len(games) - len(valid), same / len(valid))


def latest_pairs(judgments: Iterable[PairJudgment]) -> list[PairJudgment]:
    """Keep one judgment of each question, pair of models, turn, judge and repeat: the latest."""
    latest: dict[tuple[Any, ...], PairJudgment] = {}
    for j in judgments:
        key = (j.question_id, frozenset((j.model_1, j.model_2)), j.turn, j.judge[0], j.repeat)
        if key not in latest or j.tstamp >= latest[key].tstamp:
            latest[key] = j
    return list(latest.values())


# AlpacaEval: answers in its ``model_outputs`` format, and win rates of annotation files.

_ANNOTATION_FORM: Final = (
    'rows with "preference": 1 (the baseline is better) to 2 (the model is better)'
)
_DRAW: Final = 1.5
# Early files mark a draw so.
_OLD_DRAW: Final = 0.0


@dataclass(frozen=True)
class _Annotation:
    """A row of an annotation file; pandas writes NaN for a missing preference."""

    preference: Annotated[float, Strict()] | None
    generator_1: Text = "output_1"
    generator_2: Text = "output_2"


_ANNOTATION: Final = TypeAdapter(_Annotation)


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
        {"instruction": instruction, "output": output, "generator": generator, "dataset": dataset}
        for instruction, output in zip(instructions, outputs, strict=True)
    ]
    try:
        content = (json.dumps(rows, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path.name} cannot hold a text: {error}", "valid text", "") from error
    path.write_bytes(content)


def is_annotations(path: Path) -> bool:
    """Tell whether a file is a JSON list, as annotation files are."""
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def score_annotations(path: Path) -> list[AnnotationScore]:
    """Return the win rate of each model in an annotation file, the best first.

    Raises:
        DataError: no list of annotations, or a preference that is none.
    """
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", "a JSON list", _ANNOTATION_FORM) from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} holds no annotations", "a JSON list with rows", _ANNOTATION_FORM)
    preferences: dict[tuple[str, str], list[float | None]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        annotation = parse(where, row, _ANNOTATION, _ANNOTATION_FORM)
        models = (annotation.generator_2, annotation.generator_1)
        preferences.setdefault(models, []).append(_preference(where, annotation.preference))
    scores = [_annotation_score(*models, values) for models, values in preferences.items()]
    return sorted(scores, key=lambda s: -1.0 if s.win_rate is None else s.win_rate, reverse=True)


def _preference(where: str, value: float | None) -> float | None:
    """Return a preference from 1 to 2, or None where there is none."""
    if value is None or value != value:
        return None
    if value == _OLD_DRAW:
        return _DRAW
    if not 1.0 <= value <= 2.0:
        raise DataError(f"{where}: preference is {value!r}", "1 to 2, 0 or null", _ANNOTATION_FORM)
    return value


def _annotation_score(
    model: str, baseline: str, preferences: Sequence[float | None]
) -> AnnotationScore:
    valid = [value - 1.0 for value in preferences if value is not None]
    return AnnotationScore(
        model=model,
        baseline=baseline,
        win_rate=sum(valid) / len(valid) if valid else None,
        standard_error=standard_error(valid),
        wins=sum(value > 0.5 for value in valid),
        draws=sum(value == 0.5 for value in valid),
        losses=sum(value < 0.5 for value in valid),
        failed=len(preferences) - len(valid),
    )
