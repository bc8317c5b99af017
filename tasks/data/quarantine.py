"""Why a row of preference data is left out, and what may be done about it."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

Action = Literal["drop", "keep", "fail"]


class QuarantineReason(Enum):
    """Why a row was left out; the list is closed."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    TIE = "tie"
    SCORES_CONTRADICT_LABEL = "scores_contradict_label"
    NO_TURNS = "no_turns"
    LEADING_TEXT = "leading_text"
    FIRST_TURN_NOT_HUMAN = "first_turn_not_human"
    LAST_TURN_NOT_ASSISTANT = "last_turn_not_assistant"
    PROMPT_MISMATCH = "prompt_mismatch"
    NON_ALTERNATING = "non_alternating"
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_RESPONSE = "empty_response"
    IDENTICAL_PAIR = "identical_pair"
    CONTROL_CHARACTERS = "control_characters"
    TOO_LONG = "too_long"
    IDENTICAL_AFTER_TRUNCATION = "identical_after_truncation"
    NOT_SAMPLED = "not_sampled"
    LEAKED_FROM_OTHER_SPLIT = "leaked_from_other_split"
    DUPLICATE = "duplicate"
    NORMALIZED_DUPLICATE = "normalized_duplicate"
    LABEL_CONFLICT = "label_conflict"


REASONS: Final = tuple(reason.value for reason in QuarantineReason)
# Of these rows there is no pair that could be kept.
UNUSABLE: Final = frozenset(
    reason.value
    for reason in (
        QuarantineReason.INVALID_ENCODING,
        QuarantineReason.INVALID_JSON,
        QuarantineReason.MISSING_FIELD,
        QuarantineReason.WRONG_TYPE,
        QuarantineReason.NO_TURNS,
        QuarantineReason.LAST_TURN_NOT_ASSISTANT,
        QuarantineReason.NOT_SAMPLED,
    )
)
# Real data is full of both, and they harm nothing that reads the flag.
KEPT_BY_DEFAULT: Final = frozenset(
    reason.value
    for reason in (QuarantineReason.NON_ALTERNATING, QuarantineReason.CONTROL_CHARACTERS)
)


def default_actions() -> dict[str, Action]:
    """Return what is done about each reason unless the config says otherwise."""
    return {reason: "keep" if reason in KEPT_BY_DEFAULT else "drop" for reason in REASONS}
