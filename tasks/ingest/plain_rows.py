"""Whole chunks of HH transcripts at a time: what nearly all rows of HH-RLHF are.

Arrow reads the lines, the turns of all rows are found in one pass over their bytes, and Arrow's
kernels cut and strip the texts; only hashing is done row by row. A row that is anything but two
transcripts with the same prompt, turns that alternate and two different answers is left to the
general parser, which would give the same for the others, too.
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
import pyarrow.json as pj

from tasks.data.hh import ANSWER, ID_DIGITS, QUESTION, ROLE_PARTS, fold_many, unordered_key
from tasks.data.schemas import MESSAGE_TYPE

_ROLES: Final = pa.array(["user", "assistant"], pa.string())
_PREFIXES: Final = pa.array([ROLE_PARTS["user"], ROLE_PARTS["assistant"]], pa.large_string())
_SEPARATOR: Final = pa.scalar("\x00", pa.large_string())
_NOTHING: Final = pa.scalar("", pa.large_string())
_COLON: Final = pa.scalar(":", pa.large_string())
_ID_HEAD: Final = pa.scalar(f"{ID_DIGITS}:", pa.large_string())
# Both hexadecimal digits of each byte, as one number.
_HEX: Final = np.frombuffer(bytes(range(256)).hex().encode(), "<u2")

_TWO: Final = pa.schema([("chosen", pa.large_string()), ("rejected", pa.large_string())])
_TWO_OPTIONS: Final = pj.ParseOptions(explicit_schema=_TWO, unexpected_field_behavior="error")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TwoColumns:
    """Lines that are two texts each.

    Args:
        line_ends: where the line breaks between the lines are.
    """

    chosen: pa.Array
    rejected: pa.Array
    line_ends: Array

    def line(self, text: bytes, number: int) -> bytes:
        """Return a line of the text that this was read from."""
        start = self.line_ends[number - 1] + 1 if number else 0
        end = self.line_ends[number] if number < len(self.line_ends) else len(text)
        return text[start:end].removesuffix(b"\n")


def two_columns(text: bytes) -> TwoColumns | None:
    """Return chosen and rejected of lines that all are these two texts and nothing else.

    None where a line may be anything else, if only a blank one.
    """
    data = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero(data == 10)
    between = breaks[:-1] if text.endswith(b"\n") else breaks
    # Arrow does not mind where lines end. Outside of strings such a row has one closing brace, so
    # that lines from brace to brace that are as many as the rows are one row each.
    braces = text.startswith(b"{") and text.endswith((b"}\n", b"}"))
    if not braces or (data[between - 1] != 0x7D).any() or (data[between + 1] != 0x7B).any():
        return None
    options = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        found = pj.read_json(pa.BufferReader(text), options, _TWO_OPTIONS)
        found.validate(full=True)
    except pa.ArrowException:
        return None
    chosen, rejected = (column.combine_chunks() for column in found.columns)
    if found.num_rows != len(between) + 1 or chosen.null_count or rejected.null_count:
        return None
    return TwoColumns(chosen, rejected, between)


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


def parse_plain(
    chosen: pa.Array, rejected: pa.Array, split_all: Callable[[list[str]], list[int]]
) -> PlainPairs | None:
    """Return the pairs of those rows that nothing is wrong with; None when there are none.

    Also None when there may be a control character in any of them.
    """
    if not len(chosen):
        return None
    texts = _fit_texts(chosen, rejected)
    firsts = texts.turns.take(pa.array(texts.starts[:-1]))
    folded = _folded(texts.head, texts.chosen, texts.rejected, firsts)
    if not folded:
        return None
    columns, codes = _columns(texts)
    prompt_ids = _hex_of(_digests(_prompt_texts(texts, codes)))
    digests = _digests(_pair_texts(texts, prompt_ids))
    keys, directions = _keys(folded, texts)
    sha256 = hashlib.sha256
    roots = _as_rows([sha256(text).digest() for text in folded[3::4]], np.uint8)
    group_ids = _hex_of(roots)
    columns |= {"pair_id": _hex_of(digests), "prompt_id": prompt_ids, "group_id": group_ids}
    exact, starts = digests.view("<u8")[:, :1], roots.view("<u8")[:, :2]
    splits = split_all(group_ids.to_pylist())
    return PlainPairs(texts.index, columns, np.hstack([keys, exact]), starts, directions, splits)


@dataclass(frozen=True)
class _Marks:
    """Where the speakers of a column of transcripts are named.

    Args:
        data: the texts one after another.
        ends: where each text starts and ends.
        start, end: of each mark, in the data.
        is_answer: whether the assistant speaks.
        row: which text the mark is in.
        n_of: marks in each text.
        first: number of the first mark of each text.
    """

    data: pa.Buffer
    ends: Array
    start: Array
    end: Array
    is_answer: Array
    row: Array
    n_of: Array
    first: Array

    def alternate(self) -> Array:
        """Return which texts are questions with one answer each, and nothing before."""
        fit: Array = (self.n_of > 0) & (self.n_of % 2 == 0)
        fit[self.row[self.is_answer != (self.rank() % 2 == 1)]] = False
        fit[fit] = self.start[self.first[fit]] == self.ends[:-1][fit]
        return fit

    def rank(self) -> Array:
        """Return the place of each mark in its text, from 0 on."""
        return np.arange(len(self.row)) - self.first[self.row]

    def around_the_last(self, rows: Array) -> tuple[pa.Array, pa.Array]:
        """Return what stands before and after the last mark of some texts."""
        last = (self.first + self.n_of - 1)[rows]
        places = np.stack([self.ends[rows], self.start[last], self.end[last], self.ends[rows + 1]])
        pieces = _pieces(self.data, np.append(places.T.ravel(), self.ends[-1]))
        index = np.arange(len(rows)) * 4
        return pieces.take(pa.array(index)), pieces.take(pa.array(index + 2))

    def after(self, marks: Array) -> pa.Array:
        """Return what stands between some marks and the next ones."""
        places = np.stack([self.start, self.end]).T.ravel()
        pieces = _pieces(self.data, np.append(places, self.ends[-1]))
        return pieces.take(pa.array(2 * np.flatnonzero(marks) + 1))


def _pieces(data: pa.Buffer, places: Array) -> pa.Array:
    """Return what lies between places that do not fall, where it is."""
    ends = pa.py_buffer(np.ascontiguousarray(places, dtype=np.int64))
    return pa.LargeStringArray.from_buffers(len(places) - 1, ends, data)


def _marks_of(column: pa.Array) -> _Marks:
    ends, buffer = _ends_of(column), column.buffers()[2] or pa.py_buffer(b"")
    data = np.frombuffer(buffer, np.uint8)
    breaks = np.flatnonzero(data == 10)
    breaks = breaks[:-1][np.diff(breaks) == 1]
    found = []
    for word in (QUESTION, ANSWER):
        at = breaks[breaks + len(word) <= len(data)]
        for offset, byte in enumerate(word.encode()[2:], start=2):
            at = at[data[at + offset] == byte]
        row = np.searchsorted(ends, at, side="right") - 1
        at, row = at[(row >= 0) & (row < len(column))], row[(row >= 0) & (row < len(column))]
        is_inside = at + len(word) <= ends[row + 1]
        found.append((at[is_inside], row[is_inside]))
    start, row = (np.concatenate(both) for both in zip(*found, strict=True))
    is_answer = np.arange(len(start)) >= len(found[0][0])
    order = np.argsort(start)
    start, row, is_answer = start[order], row[order], is_answer[order]
    end = start + np.where(is_answer, len(ANSWER), len(QUESTION))
    n_of = np.bincount(row, minlength=len(column))
    return _Marks(buffer, ends, start, end, is_answer, row, n_of, np.cumsum(n_of) - n_of)


def _answers_to(texts: pa.Array, rows: Array, heads: pa.Array) -> tuple[Array, pa.Array]:
    """Return which of some texts are these prompts with an answer each, and those answers."""
    ends = _ends_of(texts)
    start, stop = ends[rows], ends[rows + 1]
    head = np.minimum(start + np.diff(_ends_of(heads)), stop)
    mark = np.minimum(head + len(ANSWER), stop)
    places = np.append(np.stack([start, head, mark, stop]).T.ravel(), ends[-1])
    pieces, index = _pieces(texts.buffers()[2], places), 4 * np.arange(len(rows))
    tails = pieces.take(pa.array(index + 2))
    fit = _and(
        pc.equal(pieces.take(pa.array(index)), heads),
        pc.equal(pieces.take(pa.array(index + 1)), ANSWER),
        *(pc.invert(pc.match_substring(tails, word)) for word in (QUESTION, ANSWER)),
    )
    # Only where the prompt is the same does the answer start with a whole character.
    return fit, tails.filter(pa.array(fit))


def _fit_texts(chosen: pa.Array, rejected: pa.Array) -> _Texts:
    marks = _marks_of(chosen)
    fit = marks.alternate()
    rows = np.flatnonzero(fit)
    head, better = marks.around_the_last(rows)
    is_same, worse = _answers_to(rejected, rows, head)
    fit[rows], rows = is_same, rows[is_same]
    head, better = head.filter(pa.array(is_same)), better.filter(pa.array(is_same))
    better, worse = pc.utf8_trim_whitespace(better), pc.utf8_trim_whitespace(worse)
    to_end = marks.n_of[marks.row] - marks.rank()
    question = pc.utf8_trim_whitespace(marks.after(fit[marks.row] & (to_end == 2)))
    is_right = _and(
        *(pc.greater(pc.binary_length(text), 0) for text in (question, better, worse)),
        pc.not_equal(better, worse),
    )
    fit[rows] = is_right
    mask = pa.array(is_right)
    spoken = fit[marks.row] & (to_end > 1)
    turns = pc.utf8_trim_whitespace(marks.after(spoken))
    starts = np.concatenate([[0], np.cumsum(marks.n_of[fit] - 1)])
    kept = head.filter(mask), better.filter(mask), worse.filter(mask)
    return _Texts(rows[is_right], kept[0], kept[1], kept[2], turns, starts)


def _and(*conditions: pa.Array) -> Array:
    found: Array = np.logical_and.reduce([c.to_numpy(zero_copy_only=False) for c in conditions])
    return found


def _columns(texts: _Texts) -> tuple[dict[str, pa.Array], pa.Array]:
    """Return what is there before anything is hashed, and the role of each turn."""
    turns, starts, n_turns = texts.turns, texts.starts, np.diff(texts.starts)
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
    data = memoryview(texts.buffers()[2] or b"")
    sha256, places = hashlib.sha256, pairwise(_ends_of(texts).tolist())
    return _as_rows([sha256(data[start:end]).digest() for start, end in places], np.uint8)


def _as_rows(digests: list[bytes], kind: Any) -> Array:
    return np.frombuffer(b"".join(digests), kind).reshape(len(digests), -1)


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
    rows = zip(folded[::4], folded[1::4], folded[2::4], np.diff(texts.starts).tolist(), strict=True)
    for prompt, better, worse, n_turns in rows:
        directions.append(better < worse)
        if better == worse:
            alike.append(len(directions) - 1)
        found.append(unordered_key(b"%d:%b" % (n_turns, prompt), better, worse))
    for index in alike:
        directions[index] = texts.chosen[index].as_py() < texts.rejected[index].as_py()
    return _as_rows(found, "<u8"), np.array(directions)


def _ends_of(texts: pa.Array) -> Array:
    """Return where each text starts and ends in the bytes of all."""
    ends = np.frombuffer(texts.buffers()[1], np.int64)
    return ends[texts.offset : texts.offset + len(texts) + 1]


def _bytes_of(texts: pa.Array) -> bytes:
    """Return all texts as they lie one after another."""
    ends, data = _ends_of(texts), texts.buffers()[2]
    start, end = int(ends[0]), int(ends[-1])
    return data.slice(start, end - start).to_pybytes() if data is not None else b""
