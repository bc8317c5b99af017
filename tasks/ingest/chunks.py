"""What one unit of parsing is: a part of a source, the options, and what comes back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from tasks.data.quarantine import Action
from tasks.data.schemas import MESSAGE_TYPE
from tasks.data.source import MAX_LINE_BYTES, InputFile
from tasks.errors import DataError
from tasks.ingest.rows import Row

_BATCH_ROWS: Final = 1024
_BOM: Final = b"\xef\xbb\xbf"

# One record per pair that was parsed; what duplicates and leaks are found by.
KEY_RECORD: Final = np.dtype(
    [
        ("pair_low", "<u8"),
        ("pair_high", "<u8"),
        ("exact", "<u8"),
        ("group_low", "<u8"),
        ("group_high", "<u8"),
        ("root_low", "<u8"),
        ("root_high", "<u8"),
        ("row", "<u8"),
        ("line", "<u8"),
        ("file", "<u4"),
        ("direction", "u1"),
        ("split", "u1"),
    ]
)


@dataclass(frozen=True)
class ParseOptions:
    """What decides how a row is parsed; the same for all rows of a run."""

    actions: Mapping[str, Action]
    seed: int = 0
    validation_share: float = 0.1
    test_share: float = 0.1
    group_by: str = "conversation"
    assign: str = "hash"
    normalize: bool = True
    max_prompt_chars: int | None = None
    max_response_chars: int | None = None
    tokenizer_dir: str | None = None
    rendering: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of a plain file that start in these bytes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines."""

    text: bytes
    is_first: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with their 1-based line numbers."""

    rows: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one row group of a Parquet file.

    Args:
        offset: rows of the group to skip.
        n_rows: rows to take.
        first_number: number of the first row taken, counted from 1 in the file.
    """

    index: int
    offset: int
    n_rows: int
    first_number: int


Payload = Span | Block | Rows | RowGroup


@dataclass(frozen=True, slots=True)
class ParseJob:
    """One chunk: its place in the order of all chunks, its file, and where its rows are.

    Args:
        bytes_read: how far into its file the source is after this chunk, as on disk.
    """

    index: int
    file_index: int
    file: InputFile
    payload: Payload
    spill_dir: Path
    bytes_read: int


@dataclass(slots=True)
class ChunkResult:
    """What parsing one chunk gave; pairs and left-out rows lie in spill files.

    Args:
        n_lines: lines of the chunk, blank ones included; 0 where rows carry their own numbers.
        records: `KEY_RECORD` of each pair, rows and lines counted from the start of the chunk.
        failure: reason, detail and line of the first row that must not be there.
        payload: where the rows can be read again; None when their text was put aside.
    """

    index: int
    file_index: int
    n_lines: int
    n_rows: int
    n_pairs: int
    n_left_out: int
    bytes_read: int
    records: np.ndarray[Any, Any]
    failure: tuple[str, str, int] | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    payload: Span | RowGroup | None = None


def pairs_file(spill_dir: Path, index: int) -> Path:
    """Return where the pairs of a chunk are put aside."""
    return spill_dir / f"{index:07d}.pairs.arrow"


def left_out_file(spill_dir: Path, index: int) -> Path:
    """Return where the left-out rows of a chunk are put aside."""
    return spill_dir / f"{index:07d}.left-out.arrow"


def payload_file(spill_dir: Path, index: int) -> Path:
    """Return where the text of a chunk is put aside that cannot be read again."""
    return spill_dir / f"{index:07d}.payload"


class LineReader:
    """The rows of a payload with their line numbers, from 0 on within the chunk, or absolute."""

    def __init__(self, file: InputFile, payload: Payload) -> None:
        self.n_lines = 0
        self._file = file
        self._payload = payload
        self._text: bytes | None = None

    def text(self) -> bytes | None:
        """Return whole lines as they are, without a byte order mark; None of other payloads."""
        if self._text is None:
            match self._payload:
                case Block(text, is_first):
                    self._text = text.removeprefix(_BOM) if is_first else text
                case Span(start, end):
                    text = _read_span(self._file.path, start, end)
                    self._text = text.removeprefix(_BOM) if start == 0 else text
        return self._text

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (line, row); a row is bytes, or a mapping from a Parquet file."""
        match self._payload:
            case Rows(rows):
                yield from rows
            case RowGroup():
                yield from enumerate(
                    _read_group(self._file.path, self._payload), self._payload.first_number
                )
            case _:
                yield from self._lines(self.text() or b"")

    def _lines(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        lines = text.split(b"\n")
        self.n_lines = len(lines) - (not lines[-1])
        for number, line in enumerate(lines):
            if line and not line.isspace():
                yield number, line


def _read_group(path: str, group: RowGroup) -> Iterator[dict[str, Any]]:
    # Workers that read lines start faster without it.
    import pyarrow.parquet as pq

    done, end = 0, group.offset + group.n_rows
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group.index], use_threads=False):
            start = max(group.offset - done, 0)
            if start < batch.num_rows and done < end:
                yield from batch.slice(start, min(end - done, batch.num_rows) - start).to_pylist()
            done += batch.num_rows
            if done >= end:
                return


def _read_span(path: str, start: int, end: int) -> bytes:
    with open(path, "rb") as handle:
        if start:
            # A line that starts before the span belongs to the one before, however long it is.
            handle.seek(start - 1)
            start += len(handle.readline(MAX_LINE_BYTES + 1)) - 1
        if start >= end:
            return b""
        text = handle.read(end - start)
        if not text.endswith(b"\n"):
            text += handle.readline(MAX_LINE_BYTES + 1)
    longest = max(map(len, text.split(b"\n"))) if len(text) > MAX_LINE_BYTES else 0
    if longest > MAX_LINE_BYTES:
        raise too_long_line(path, f"after byte {start}")
    return text


def too_long_line(path: str, where: str) -> DataError:
    """Return the error of a line that is no row any more."""
    return DataError(
        f"{path}, {where} is a line longer than {MAX_LINE_BYTES // 2**20} MiB",
        "one JSON object per line",
        "give a .jsonl or .jsonl.gz file with one JSON object per line",
    )


def raw_bytes(raw: Any) -> bytes:
    """Return a row as it was read, without its line end; rows of a table as JSON."""
    if isinstance(raw, bytes):
        return raw.removesuffix(b"\r")
    return json.dumps(raw, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")


# Rows put aside between parsing and writing, as Arrow files, so that memory stays bounded.

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
