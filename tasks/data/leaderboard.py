"""Judgments of several models as a leaderboard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.algorithms.question_statistics import (
    Agreement,
    Interval,
    agreement,
    clustered_interval,
    paired_interval,
)
from tasks.data.scores import (
    Score,
    latest_scores,
    repeats_by_question,
    scores_by_question,
    summarize_scores,
)
from tasks.errors import DataError


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
    mean: Interval | None
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
    difference: Interval
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
