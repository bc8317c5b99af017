"""Identities of texts: ids, keys that ignore case and white space, splits."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Final

from tasks.data.hh import ID_DIGITS
from tasks.errors import ConfigError

SPLITS: Final = ("train", "validation", "test")
_WHITE: Final = b" \t\n\r"
_CONTROLS: Final = bytes(code for code in [*range(32), 127] if code not in b"\t\n\r\x01")
_SEPARATOR: Final = "\x01"
# Lower case, and NUL for all control characters but the separator.
_FOLDED: Final = bytes.maketrans(
    _CONTROLS + b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"\x00" * len(_CONTROLS) + b"abcdefghijklmnopqrstuvwxyz",
)
_ROLE_PARTS: Final = {role: f"{len(role)}:{role}" for role in ("system", "user", "assistant")}


def normalized(text: str) -> bytes:
    """Return a text in NFKC, case-folded, without ASCII white space.

    NFKC makes the other spaces ASCII ones; line separators such as U+2028 stay. Control characters
    count as one and the same.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).casefold()
    return text.encode().translate(_FOLDED, _WHITE)


def normalized_prompt(roles: list[str], contents: list[str]) -> tuple[bytes, bytes, bool]:
    """Return the normalized turns, the normalized first user turn, and whether to look closer.

    Conversations that extend one another share their first user turn. A closer look is due when
    there may be control characters.
    """
    key = normalized(_SEPARATOR.join([*roles, *contents]))
    n = len(roles)
    has_controls = b"\x00" in key or key.count(b"\x01") != 2 * n - 1
    if n and not has_controls and roles[0] == "user":
        return key, key.split(b"\x01", n + 1)[n], False
    spoken = [text for role, text in zip(roles, contents, strict=True) if role == "user"]
    return key, normalized((spoken or contents or [""])[0]), has_controls


def has_control(folded: bytes) -> bool:
    """Tell whether a normalized text came from one with control characters."""
    return b"\x00" in folded or b"\x01" in folded


def prompt_id_of(roles: list[str], contents: list[str]) -> str:
    """Return what `tasks.data.hh.make_prompt_id` returns for these turns."""
    parts = _ROLE_PARTS
    text = "".join(
        [f"{parts[role]}{len(content)}:{content}" for role, content in zip(roles, contents)]  # noqa: B905
    )
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def pair_digest(prompt_id: str, chosen: str, rejected: str) -> bytes:
    """Return the SHA-256 whose head is what `tasks.data.hh.make_pair_id` returns."""
    text = f"{len(prompt_id)}:{prompt_id}{len(chosen)}:{chosen}{len(rejected)}:{rejected}"
    return hashlib.sha256(text.encode()).digest()


def unordered_key(prompt: bytes, first: bytes, second: bytes) -> bytes:
    """Return 16 bytes that name a prompt with two responses, whichever of them is preferred."""
    low, high = (first, second) if first <= second else (second, first)
    head = b"%d:%d:" % (len(prompt), len(low))
    return hashlib.blake2b(head + prompt + low + high, digest_size=16).digest()


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
