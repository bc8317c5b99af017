"""Whole chunks of HH transcripts at a time: what nearly all rows of HH-RLHF are.

Arrow's kernels split and strip the texts of all rows at once; only hashing is done row by row. A
row that is anything but two transcripts with the same prompt, turns that alternate and two
different answers is left to the general parser, which would give the same for the others, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tasks.data.hh import ANSWER, ID_DIGITS, QUESTION
from tasks.data.keys import (
    ROLE_PARTS,
    fold_many,
    unordered_key,
)
from tasks.data.schemas import MESSAGE_TYPE

_MOST_EXCHANGES: Final = 1000
_ROLES: Final = pa.array(["user", "assistant"], pa.string())
_PREFIXES: Final = pa.array([ROLE_PARTS["user"], ROLE_PARTS["assistant"]], pa.large_string())
_SEPARATOR: Final = pa.scalar("\x00", pa.large_string())
_NOTHING: Final = pa.scalar("", pa.large_string())
_COLON: Final = pa.scalar(":", pa.large_string())

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
        keys: 16 bytes for both labels of each pair, 8 for its exact text.
        roots: digests of the first user turns.
        directions: which of the two labels each pair is.
    """

    index: Array
    columns: dict[str, pa.Array]
    keys: list[bytes] = field(default_factory=list)
    roots: list[bytes] = field(default_factory=list)
    directions: list[bool] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Texts:
    """Rows that are fit: prompt transcripts and both answers."""

    index: Array
    head: pa.Array
    chosen: pa.Array
    rejected: pa.Array

    @property
    def parts(self) -> tuple[pa.Array, pa.Array, pa.Array]:
        """The three texts of each row."""
        return self.head, self.chosen, self.rejected


def parse_plain(
    chosen: list[str], rejected: list[str], split_all: Callable[[list[str]], list[int]]
) -> PlainPairs | None:
    """Return the pairs of those rows that nothing is wrong with; None when there are none.

    Also None when there may be a control character in any of them.
    """
    texts = _fit_texts(pa.array(chosen, pa.large_string()), pa.array(rejected, pa.large_string()))
    n = len(texts.index)
    joined = pc.binary_join_element_wise(*texts.parts, _NOTHING, _SEPARATOR)
    folded = fold_many(_bytes_of(joined), 3 * n) if n else None
    if folded is None:
        return None
    turns, starts = _turns_of(texts.head)
    columns = _columns(texts, turns, starts)
    pairs = PlainPairs(texts.index, columns)
    _add_ids(pairs, _prompt_texts(turns, starts, columns["role_codes"]), texts)
    _add_keys(pairs, folded, np.diff(starts).tolist())
    pairs.roots = _roots(turns.take(pa.array(starts[:-1])))
    group_ids = [root.hex()[:ID_DIGITS] for root in pairs.roots]
    pairs.splits = split_all(group_ids)
    columns["group_id"] = pa.array(group_ids, pa.string())
    del columns["role_codes"]
    return pairs


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
    fit &= _alternates(heads[0])
    mask = pa.array(fit)
    return _Texts(both[fit], heads[0].filter(mask), *(answer.filter(mask) for answer in answers))


def _and(*conditions: pa.Array) -> Array:
    found: Array = np.logical_and.reduce([c.to_numpy(zero_copy_only=False) for c in conditions])
    return found


def _alternates(heads: pa.Array) -> Array:
    """Return which prompts are questions with one answer each, but for the last."""
    if not len(heads):
        return np.zeros(0, bool)
    exchanges = pc.split_pattern(heads, QUESTION)
    ends = exchanges.offsets.to_numpy()
    parts = np.diff(pc.split_pattern(exchanges.flatten(), ANSWER).offsets.to_numpy())
    right = np.full(len(parts), 2)
    right[ends[:-1]] = 1
    right[ends[1:] - 1] = 1
    is_right: Array = np.logical_and.reduceat(parts == right, ends[:-1])
    length = np.diff(ends)
    fit: Array = is_right & (length > 1) & (length < _MOST_EXCHANGES)
    return fit


def _turns_of(heads: pa.Array) -> tuple[pa.Array, Array]:
    """Return the turns of all prompts, stripped, and where each prompt's turns start and end."""
    exchanges = pc.split_pattern(heads, QUESTION)
    parts = pc.split_pattern(exchanges.flatten(), ANSWER)
    ends = parts.offsets.to_numpy()[exchanges.offsets.to_numpy()]
    flat = parts.flatten()
    # What stands before the first question is empty.
    is_turn = np.ones(len(flat), bool)
    is_turn[ends[:-1]] = False
    return pc.utf8_trim_whitespace(flat.filter(pa.array(is_turn))), ends - np.arange(len(ends))


def _columns(texts: _Texts, turns: pa.Array, starts: Array) -> dict[str, pa.Array]:
    n_turns = np.diff(starts)
    codes = pa.array((np.arange(len(turns)) - np.repeat(starts[:-1], n_turns)) % 2)
    messages = pa.StructArray.from_arrays([_ROLES.take(codes), turns], fields=list(MESSAGE_TYPE))
    kind = pa.list_(pa.field("element", MESSAGE_TYPE, False))
    chars = pc.utf8_length(turns).to_numpy()
    return {
        "role_codes": codes,
        "chosen": texts.chosen,
        "rejected": texts.rejected,
        "n_turns": pa.array(n_turns + 1, pa.int32()),
        "prompt_chars": pa.array(np.add.reduceat(chars, starts[:-1]), pa.int32()),
        "chosen_chars": pc.utf8_length(texts.chosen).cast(pa.int32()),
        "rejected_chars": pc.utf8_length(texts.rejected).cast(pa.int32()),
        "alternating": pa.array(np.ones(len(n_turns), bool)),
        "prompt": pa.ListArray.from_arrays(pa.array(starts, pa.int32()), messages, kind),
    }


def _counted(texts: pa.Array) -> tuple[pa.Array, pa.Scalar, pa.Array]:
    """Return what ids are made of: the length, a colon, the text."""
    lengths = pc.utf8_length(texts).cast(pa.large_string())
    return lengths, _COLON, texts


def _prompt_texts(turns: pa.Array, starts: Array, codes: pa.Array) -> pa.Array:
    """Return the text that each prompt's id is the hash of."""
    parts = pc.binary_join_element_wise(_PREFIXES.take(codes), *_counted(turns), _NOTHING)
    rows = pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), parts)
    return pc.binary_join(rows, _NOTHING)


def _add_ids(pairs: PlainPairs, prompts: pa.Array, texts: _Texts) -> None:
    sha256, digits = hashlib.sha256, ID_DIGITS
    prompt_ids = [sha256(text).hexdigest()[:digits] for text in _slices(prompts)]
    ids = pa.array(prompt_ids, pa.large_string())
    counted = (*_counted(texts.chosen), *_counted(texts.rejected))
    head = pa.scalar(f"{digits}:", pa.large_string())
    whole = pc.binary_join_element_wise(head, ids, *counted, _NOTHING)
    pairs.keys = [sha256(text).digest() for text in _slices(whole)]
    pairs.columns["prompt_id"] = ids.cast(pa.string())
    pair_ids = [digest.hex()[:digits] for digest in pairs.keys]
    pairs.columns["pair_id"] = pa.array(pair_ids, pa.string())


def _add_keys(pairs: PlainPairs, folded: list[bytes], n_turns: list[int]) -> None:
    exact = pairs.keys
    pairs.keys = []
    rows = zip(folded[::3], folded[1::3], folded[2::3], exact, n_turns, strict=True)
    for index, (prompt, better, worse, digest, n) in enumerate(rows):
        pairs.keys.append(unordered_key(b"%d:" % n + prompt, better, worse) + digest[:8])
        pairs.directions.append(
            better < worse if better != worse else _is_first(pairs.columns, index)
        )


def _is_first(columns: dict[str, pa.Array], index: int) -> bool:
    first: str = columns["chosen"][index].as_py()
    second: str = columns["rejected"][index].as_py()
    return first < second


def _roots(firsts: pa.Array) -> list[bytes]:
    """Return the digests of the first user turns, which have no control characters."""
    joined = pc.binary_join_element_wise(firsts, _NOTHING, _SEPARATOR)
    folded = fold_many(_bytes_of(joined), len(firsts))
    assert folded is not None, "they were looked at with the whole prompts"
    sha256 = hashlib.sha256
    return [sha256(text).digest() for text in folded]


def _slices(texts: pa.Array) -> list[memoryview]:
    """Return the bytes of each text, where they are."""
    ends = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = memoryview(texts.buffers()[2] or b"")
    places = ends.tolist()
    return [data[start:end] for start, end in pairwise(places)]


def _bytes_of(texts: pa.Array) -> bytes:
    """Return all texts as they lie one after another."""
    ends = np.frombuffer(texts.buffers()[1], np.int64)
    data = texts.buffers()[2]
    start, end = int(ends[texts.offset]), int(ends[texts.offset + len(texts)])
    return data.slice(start, end - start).to_pybytes() if data is not None else b""
