"""What `rlhf score-judgments` does: judgments that anybody made, as a leaderboard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flows.cli.shared import plain, say
from tasks.errors import DataError, MissingInputError
from tasks.evaluate.judges import parse_rating
from tasks.evaluate.judgments import (
    AnnotationScore,
    Difference,
    ModelScore,
    PairJudgment,
    PairSummary,
    Score,
    differences,
    is_annotations,
    latest_pairs,
    latest_scores,
    leaderboard,
    read_judgments,
    score_annotations,
    summarize_pairs,
)
from tasks.evaluate.questions import read_questions

_SHOWN_IDS: Final = 5
_WIDEST: Final = 400


@dataclass
class JudgmentScores:
    """What the files say.

    Args:
        replaced: judgments that a later one of the same question and turn replaced.
        differing: scores that are not what the judge's text says.
    """

    rows: list[ModelScore] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    pairs: list[PairSummary] = field(default_factory=list)
    annotations: list[AnnotationScore] = field(default_factory=list)
    replaced: int = 0
    differing: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "leaderboard": [row.as_json() for row in self.rows],
            "differences": [row.as_json() for row in self.differences],
            "pairwise": [_pair_json(row) for row in self.pairs],
            "annotations": [dataclasses.asdict(row) for row in self.annotations],
            "replaced": self.replaced,
            "differing": self.differing,
        }


def score_judgments(
    files: Sequence[Path],
    questions: Path | None = None,
    baseline: str | None = None,
    reparse: bool = False,
) -> JudgmentScores:
    """Read all files and compute their scores.

    Args:
        files: FastChat's single or pairwise judgments, or AlpacaEval's annotations, in any mixture.
        questions: a ``question.jsonl``, for means by category.
        baseline: model that all others are compared with on the same questions.
        reparse: take ratings from the judge's text instead of the stored scores.

    Raises:
        MissingInputError: a file that is not there.
        DataError: a file in another format, an unknown baseline, or judgments of other questions.
    """
    scores: list[Score] = []
    pairs: list[PairJudgment] = []
    result = JudgmentScores()
    for file in files:
        if not file.is_file():
            raise MissingInputError(
                f"{file} is not a file",
                "judgments in FastChat's or AlpacaEval's format",
                "give for instance model_judgment/gpt-4_single.jsonl",
            )
        if is_annotations(file):
            result.annotations += score_annotations(file)
            continue
        of_answers, of_pairs = read_judgments(file)
        scores += of_answers
        pairs += of_pairs
    result.differing = sum(_differs(score) for score in scores)
    if reparse:
        scores = [_reparsed(score) for score in scores]
    kept, kept_pairs = latest_scores(scores), latest_pairs(pairs)
    result.replaced = len(scores) + len(pairs) - len(kept) - len(kept_pairs)
    result.rows = leaderboard(kept, _categories(questions, kept))
    if baseline is not None and kept:
        result.differences = differences(kept, baseline)
    models = sorted({name for j in kept_pairs for name in (j.model_1, j.model_2)})
    if baseline is not None and not kept:
        _check_baseline(baseline, models, result.annotations)
    result.pairs = sorted((summarize_pairs(kept_pairs, name) for name in models), key=_pair_order)
    return result


def _check_baseline(
    baseline: str, models: Sequence[str], annotations: Sequence[AnnotationScore]
) -> None:
    annotated = {name for row in annotations for name in (row.model, row.baseline)}
    known = sorted({*models, *annotated})
    if baseline not in known:
        raise DataError(
            f"No judgment of the baseline {baseline!r}", f"one of {', '.join(known)}", "name it"
        )


def _differs(score: Score) -> bool:
    """Tell whether the text has another rating than was stored; without text there is no saying."""
    if score.is_unbounded or not score.judgment:
        return False
    return parse_rating(score.judgment) != score.score


def _reparsed(score: Score) -> Score:
    if score.is_unbounded:
        return score
    value = parse_rating(score.judgment)
    return dataclasses.replace(score, score=value, failure="" if value else "no rating in the text")


def _categories(path: Path | None, scores: Sequence[Score]) -> dict[int, str]:
    if path is None:
        return {}
    category_of = {question.question_id: question.category for question in read_questions(path)}
    unknown = sorted({s.question_id for s in scores if s.question_id not in category_of})
    if unknown:
        raise DataError(
            f"{len(unknown)} judged questions are not in {path}: {unknown[:_SHOWN_IDS]}",
            "judgments of these questions",
            "give the question file that was judged, or leave --questions out",
        )
    return category_of


def _pair_order(row: PairSummary) -> float:
    return -row.rate.adjusted if row.rate else 1.0


def _pair_json(row: PairSummary) -> dict[str, Any]:
    rate = row.rate
    return {
        "model": row.model,
        "wins": rate.wins if rate else 0,
        "ties": rate.ties if rate else 0,
        "losses": rate.losses if rate else 0,
        "win_rate": rate.strict if rate else None,
        "win_rate_adjusted": rate.adjusted if rate else None,
        "failed": row.failed,
        "coverage": row.coverage,
        "consistent": row.consistent,
    }


def print_judgments(console: Console, found: JudgmentScores) -> None:
    """Print a leaderboard of each kind of judgment that the files hold."""
    # A figure that is cut to fit a terminal is no figure.
    console.width = _WIDEST
    if found.rows:
        console.print(_score_table(found.rows))
        if any(row.categories for row in found.rows):
            console.print(_category_table(found.rows))
    if found.differences:
        console.print(_difference_table(found.differences))
    if found.pairs:
        console.print(_pair_table(found.pairs))
    if found.annotations:
        console.print(_annotation_table(found.annotations))
    notes = [_agreement_note(row) for row in found.rows if row.agreement is not None]
    if found.replaced:
        notes.append(f"{found.replaced:,} judgments were replaced by a later one.")
    if found.differing:
        notes.append(
            f"{found.differing:,} stored scores are not what the judge's text says; --reparse "
            "takes the text."
        )
    for note in notes:
        say(console, note)


def _agreement_note(row: ModelScore) -> str:
    assert row.agreement is not None
    same, apart = row.agreement.equal, row.agreement.mean_difference
    return f"{row.model}: repeats agree in {same:.1%}, on average {apart:.2f} apart."


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _score_table(rows: Sequence[ModelScore]) -> Table:
    figures = ("turn 1", "turn 2", "average", "95 %", "judged", "coverage")
    table = _table("Single-answer grading", ("model", "judge"), figures)
    for row in rows:
        interval = f"{row.mean.low:.2f} to {row.mean.high:.2f}" if row.mean else ""
        turns = [_number(row.turns.get(turn), 6) for turn in (1, 2)]
        mean = _number(row.mean.value if row.mean else None, 6)
        judged = f"{row.valid}/{row.valid + row.failed}"
        names = (plain(row.model), plain(row.judge))
        table.add_row(*names, *turns, mean, interval, judged, f"{row.coverage:.2%}")
    return table


def _category_table(rows: Sequence[ModelScore]) -> Table:
    categories = sorted({name for row in rows for name in row.categories})
    table = _table("By category", ("model",), [plain(name) for name in categories])
    for row in rows:
        values = [_number(row.categories.get(name), 2) for name in categories]
        table.add_row(plain(row.model), *values)
    return table


def _difference_table(rows: Sequence[Difference]) -> Table:
    title = f"Against {plain(rows[0].baseline)}, on the same questions"
    table = _table(title, ("model", "judge"), ("difference", "95 %", "n"))
    for row in rows:
        value, low, high = row.difference
        names = (plain(row.model), plain(row.judge))
        table.add_row(*names, f"{value:+.3f}", f"{low:+.2f} to {high:+.2f}", str(row.n))
    return table


def _pair_table(rows: Sequence[PairSummary]) -> Table:
    figures = ("win", "tie", "loss", "win rate", "ties half", "orders agree", "coverage")
    table = _table("Pairwise, both orders", ("model",), figures)
    for row in rows:
        fields = _pair_json(row)
        counts = [str(fields[name]) for name in ("wins", "ties", "losses")]
        names = ("win_rate", "win_rate_adjusted", "consistent")
        rates = [_number(fields[name], 4) for name in names]
        table.add_row(plain(row.model), *counts, *rates, f"{row.coverage:.2%}")
    return table


def _annotation_table(rows: Sequence[AnnotationScore]) -> Table:
    figures = ("win rate %", "standard error", "win", "draw", "loss", "failed")
    table = _table("AlpacaEval annotations", ("model", "baseline"), figures)
    for row in rows:
        rates = [
            _number(None if value is None else 100 * value, 2)
            for value in (row.win_rate, row.standard_error)
        ]
        counts = [str(value) for value in (row.wins, row.draws, row.losses, row.failed)]
        table.add_row(plain(row.model), plain(row.baseline), *rates, *counts)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
