"""Rows put aside between parsing and writing, as Arrow files, so that memory stays bounded."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from tasks.data.chunk_jobs import (
    Block,
    InputFile,
    LineReader,
    Payload,
    Rows,
    left_out_file,
    payload_file,
    raw_bytes,
)
from tasks.data.rows import Row
from tasks.data.schemas import MESSAGE_TYPE

_COMPRESSION: Final = "lz4"
_PLAIN: Final[tuple[tuple[str, pa.DataType], ...]] = (
    ("pair_id", pa.string()),
    ("prompt_id", pa.string()),
    ("group_id", pa.string()),
    ("subset", pa.string()),
    ("chosen", pa.large_string()),
    ("rejected", pa.large_string()),
    ("n_turns", pa.int32()),
    ("prompt_chars", pa.int32()),
    ("chosen_chars", pa.int32()),
    ("rejected_chars", pa.int32()),
    ("alternating", pa.bool_()),
)
_NUMBERS: Final = (
    "chosen_score",
    "rejected_score",
    "margin",
    "chosen_logprob",
    "rejected_logprob",
)
_TOKENS: Final = ("prompt_ids", "chosen_ids", "rejected_ids")
_FLAG_LIST: Final = pa.list_(pa.field("element", pa.string(), False))
_ID_LIST: Final = pa.list_(pa.field("element", pa.int32(), False))
RAW: Final = "raw"

Array = np.ndarray[Any, Any]


class LeftOut(NamedTuple):
    """A row that was left out, counted within its chunk."""

    position: int
    line: int
    reason: str
    detail: str
    raw: bytes


class PairBatch:
    """The pairs of a chunk, column by column."""

    def __init__(self) -> None:
        self._plain: list[tuple[Any, ...]] = []
        self._turns: list[int] = [0]
        self._roles: list[str] = []
        self._contents: list[str] = []
        self._extra: dict[int, Row] = {}
        self._tokens: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._plain)

    def add(self, plain: tuple[Any, ...], row: Row, tokens: Any) -> None:
        """Add a pair."""
        if row.flags or row.scores or row.logged or row.margin is not None:
            self._extra[len(self._plain)] = row
        if tokens is not None:
            self._tokens[len(self._plain)] = tokens
        self._plain.append(plain)
        self._roles += row.roles
        self._contents += row.contents
        self._turns.append(len(self._contents))

    def arrays(self) -> dict[str, pa.Array]:
        """Return the columns."""
        columns = zip(*self._plain, strict=True)
        found = {
            name: pa.array(values, kind)
            for (name, kind), values in zip(_PLAIN, columns, strict=True)
        }
        turns = pa.StructArray.from_arrays(
            [pa.array(self._roles, pa.string()), pa.array(self._contents, pa.large_string())],
            fields=list(MESSAGE_TYPE),
        )
        kind = pa.list_(pa.field("element", MESSAGE_TYPE, False))
        found["prompt"] = pa.ListArray.from_arrays(pa.array(self._turns, pa.int32()), turns, kind)
        found |= self._numbers() | self._token_arrays()
        found["flags"] = self._flags()
        return found

    def _numbers(self) -> dict[str, pa.Array]:
        n = len(self._plain)
        if not self._extra:
            return {name: pa.nulls(n, pa.float64()) for name in _NUMBERS}
        columns: dict[str, list[float | None]] = {name: [None] * n for name in _NUMBERS}
        for index, row in self._extra.items():
            values = (*(row.scores or (None, None)), row.margin, *(row.logged or (None, None)))
            for name, value in zip(_NUMBERS, values, strict=True):
                columns[name][index] = value
        return {name: pa.array(values, pa.float64()) for name, values in columns.items()}

    def _flags(self) -> pa.Array:
        n = len(self._plain)
        if not any(row.flags for row in self._extra.values()):
            offsets = pa.array(np.zeros(n + 1, np.int32))
            return pa.ListArray.from_arrays(offsets, pa.array([], pa.string()), _FLAG_LIST)
        flags: list[list[str]] = [[]] * n
        for index, row in self._extra.items():
            flags[index] = row.flags
        return pa.array(flags, _FLAG_LIST)

    def _token_arrays(self) -> dict[str, pa.Array]:
        n = len(self._plain)
        if not self._tokens:
            return {name: pa.nulls(n, _ID_LIST) for name in _TOKENS}
        rows = [self._tokens.get(index) for index in range(n)]
        return {
            name: pa.array([None if row is None else row[column] for row in rows], _ID_LIST)
            for column, name in enumerate(_TOKENS)
        }


def complete_columns(columns: Mapping[str, pa.Array], subset: str) -> dict[str, pa.Array]:
    """Return the columns of pairs without flags, numbers or token ids, with these as nulls."""
    n = len(columns["pair_id"])
    offsets = pa.array(np.zeros(n + 1, np.int32))
    flags = pa.ListArray.from_arrays(offsets, pa.array([], pa.string()), _FLAG_LIST)
    return {
        **columns,
        "subset": pa.repeat(pa.scalar(subset, pa.string()), n),
        "flags": flags,
        **{name: pa.nulls(n, pa.float64()) for name in _NUMBERS},
        **{name: pa.nulls(n, _ID_LIST) for name in _TOKENS},
    }


def write_pairs(
    path: Path, parts: Sequence[Mapping[str, pa.Array]], records: Array, order: Array
) -> None:
    """Put the pairs of a chunk aside with their positions, lines and splits, in order.

    Args:
        parts: columns of some of the pairs each.
        records: `KEY_RECORD` of each pair, in the order of the parts.
        order: the records by row.
    """
    columns = {
        "position": pa.array(records["row"].astype(np.int32)),
        "line": pa.array(records["line"].astype(np.int64)),
        "split_code": pa.array(records["split"].astype(np.int8)),
    }
    for name in sorted(parts[0]):
        columns[name] = pa.concat_arrays([part[name] for part in parts])
    if (np.diff(order) != 1).any():
        batch = pa.record_batch(list(columns.values()), names=list(columns))
        batch = batch.take(pa.array(order))
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    _write(path, columns)


def write_left_out(spill_dir: Path, index: int, rows: Sequence[LeftOut]) -> None:
    """Put the left-out rows of a chunk aside."""
    position, line, reason, detail, raw = zip(*rows, strict=True)
    columns = {
        "position": pa.array(position, pa.int32()),
        "line": pa.array(line, pa.int64()),
        "reason": pa.array(reason, pa.string()),
        "detail": pa.array([_printable(text) for text in detail], pa.string()),
        RAW: pa.array(raw, pa.large_binary()),
    }
    _write(left_out_file(spill_dir, index), columns)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _write(path: Path, columns: Mapping[str, pa.Array]) -> None:
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    # Not compressed: the files live for seconds, and packing them takes longer than writing them.
    options = ipc.IpcWriteOptions(use_threads=False)
    with ipc.new_file(str(path), batch.schema, options=options) as writer:
        writer.write_batch(batch)


def read_spill(path: Path) -> pa.Table:
    """Return what was put aside."""
    with pa.memory_map(str(path)) as mapped:
        options = ipc.IpcReadOptions(use_threads=False)
        return ipc.open_file(mapped, options=options).read_all()


def keep_payload(spill_dir: Path, index: int, payload: Payload) -> None:
    """Put the text of a chunk aside, unless the source can be read again from where it starts."""
    if isinstance(payload, Block | Rows):
        text = pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)
        packed = pa.compress(text, codec=_COMPRESSION, asbytes=True)
        head = len(text).to_bytes(8, "little")
        payload_file(spill_dir, index).write_bytes(head + packed)


def raw_rows(
    spill_dir: Path, index: int, file: InputFile, payload: Payload | None
) -> dict[int, bytes]:
    """Return the rows of a chunk as they were read, by position.

    Args:
        payload: where they are in the source; None when their text was put aside.
    """
    if payload is None:
        packed = payload_file(spill_dir, index).read_bytes()
        size = int.from_bytes(packed[:8], "little")
        payload = pickle.loads(pa.decompress(packed[8:], size, codec=_COMPRESSION, asbytes=True))
    rows = LineReader(file, payload).rows()
    return {position: raw_bytes(raw) for position, (_, raw) in enumerate(rows)}
