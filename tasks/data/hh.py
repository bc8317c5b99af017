"""HH-RLHF rows: transcripts split into a shared prompt and two responses.

A row is kept as a `Pair` or left out as a `Quarantined` row with exactly one reason. No text
raises.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

_DELIMITER: Final = re.compile(r"\n\n(Human|Assistant):")
_ROLES: Final = {"Human": "user", "Assistant": "assistant"}
_SIDES: Final = ("chosen", "rejected")
_ID_DIGITS: Final = 20
_LEAST_LOGPROB: Final = -1e9
_LARGEST_MARGIN: Final = 1e9


class QuarantineReason(Enum):
    """Why a row was left out."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    TIED_SCORES = "tied_scores"
    NO_TURNS = "no_turns"
    LEADING_TEXT = "leading_text"
    FIRST_TURN_NOT_HUMAN = "first_turn_not_human"
    LAST_TURN_NOT_ASSISTANT = "last_turn_not_assistant"
    PROMPT_MISMATCH = "prompt_mismatch"
    EMPTY_RESPONSE = "empty_response"
    IDENTICAL_PAIR = "identical_pair"
    DUPLICATE = "duplicate"
    LABEL_CONFLICT = "label_conflict"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; ``role`` is ``user`` or ``assistant`` (``system`` where a caller adds one)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Pair:
    """One preference: two responses to the same prompt.

    Args:
        pair_id: hash of prompt, chosen and rejected, in this order.
        prompt_id: hash of the prompt.
        subset: part of the corpus, for instance ``harmless-base``.
        prompt: turns before the response.
        source_line: 1-based line of the source file.
        logged: log-probabilities in nats of the whole chosen and rejected response, end of turn
            included, under the policy that wrote them; None where the source has none.
        margin: how much better the chosen response was rated; None where the source has no ratings.
    """

    pair_id: str
    prompt_id: str
    subset: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source_file: str
    source_line: int
    logged: tuple[float, float] | None = None
    margin: float | None = None

    @property
    def n_turns(self) -> int:
        """Turns of the conversation, the response included."""
        return len(self.prompt) + 1

    @property
    def alternating(self) -> bool:
        """Whether no two turns in a row, the response included, have the same role."""
        roles = [message.role for message in self.prompt] + ["assistant"]
        return all(left != right for left, right in pairwise(roles))

    @property
    def swapped_id(self) -> str:
        """The `pair_id` of the same pair with the opposite label."""
        return make_pair_id(self.prompt_id, self.rejected, self.chosen)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that was left out, with its text as it was read."""

    reason: QuarantineReason
    detail: str
    source_file: str
    source_line: int
    raw: str


class _Refusal(Exception):
    """Carries a reason from the checks to `parse_line`; never leaves this module."""

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _digest(*parts: str) -> str:
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def make_prompt_id(prompt: Sequence[Message]) -> str:
    """Return the hash that names a prompt."""
    return _digest(*(part for turn in prompt for part in (turn.role, turn.content)))


def make_pair_id(prompt_id: str, chosen: str, rejected: str) -> str:
    """Return the hash that names a pair; swapping the responses gives another."""
    return _digest(prompt_id, chosen, rejected)


def parse_line(line: bytes, subset: str, source_file: str, source_line: int) -> Pair | Quarantined:
    """Read one JSON line.

    Two row formats are known: ``{"chosen", "rejected"}`` and, with scores instead of a label,
    ``{"text": [a, b], "score": [x, y]}``. All strings are HH transcripts. Either may say how likely
    its policy found the responses: ``chosen_logprob`` and ``rejected_logprob``, or ``logprob: [a,
    b]``, in nats; and how far apart they were rated: ``margin``.
    """
    try:
        row = _decode_object(line)
        chosen, rejected = _texts_of(row)
        logged, margin = _logged_of(row), _margin_of(row)
        prompt, responses = _split_pair(chosen, rejected)
    except _Refusal as refusal:
        raw = line.decode("utf-8", errors="backslashreplace").rstrip("\r\n")
        return Quarantined(refusal.reason, refusal.detail, source_file, source_line, raw)
    prompt_id = make_prompt_id(prompt)
    return Pair(
        pair_id=make_pair_id(prompt_id, *responses),
        prompt_id=prompt_id,
        subset=subset,
        prompt=prompt,
        chosen=responses[0],
        rejected=responses[1],
        source_file=source_file,
        source_line=source_line,
        logged=logged,
        margin=margin,
    )


def orient_scored(texts: Sequence[str], scores: Sequence[float]) -> tuple[str, str] | None:
    """Return (chosen, rejected) of two scored texts, or None when the scores tie."""
    if scores[0] == scores[1]:
        return None
    best = 0 if scores[0] > scores[1] else 1
    return texts[best], texts[1 - best]


def parse_transcript(text: str) -> tuple[Message, ...]:
    """Split an HH transcript into turns, each stripped of surrounding whitespace.

    Text before the first delimiter is not a turn; `parse_line` refuses a row that has some.
    """
    parts = _DELIMITER.split(text)
    return tuple(
        Message(_ROLES[speaker], content.strip())
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    )


def _decode_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not UTF-8"
        raise _Refusal(QuarantineReason.INVALID_ENCODING, detail) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) or type(error).__name__
        raise _Refusal(QuarantineReason.INVALID_JSON, detail) from error
    if not isinstance(row, dict):
        detail = f"the line holds a {type(row).__name__}, not an object"
        raise _Refusal(QuarantineReason.WRONG_TYPE, detail)
    return row


def _texts_of(row: dict[str, Any]) -> tuple[str, str]:
    if _is_scored(row):
        return _scored_texts(row["text"], row["score"])
    for side in _SIDES:
        if side not in row:
            detail = f"no field {side!r}; there are {sorted(row)[:8]}"
            # A key may hold an unpaired surrogate, which no file can store.
            detail = detail.encode("utf-8", "backslashreplace").decode()
            raise _Refusal(QuarantineReason.MISSING_FIELD, detail)
    return _storable("chosen", row["chosen"]), _storable("rejected", row["rejected"])


def _is_scored(row: dict[str, Any]) -> bool:
    return "text" in row and "score" in row and not any(side in row for side in _SIDES)


def _logged_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return the logged log-probabilities of chosen and rejected, or None when the row has none."""
    if _is_scored(row):
        values = row.get("logprob", [None, None])
        if not isinstance(values, list) or len(values) != 2:
            raise _Refusal(QuarantineReason.WRONG_TYPE, "'logprob' must be a list of two numbers")
        if row["score"][0] < row["score"][1]:
            values = values[::-1]
    else:
        values = [row.get(f"{side}_logprob") for side in _SIDES]
    if values == [None, None]:
        return None
    for side, value in zip(_SIDES, values, strict=True):
        if not _is_finite_number(value) or not _LEAST_LOGPROB <= value <= 0:
            detail = f"the log-probability of {side} is not a number of nats up to 0"
            raise _Refusal(QuarantineReason.WRONG_TYPE, detail)
    return float(values[0]), float(values[1])


def _margin_of(row: dict[str, Any]) -> float | None:
    """Return the difference of the scores, or what the row itself calls its margin."""
    value = abs(row["score"][0] - row["score"][1]) if _is_scored(row) else row.get("margin")
    if value is None:
        return None
    if not _is_finite_number(value) or not 0 <= value <= _LARGEST_MARGIN:
        raise _Refusal(QuarantineReason.WRONG_TYPE, "'margin' must be a number from 0 to 1e9")
    return float(value)


def _scored_texts(texts: Any, scores: Any) -> tuple[str, str]:
    pairs = isinstance(texts, list) and isinstance(scores, list) and len(texts) == len(scores) == 2
    if not pairs or not all(_is_finite_number(score) for score in scores):
        detail = "'text' and 'score' must be two strings and two finite numbers"
        raise _Refusal(QuarantineReason.WRONG_TYPE, detail)
    checked = [_storable(f"text[{index}]", text) for index, text in enumerate(texts)]
    oriented = orient_scored(checked, scores)
    if oriented is None:
        raise _Refusal(QuarantineReason.TIED_SCORES, f"both responses score {scores[0]}")
    return oriented


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _storable(field: str, text: Any) -> str:
    if not isinstance(text, str):
        detail = f"{field} is a {type(text).__name__}, not a string"
        raise _Refusal(QuarantineReason.WRONG_TYPE, detail)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"{field} has an unpaired surrogate at character {error.start}"
        raise _Refusal(QuarantineReason.INVALID_ENCODING, detail) from error
    return text


def _split_pair(chosen: str, rejected: str) -> tuple[tuple[Message, ...], tuple[str, str]]:
    turns = {"chosen": _turns_of("chosen", chosen), "rejected": _turns_of("rejected", rejected)}
    prompt = turns["chosen"][:-1]
    if prompt != turns["rejected"][:-1]:
        raise _Refusal(QuarantineReason.PROMPT_MISMATCH, _first_difference(turns))
    for side in _SIDES:
        if not turns[side][-1].content:
            raise _Refusal(QuarantineReason.EMPTY_RESPONSE, f"the response of {side} is empty")
    responses = (turns["chosen"][-1].content, turns["rejected"][-1].content)
    if responses[0] == responses[1]:
        raise _Refusal(QuarantineReason.IDENTICAL_PAIR, "chosen and rejected are the same text")
    return prompt, responses


def _turns_of(side: str, text: str) -> tuple[Message, ...]:
    turns = parse_transcript(text)
    if not turns:
        raise _Refusal(QuarantineReason.NO_TURNS, f"{side} has neither Human: nor Assistant:")
    first = _DELIMITER.search(text)
    if first is not None and text[: first.start()].strip():
        detail = f"{side} has {first.start()} characters before its first turn"
        raise _Refusal(QuarantineReason.LEADING_TEXT, detail)
    if turns[0].role != "user":
        detail = f"{side} starts with an {turns[0].role} turn"
        raise _Refusal(QuarantineReason.FIRST_TURN_NOT_HUMAN, detail)
    if turns[-1].role != "assistant":
        detail = f"{side} ends with a {turns[-1].role} turn"
        raise _Refusal(QuarantineReason.LAST_TURN_NOT_ASSISTANT, detail)
    return turns


def _first_difference(turns: dict[str, tuple[Message, ...]]) -> str:
    chosen, rejected = turns["chosen"][:-1], turns["rejected"][:-1]
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return (
        f"prompts of {len(chosen)} and {len(rejected)} turns differ from turn {same + 1} on, "
        "so the responses do not answer the same prompt"
    )
