"""Scores, margins and log-probabilities of a row; and who decides about what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tasks.data.hh import Refusal
from tasks.quarantine import Action, QuarantineReason

SIDES: Final = ("chosen", "rejected")
_LEAST_LOGPROB: Final = -1e9
_LARGEST_SCORE: Final = 1e9

Scores = tuple[float, float]


class Judge:
    """Decides about what is wrong with one row.

    Args:
        actions: what is done about each reason.
        flags: reasons that the row is kept in spite of.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = actions
        self.flags: list[str] = []

    def find(self, reason: QuarantineReason, detail: str) -> None:
        """Object to the row: note the reason, or refuse the row.

        Raises:
            Refusal: the reason is not one to keep rows in spite of.
        """
        if self.actions[reason.value] != "keep":
            raise Refusal(reason, detail)
        if reason.value not in self.flags:
            self.flags.append(reason.value)


def scores_of(row: Mapping[str, Any], judge: Judge) -> Scores | None:
    """Return the scores of chosen and rejected, or None when the row has none."""
    values = [row.get(f"score_{side}") for side in SIDES]
    if values == [None, None]:
        return None
    chosen, rejected = as_scores(values)
    if chosen == rejected:
        judge.find(QuarantineReason.TIE, f"both responses score {chosen:g}")
    if chosen < rejected:
        detail = f"chosen scores {chosen:g}, rejected {rejected:g}"
        judge.find(QuarantineReason.SCORES_CONTRADICT_LABEL, detail)
    return chosen, rejected


def as_scores(values: Sequence[Any]) -> Scores:
    """Return two numbers.

    Raises:
        Refusal: they are not.
    """
    if not all(is_finite_number(v) and abs(v) <= _LARGEST_SCORE for v in values):
        raise Refusal(QuarantineReason.WRONG_TYPE, "scores must be two numbers up to 1e9")
    return float(values[0]), float(values[1])


def margin_of(row: Mapping[str, Any]) -> float | None:
    """Return what the row calls its margin, or how much higher chosen is scored; None where the
    scores contradict the label."""
    value = row.get("margin")
    if value is None:
        scores = [row.get(f"score_{side}") for side in SIDES]
        if None in scores:
            return None
        difference = float(scores[0]) - float(scores[1])  # type: ignore[arg-type]
        return difference if difference >= 0 else None
    if not is_finite_number(value) or not 0 <= value <= _LARGEST_SCORE:
        raise Refusal(QuarantineReason.WRONG_TYPE, "'margin' must be a number from 0 to 1e9")
    return float(value)


def logged_of(row: Mapping[str, Any]) -> Scores | None:
    """Return the logged log-probabilities of chosen and rejected, or None when there are none."""
    return as_logged([row.get(f"{side}_logprob") for side in SIDES])


def as_logged(values: Sequence[Any]) -> Scores | None:
    """Return two log-probabilities, or None for two nulls.

    Raises:
        Refusal: they are something else.
    """
    if list(values) == [None, None]:
        return None
    for side, value in zip(SIDES, values, strict=True):
        if not is_finite_number(value) or not _LEAST_LOGPROB <= value <= 0:
            detail = f"the log-probability of {side} is not a number of nats up to 0"
            raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    return float(values[0]), float(values[1])


def is_finite_number(value: Any) -> bool:
    """Tell whether a JSON value is a number, and a finite one."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
