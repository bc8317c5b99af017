"""Whole chunks of HH transcripts at a time: what nearly all rows of HH-RLHF are.

Arrow's kernels split and strip the texts of all rows at once; only hashing is done row by row. A
row that is anything but two transcripts with the same prompt, turns that alternate and two
different answers is left to the general parser, which would give the same for the others, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tasks.data.hh import ANSWER, ID_DIGITS, QUESTION
from tasks.data.keys import ROLE_PARTS, fold_many, unordered_key
from tasks.data.schemas import MESSAGE_TYPE

_MOST_EXCHANGES: Final = 1000
_ROLES: Final = pa.array(["user", "assistant"], pa.string())
_PREFIXES: Final = pa.array([ROLE_PARTS["user"], ROLE_PARTS["assistant"]], pa.large_string())
_SEPARATOR: Final = pa.scalar("\x00", pa.large_string())
_NOTHING: Final = pa.scalar("", pa.large_string())
_COLON: Final = pa.scalar(":", pa.large_string())
_ID_HEAD: Final = pa.scalar(f"{ID_DIGITS}:", pa.large_string())
# Both hexadecimal digits of each byte, as one number.
_HEX: Final = np.frombuffer(bytes(range(256)).hex().encode(), "<u2")

Array = np.ndarray[Any, Any]


def two_texts(raw: bytes) -> tuple[str, str] | None:
    """Return chosen and rejected of a row that is these two texts and nothing else."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if type(row) is not dict or len(row) != 2:
        return None
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if type(chosen) is not str or type(rejected) is not str:
        return None
    return chosen, rejected


@dataclass
class PlainPairs:
    """Pairs of a chunk, column by column.

    Args:
        index: which of the rows given they are.
        columns: as the general parser's, without what only it finds.
        keys: 16 bytes for both labels of each pair, 8 for its exact text, as three numbers.
        roots: the first 16 bytes of the digests of the first user turns, as two numbers.
        directions: which of the two labels each pair is.
    """

    index: Array
    columns: dict[str, pa.Array]
    keys: Array
    roots: Array
    directions: Array
    splits: list[int]


@dataclass(frozen=True)
class _Texts:
    """Rows that are fit.

    Args:
        head: prompts as transcripts.
        turns: stripped, of all prompts one after another.
        starts: where each prompt's turns start and end.
    """

    index: Array
    head: pa.Array
    chosen: pa.Array
    rejected: pa.Array
    turns: pa.Array
    starts: Array

    @property
    def n_turns(self) -> Array:
        """Turns of each prompt."""
        return np.diff(self.starts)


def parse_plain(
    chosen: list[str], rejected: list[str], split_all: Callable[[list[str]], list[int]]
) -> PlainPairs | None:
    """Return the pairs of those rows that nothing is wrong with; None when there are none.

    Also None when there may be a control character in any of them.
    """
    texts = _fit_texts(pa.array(chosen, pa.large_string()), pa.array(rejected, pa.large_string()))
    folded = _folded(texts.head, texts.chosen, texts.rejected)
    if not folded:
        return None
    columns, codes = _columns(texts)
    prompt_ids = _hex_of(_digests(_prompt_texts(texts, codes)))
    digests = _digests(_pair_texts(texts, prompt_ids))
    keys, directions = _keys(folded, texts)
    roots = _root_digests(texts.turns.take(pa.array(texts.starts[:-1])))
    group_ids = _hex_of(roots)
    columns |= {"pair_id": _hex_of(digests), "prompt_id": prompt_ids, "group_id": group_ids}
    exact, starts = digests.view("<u8")[:, :1], roots.view("<u8")[:, :2]
    splits = split_all(group_ids.to_pylist())
    return PlainPairs(texts.index, columns, np.hstack([keys, exact]), starts, directions, splits)


def _fit_texts(chosen: pa.Array, rejected: pa.Array) -> _Texts:
    sides = [
        pc.split_pattern(side, ANSWER, max_splits=1, reverse=True) for side in (chosen, rejected)
    ]
    ends = [side.offsets.to_numpy() for side in sides]
    both = np.flatnonzero((np.diff(ends[0]) == 2) & (np.diff(ends[1]) == 2))
    heads, tails = [], []
    for side, end in zip(sides, ends, strict=True):
        flat = side.flatten()
        heads.append(flat.take(pa.array(end[both])))
        tails.append(flat.take(pa.array(end[both] + 1)))
    answers = [pc.utf8_trim_whitespace(tail) for tail in tails]
    fit = _and(
        pc.equal(*heads),
        pc.starts_with(heads[0], QUESTION),
        *(pc.invert(pc.match_substring(tail, QUESTION)) for tail in tails),
        *(pc.greater(pc.binary_length(answer), 0) for answer in answers),
        pc.not_equal(*answers),
    )
    exchanges = pc.split_pattern(heads[0], QUESTION)
    parts = pc.split_pattern(exchanges.flatten(), ANSWER)
    fit &= _alternates(exchanges, parts)
    mask = pa.array(fit)
    kept = [text.filter(mask) for text in (heads[0], *answers)]
    return _Texts(both[fit], *kept, *_turns_of(exchanges, parts, fit))


def _and(*conditions: pa.Array) -> Array:
    found: Array = np.logical_and.reduce([c.to_numpy(zero_copy_only=False) for c in conditions])
    return found


def _alternates(exchanges: pa.Array, parts: pa.Array) -> Array:
    """Return which prompts are questions with one answer each, but for the last."""
    if not len(exchanges):
        return np.zeros(0, bool)
    ends = exchanges.offsets.to_numpy()
    n_parts = np.diff(parts.offsets.to_numpy())
    right = np.full(len(n_parts), 2)
    right[ends[:-1]] = 1
    right[ends[1:] - 1] = 1
    is_right: Array = np.logical_and.reduceat(n_parts == right, ends[:-1])
    length = np.diff(ends)
    fit: Array = is_right & (length > 1) & (length < _MOST_EXCHANGES)
    return fit


def _turns_of(exchanges: pa.Array, parts: pa.Array, fit: Array) -> tuple[pa.Array, Array]:
    """Return the turns of the fit prompts, stripped, and where each one's start and end."""
    ends = parts.offsets.to_numpy()[exchanges.offsets.to_numpy()]
    n_parts = np.diff(ends)
    is_turn = np.repeat(fit, n_parts)
    # What stands before the first question is empty.
    is_turn[ends[:-1]] = False
    starts = np.concatenate([[0], np.cumsum(n_parts[fit] - 1)])
    return pc.utf8_trim_whitespace(parts.flatten().filter(pa.array(is_turn))), starts


def _columns(texts: _Texts) -> tuple[dict[str, pa.Array], pa.Array]:
    """Return what is there before anything is hashed, and the role of each turn."""
    turns, starts, n_turns = texts.turns, texts.starts, texts.n_turns
    codes = pa.array((np.arange(len(turns)) - np.repeat(starts[:-1], n_turns)) % 2)
    messages = pa.StructArray.from_arrays([_ROLES.take(codes), turns], fields=list(MESSAGE_TYPE))
    kind = pa.list_(pa.field("element", MESSAGE_TYPE, False))
    chars = pc.utf8_length(turns).to_numpy()
    columns = {
        "chosen": texts.chosen,
        "rejected": texts.rejected,
        "n_turns": pa.array(n_turns + 1, pa.int32()),
        "prompt_chars": pa.array(np.add.reduceat(chars, starts[:-1]), pa.int32()),
        "chosen_chars": pc.utf8_length(texts.chosen).cast(pa.int32()),
        "rejected_chars": pc.utf8_length(texts.rejected).cast(pa.int32()),
        "alternating": pa.array(np.ones(len(n_turns), bool)),
        "prompt": pa.ListArray.from_arrays(pa.array(starts, pa.int32()), messages, kind),
    }
    return columns, codes


def _counted(texts: pa.Array) -> tuple[pa.Array, pa.Scalar, pa.Array]:
    """Return what ids are made of: the length, a colon, the text."""
    lengths = pc.utf8_length(texts).cast(pa.large_string())
    return lengths, _COLON, texts


def _prompt_texts(texts: _Texts, codes: pa.Array) -> pa.Array:
    """Return the text that each prompt's id is the hash of."""
    parts = pc.binary_join_element_wise(_PREFIXES.take(codes), *_counted(texts.turns), _NOTHING)
    rows = pa.LargeListArray.from_arrays(pa.array(texts.starts, pa.int64()), parts)
    return pc.binary_join(rows, _NOTHING)


def _pair_texts(texts: _Texts, prompt_ids: pa.Array) -> pa.Array:
    """Return the text that each pair's id is the hash of."""
    counted = (*_counted(texts.chosen), *_counted(texts.rejected))
    ids = prompt_ids.cast(pa.large_string())
    return pc.binary_join_element_wise(_ID_HEAD, ids, *counted, _NOTHING)


def _digests(texts: pa.Array) -> Array:
    """Return the SHA-256 of each text, of shape (n, 32)."""
    ends = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = memoryview(texts.buffers()[2] or b"")
    sha256 = hashlib.sha256
    found = [sha256(data[start:end]).digest() for start, end in pairwise(ends.tolist())]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)


def _hex_of(digests: Array) -> pa.Array:
    """Return the first digits of each digest in hexadecimal."""
    digits = _HEX[digests[:, : ID_DIGITS // 2]]
    ends = np.arange(len(digests) + 1, dtype=np.int32) * ID_DIGITS
    return pa.StringArray.from_buffers(len(digests), pa.py_buffer(ends), pa.py_buffer(digits))


def _folded(*columns: pa.Array) -> list[bytes] | None:
    """Return the texts of each row, row by row, normalized; None for control characters."""
    joined = pc.binary_join_element_wise(*columns, _NOTHING, _SEPARATOR)
    return fold_many(_bytes_of(joined), len(columns) * len(joined))


def _keys(folded: list[bytes], texts: _Texts) -> tuple[Array, Array]:
    """Return the keys of all pairs as two numbers each, and which label each pair is."""
    found, directions, alike = [], [], []
    rows = zip(folded[::3], folded[1::3], folded[2::3], texts.n_turns.tolist(), strict=True)
    for prompt, better, worse, n_turns in rows:
        directions.append(better < worse)
        if better == worse:
            alike.append(len(directions) - 1)
        found.append(unordered_key(b"%d:%b" % (n_turns, prompt), better, worse))
    for index in alike:
        directions[index] = texts.chosen[index].as_py() < texts.rejected[index].as_py()
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2), np.array(directions)


def _root_digests(firsts: pa.Array) -> Array:
    """Return the digests of the first user turns, which have no control characters."""
    folded = _folded(firsts)
    assert folded is not None, "they were looked at with the whole prompts"
    sha256 = hashlib.sha256
    found = [sha256(text).digest() for text in folded]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)


def _bytes_of(texts: pa.Array) -> bytes:
    """Return all texts as they lie one after another."""
    ends = np.frombuffer(texts.buffers()[1], np.int64)
    data = texts.buffers()[2]
    start, end = int(ends[texts.offset]), int(ends[texts.offset + len(texts)])
    return data.slice(start, end - start).to_pybytes() if data is not None else b""
