"""HH-RLHF rows: transcripts split into a shared prompt and two responses.

A row is kept as a `Pair` or left out as a `Quarantined` row with exactly one reason.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tasks.data.quarantine import QuarantineReason
from tasks.errors import ConfigError

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


# Identities of texts: ids, keys that ignore case and white space, splits.

SPLITS: Final = ("train", "validation", "test")
_WHITE: Final = b" \t\n\r"
_CONTROLS: Final = bytes(code for code in [*range(32), 127] if code not in b"\t\n\r")
# Lower case, and NUL for all control characters.
_FOLDED: Final = bytes.maketrans(
    _CONTROLS + b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"\x00" * len(_CONTROLS) + b"abcdefghijklmnopqrstuvwxyz",
)
_ASCII: Final = bytes(range(128))
# Dashes and quotation marks: what is not ASCII in most English text, and stays as it is.
_UNCHANGED: Final = re.compile(rb"(?:\xe2\x80[\x93\x94\x98\x99\x9c\x9d])*")
_UNCHANGED_ENDS: Final = np.isin(np.arange(256), [0x93, 0x94, 0x98, 0x99, 0x9C, 0x9D])
_SPEAKERS: Final = {"user": "Human:", "assistant": "Assistant:", "system": "System:"}
ROLE_PARTS: Final = {role: f"{len(role)}:{role}" for role in ("system", "user", "assistant")}


def normalized(text: str) -> bytes:
    """Return a text in NFKC, case-folded, without ASCII white space.

    NFKC makes the other spaces ASCII ones; line separators such as U+2028 stay. Control characters
    count as one and the same.
    """
    return fold(text.encode())


def fold(raw: bytes) -> bytes:
    """Return what `normalized` returns for a text in UTF-8."""
    rest = raw.translate(None, _ASCII)
    if rest and _UNCHANGED.fullmatch(rest) is None:
        raw = unicodedata.normalize("NFKC", raw.decode()).casefold().encode()
    return raw.translate(_FOLDED, _WHITE)


def fold_many(raw: bytes, n_parts: int) -> list[bytes] | None:
    """Return so many texts, each followed by NUL, normalized; None for control characters."""
    folded = np.frombuffer(raw.translate(_FOLDED), np.uint8)
    # White space is what is left of the codes up to 32: a vectorised `translate(_FOLDED, _WHITE)`.
    parts = np.compress((folded > 32) | (folded == 0), folded).tobytes().split(b"\x00")
    if len(parts) != n_parts + 1:
        return None
    parts.pop()
    data = np.frombuffer(raw, np.uint8)
    high = _high_places(data)
    if len(high):
        ends = np.flatnonzero(data == 0)
        for index in np.unique(np.searchsorted(ends, high)).tolist():
            start = ends[index - 1] + 1 if index else 0
            parts[index] = fold(raw[start : ends[index]])
    return parts


def _high_places(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return where characters are that are neither ASCII nor `_UNCHANGED`, byte by byte."""
    places: np.ndarray[Any, Any] = np.flatnonzero(data >= 0x80)
    # A character of three bytes holds three places in a row.
    lead = np.flatnonzero(data[places] == 0xE2)
    at = places[lead]
    lead = lead[(data[at + 1] == 0x80) & _UNCHANGED_ENDS[data[at + 2]]]
    other = np.ones(len(places), bool)
    for offset in range(3):
        other[lead + offset] = False
    found: np.ndarray[Any, Any] = places[other]
    return found


def prompt_key_of(n_turns: int, transcript: str) -> bytes:
    """Return what names a prompt case and white space aside, from its transcript."""
    return b"%d:" % n_turns + normalized(transcript)


def transcript_of(roles: list[str], contents: list[str]) -> str:
    """Return the turns as one text; of an HH transcript the same but for white space."""
    return "".join(
        [_SPEAKERS[role] + content for role, content in zip(roles, contents, strict=True)]
    )


def first_user_turn(roles: list[str], contents: list[str]) -> str:
    """Return what the user said first: conversations that extend one another share it."""
    spoken = [text for role, text in zip(roles, contents, strict=True) if role == "user"]
    return (spoken or contents or [""])[0]


def has_control(folded: bytes) -> bool:
    """Tell whether a normalized text came from one with control characters."""
    return b"\x00" in folded


def prompt_id_of(roles: list[str], contents: list[str]) -> str:
    """Return what `make_prompt_id` returns for these turns."""
    parts = ROLE_PARTS
    text = "".join(
        [f"{parts[role]}{len(content)}:{content}" for role, content in zip(roles, contents)]  # noqa: B905
    )
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def pair_digest(prompt_id: str, chosen: str, rejected: str) -> bytes:
    """Return the SHA-256 whose head is what `make_pair_id` returns."""
    text = f"{len(prompt_id)}:{prompt_id}{len(chosen)}:{chosen}{len(rejected)}:{rejected}"
    return hashlib.sha256(text.encode()).digest()


def unordered_key(prompt: bytes, first: bytes, second: bytes) -> bytes:
    """Return 16 bytes that name a prompt with two responses, whichever of them is preferred."""
    low, high = (first, second) if first <= second else (second, first)
    text = b"%d:%d:%b%b%b" % (len(prompt), len(low), prompt, low, high)
    return hashlib.blake2b(text, digest_size=16).digest()


def is_taken(group_id: str, seed: int, weight: float) -> bool:
    r"""Tell whether a group is in a sample of its source.

    True if the first 64 bits of the SHA-256 of seed and group, over $2^{64}$, are below the weight:
    the same groups whatever else is in the source, and more of them the larger the weight.
    """
    if weight >= 1.0:
        return True
    digest = hashlib.sha256(f"weight:{seed}:{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < weight


def split_of(prompt_id: str, seed: int, validation_share: float, test_share: float) -> str:
    """Return the split of a prompt.

    $u$ is the first 64 bits of the SHA-256 of seed and prompt_id, over $2^{64}$; test if $u < t$,
    validation if $u < t + v$, else train. It depends on nothing else: rows that share a prompt stay
    together, and a prompt keeps its split when rows are added to the source.

    Raises:
        ConfigError: the shares leave nothing to train on.
    """
    if validation_share + test_share >= 1.0:
        raise ConfigError(
            f"validation_share {validation_share} and test_share {test_share} add up to "
            f"{validation_share + test_share:g}",
            "less than 1",
            "lower ingest.validation_share or ingest.test_share",
        )
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < test_share:
        return "test"
    return "validation" if position < test_share + validation_share else "train"


def split_codes_of(
    group_ids: list[str], seed: int, validation_share: float, test_share: float
) -> list[int]:
    """Return what `split_of` returns for each, as places in `SPLITS`."""
    sha256, head = hashlib.sha256, f"{seed}:"
    drawn = [sha256((head + group_id).encode()).digest()[:8] for group_id in group_ids]
    position = np.frombuffer(b"".join(drawn), ">u8").astype(np.float64) / 2**64
    codes = np.where(position < test_share + validation_share, 1, 0)
    codes[position < test_share] = 2
    found: list[int] = codes.tolist()
    return found
