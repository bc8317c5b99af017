"""HH-RLHF rows: transcripts split into a shared prompt and two responses.

A row is kept as a `Pair` or left out as a `Quarantined` row with exactly one reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tasks.quarantine import QuarantineReason

_DELIMITER: Final = re.compile(r"\n\n(Human|Assistant):")
ANSWER: Final = "\n\nAssistant:"
QUESTION: Final = "\n\nHuman:"
_ROLES: Final = {"Human": "user", "Assistant": "assistant"}
ID_DIGITS: Final = 20


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
        flags: what ingestion found worth a mark and kept.
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
    flags: tuple[str, ...] = ()

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


class Refusal(Exception):
    """Carries a reason from the checks of a row to whoever keeps the accounts."""

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _digest(*parts: str) -> str:
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def make_prompt_id(prompt: Sequence[Message]) -> str:
    """Return the hash that names a prompt."""
    return _digest(*(part for turn in prompt for part in (turn.role, turn.content)))


def make_pair_id(prompt_id: str, chosen: str, rejected: str) -> str:
    """Return the hash that names a pair; swapping the responses gives another."""
    return _digest(prompt_id, chosen, rejected)


def orient_scored(texts: Sequence[str], scores: Sequence[float]) -> tuple[str, str] | None:
    """Return (chosen, rejected) of two scored texts, or None when the scores tie."""
    if scores[0] == scores[1]:
        return None
    best = 0 if scores[0] > scores[1] else 1
    return texts[best], texts[1 - best]


def parse_transcript(text: str) -> tuple[Message, ...]:
    """Split an HH transcript into turns, each stripped of surrounding whitespace.

    Text before the first delimiter is not a turn; `leading_text` returns it.
    """
    parts = _DELIMITER.split(text)
    return tuple(
        Message(_ROLES[speaker], content.strip())
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    )


def leading_text(text: str) -> str:
    """Return what stands before the first delimiter, stripped."""
    first = _DELIMITER.search(text)
    return text[: first.start()].strip() if first is not None else ""
