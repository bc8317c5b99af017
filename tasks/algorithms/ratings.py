"""What a judge decided, read from what it wrote; text without a decision has none."""

from __future__ import annotations

import re
from typing import Final, Literal

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
