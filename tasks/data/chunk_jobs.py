"""What one unit of parsing is: a part of a source, the options, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tasks.data.source import MAX_LINE_BYTES
from tasks.errors import DataError
from tasks.quarantine import Action

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


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source, or one data set of the hub.

    Args:
        path: where it is; the id of a hub data set.
        label: how the rows name it.
        source: name of the source that it belongs to.
        subset: part of the corpus, unless a row says so itself.
        form: row format, or ``auto``.
        subset_column: field of a row that names its subset.
        weight: share of the source's groups that is taken.
        split: the split that the file is, where its name says so.
        hub: keyword arguments of ``datasets.load_dataset``; None for a file.
    """

    path: str
    label: str
    source: str
    subset: str
    form: str = "auto"
    subset_column: str | None = None
    weight: float = 1.0
    split: str | None = None
    hub: Mapping[str, Any] | None = None


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
