"""From what was put aside to the dataset's files: decisions applied, splits told apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tasks.data.hh import SPLITS
from tasks.data.quarantine import Action, QuarantineReason
from tasks.data.schemas import PAIR_SCHEMA, QUARANTINE_SCHEMA, TableWriter, to_table
from tasks.data.source import InputFile
from tasks.errors import DataError
from tasks.ingest.card import Summary
from tasks.ingest.chunks import (
    KEY_RECORD,
    RAW,
    RowGroup,
    Span,
    left_out_file,
    pairs_file,
    raw_rows,
    read_spill,
)

#
# Finds repeated pairs and leaks among any number of rows, with bounded memory.
#
# The keys of all rows are spread over files by hash, so that equal keys meet in one file; each file
# is sorted by itself. What was found lies in a sparse file with a place for every row.

_PARTITIONS: Final = 64
_BUFFER_BYTES: Final = 2**18
_DECISION: Final = np.dtype([("reason", "u1"), ("line", "<u8"), ("file", "<u4")])
_REASONS: Final = (
    None,
    QuarantineReason.DUPLICATE,
    QuarantineReason.NORMALIZED_DUPLICATE,
    QuarantineReason.LABEL_CONFLICT,
    QuarantineReason.LEAKED_FROM_OTHER_SPLIT,
)
_CODES: Final = {reason: code for code, reason in enumerate(_REASONS)}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was found about one row.

    Args:
        position: of the row among those asked for.
        other_file, other_line: the row that it repeats, contradicts or leaks from.
    """

    position: int
    reason: QuarantineReason
    other_file: int
    other_line: int


class KeyFiles:
    """Key records spread over files by the hash of one of their keys.

    Args:
        directory: where the files are made.
        name: which key: ``pair``, ``group`` or ``root``.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._low, self._high = f"{name}_low", f"{name}_high"
        self._paths = [directory / f"{name}-{part:02d}.keys" for part in range(_PARTITIONS)]
        self._pending: list[list[Array]] = [[] for _ in self._paths]
        self._pending_bytes = 0

    def add(self, records: Array) -> None:
        """Add records, in the order of their rows."""
        parts = records[self._high] % _PARTITIONS
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(_PARTITIONS), side="right")
        start = 0
        for part, end in enumerate(ends):
            if end > start:
                self._pending[part].append(records[order[start:end]])
            start = int(end)
        self._pending_bytes += records.nbytes
        if self._pending_bytes > _BUFFER_BYTES * 16:
            self._flush()

    def partitions(self) -> Iterator[Array]:
        """Yield the records of each file sorted by key, then by row."""
        self._flush()
        for path in self._paths:
            if path.is_file():
                records = np.fromfile(path, KEY_RECORD)
                yield records[np.lexsort((records["row"], records[self._low], records[self._high]))]

    def is_new_key(self, records: Array) -> Array:
        """Return for sorted records whether the key is another one than the row before has."""
        is_new = np.ones(len(records), bool)
        is_new[1:] = (records[self._low][1:] != records[self._low][:-1]) | (
            records[self._high][1:] != records[self._high][:-1]
        )
        return is_new

    def _flush(self) -> None:
        for path, pending in zip(self._paths, self._pending, strict=True):
            if pending:
                with path.open("ab") as handle:
                    np.concatenate(pending).tofile(handle)
                pending.clear()
        self._pending_bytes = 0


class DecisionFile:
    """A place on disk for what was found about each row; empty places take no room."""

    def __init__(self, path: Path, n_rows: int) -> None:
        self._path = path
        self.counts: dict[QuarantineReason, int] = {}
        with path.open("wb") as handle:
            handle.truncate(max(n_rows, 1) * _DECISION.itemsize)

    def write(self, rows: Array, reasons: Array, others: Array) -> None:
        """Note findings about rows; ``others`` are the records they were found by."""
        if not len(rows):
            return
        found = np.memmap(self._path, _DECISION, "r+")
        found["reason"][rows] = reasons
        found["line"][rows] = others["line"]
        found["file"][rows] = others["file"]
        found.flush()
        for code, count in zip(*np.unique(reasons, return_counts=True), strict=True):
            reason = _REASONS[int(code)]
            assert reason is not None
            self.counts[reason] = self.counts.get(reason, 0) + int(count)

    def read(self, first_row: int, n_rows: int) -> list[Decision]:
        """Return what was found about some rows, by their position from the first one on."""
        if not self.counts:
            return []
        offset = first_row * _DECISION.itemsize
        found = np.fromfile(self._path, _DECISION, n_rows, offset=offset)
        decisions = []
        for position in np.flatnonzero(found["reason"]):
            entry = found[position]
            reason = _REASONS[int(entry["reason"])]
            assert reason is not None
            place = int(entry["file"]), int(entry["line"])
            decisions.append(Decision(int(position), reason, *place))
        return decisions

    def has(self, rows: Array) -> Array:
        """Return which of these rows something was found about."""
        if not self.counts or not len(rows):
            return np.zeros(len(rows), bool)
        flagged: Array = np.memmap(self._path, _DECISION, "r")["reason"][rows] != 0
        return flagged


def find_repeated(keys: KeyFiles, found: DecisionFile, leaks: DecisionFile | None) -> None:
    """Note duplicates (all but the first row) and pairs that are there with both labels.

    Rows that ``leaks`` leaves out already do not count.
    """
    for records in keys.partitions():
        kept = records if leaks is None else records[~leaks.has(records["row"])]
        _find_repeated_in(keys, kept, found)


def _find_repeated_in(keys: KeyFiles, records: Array, found: DecisionFile) -> None:
    if len(records) < 2:
        return
    is_new = keys.is_new_key(records)
    if is_new.all():
        return
    # Within a key the rows of one label first, each label's rows in their order.
    key_number = np.cumsum(is_new)
    order = np.lexsort((records["row"], records["direction"], key_number))
    records, key_number = records[order], key_number[order]
    is_first = np.ones(len(records), bool)
    is_first[1:] = (key_number[1:] != key_number[:-1]) | (
        records["direction"][1:] != records["direction"][:-1]
    )
    firsts = np.flatnonzero(is_first)
    first_of = firsts[np.cumsum(is_first) - 1]
    again = np.flatnonzero(~is_first)
    same_text = records["exact"][again] == records["exact"][first_of[again]]
    codes = np.where(
        same_text,
        _CODES[QuarantineReason.DUPLICATE],
        _CODES[QuarantineReason.NORMALIZED_DUPLICATE],
    )
    found.write(records["row"][again], codes, records[first_of[again]])
    # All rows of a pair that is there with both labels, their repeats too: which is right is open.
    both = np.flatnonzero(key_number[firsts][1:] == key_number[firsts][:-1])
    opposite = np.full(len(firsts), -1)
    opposite[both], opposite[both + 1] = both + 1, both
    other = opposite[np.cumsum(is_first) - 1]
    open_rows = np.flatnonzero(other >= 0)
    conflict = np.full(len(open_rows), _CODES[QuarantineReason.LABEL_CONFLICT])
    found.write(records["row"][open_rows], conflict, records[firsts[other[open_rows]]])


def find_leaks(keys: KeyFiles, found: DecisionFile) -> None:
    """Note rows whose group a more held-out split has, too; test is more so than validation."""
    for records in keys.partitions():
        is_new = keys.is_new_key(records)
        starts = np.flatnonzero(is_new)
        held_out = np.maximum.reduceat(records["split"], starts) if len(starts) else starts
        number = np.cumsum(is_new) - 1
        leaked = np.flatnonzero(records["split"] < held_out[number])
        if not len(leaked):
            continue
        is_holder = records["split"] == held_out[number]
        holders = np.flatnonzero(is_holder)
        first_holder = np.full(len(starts), -1)
        first_holder[number[holders][::-1]] = holders[::-1]
        codes = np.full(len(leaked), _CODES[QuarantineReason.LEAKED_FROM_OTHER_SPLIT])
        found.write(records["row"][leaked], codes, records[first_holder[number[leaked]]])


def count_shared(keys: KeyFiles, leaks: DecisionFile | None) -> int:
    """Return how many validation and test rows have a key that train has, too.

    Rows that ``leaks`` leaves out do not count.
    """
    total = 0
    for every in keys.partitions():
        records = every if leaks is None else every[~leaks.has(every["row"])]
        is_new = keys.is_new_key(records)
        starts = np.flatnonzero(is_new)
        if len(starts):
            in_train = np.minimum.reduceat(records["split"], starts) == 0
            total += int(np.sum((records["split"] > 0) & in_train[np.cumsum(is_new) - 1]))
    return total


_READ_AHEAD: Final = 3
_WRITE_BEHIND: Final = 4
_READERS: Final = 2

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk belongs.

    Args:
        first_row: rows of all sources before it.
        line_base: what is added to the line numbers in the chunk.
        payload: where its rows can be read again; None when their text was put aside.
    """

    index: int
    file_index: int
    first_row: int
    line_base: int
    n_rows: int
    n_pairs: int
    n_left_out: int
    payload: Span | RowGroup | None = None


class _Background:
    """Calls in another thread, a few of them waiting; what they raise comes out here."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: deque[Future[None]] = deque()

    def call(self, function: Callable[[pa.Table], None], table: pa.Table) -> None:
        """Call a function of a table when the calls before are done."""
        self._waiting.append(self._pool.submit(function, table))
        while len(self._waiting) > _WRITE_BEHIND:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Wait for all calls."""
        while self._waiting:
            self._waiting.popleft().result()


@dataclass
class Prepared:
    """A chunk that is ready to be written."""

    pairs: dict[str, pa.Table] = field(default_factory=dict)
    left_out: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Assembly:
    """Everything that is known after parsing.

    Args:
        schema: of the pairs; with token columns where they were asked for.
        found: files of decisions, the weightiest first.
    """

    files: Sequence[InputFile]
    places: Sequence[Place]
    spill_dir: Path
    actions: Mapping[str, Action]
    found: Sequence[DecisionFile]
    rows_per_group: int
    schema: pa.Schema = PAIR_SCHEMA

    def write(self, directory: Path, summary: Summary) -> Iterator[int]:
        """Write all files; yield after each chunk how many rows are done.

        Raises:
            DataError: a row of a reason that must not be there.
        """
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(
                    TableWriter(
                        directory / f"{name}.parquet",
                        self.schema,
                        self.rows_per_group,
                        sorted_by="row_number",
                    )
                )
                for name in SPLITS
            }
            quarantine = stack.enter_context(
                TableWriter(
                    directory / "quarantine.parquet",
                    QUARANTINE_SCHEMA,
                    self.rows_per_group,
                    sorted_by="row_number",
                )
            )
            # Each file is written by a thread of its own, while this one counts and others read.
            threads = {
                writer: _Background(stack.enter_context(ThreadPoolExecutor(1)))
                for writer in (*writers.values(), quarantine)
            }
            for place, chunk in zip(self.places, self._prepared(), strict=True):
                for name, pairs in chunk.pairs.items():
                    threads[writers[name]].call(writers[name].write, pairs)
                    summary.add_pairs(name, pairs)
                if chunk.left_out:
                    table = to_table(chunk.left_out, QUARANTINE_SCHEMA)
                    threads[quarantine].call(quarantine.write, table)
                for entry in chunk.left_out:
                    summary.add_left_out(entry)
                yield place.first_row + place.n_rows
            for thread in threads.values():
                thread.finish()

    def _prepared(self) -> Iterator[Prepared]:
        """Yield the chunks in order, a few of them read ahead by threads."""
        with ThreadPoolExecutor(_READERS) as pool:
            waiting: deque[Future[Prepared]] = deque()
            for place in self.places:
                waiting.append(pool.submit(self.prepare, place))
                if len(waiting) > _READ_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def prepare(self, place: Place) -> Prepared:
        """Read a chunk's rows and apply the decisions about them."""
        chunk = Prepared(left_out=self._left_out_when_parsed(place))
        if place.n_pairs:
            self._add_pairs(place, chunk)
        chunk.left_out.sort(key=lambda entry: int(entry["row_number"]))
        return chunk

    def _left_out_when_parsed(self, place: Place) -> list[Entry]:
        if not place.n_left_out:
            return []
        rows = read_spill(left_out_file(self.spill_dir, place.index)).to_pylist()
        return [self._entry(place, row, row[RAW]) for row in rows]

    def _entry(self, place: Place, row: Mapping[str, Any], raw: bytes) -> Entry:
        file = self.files[place.file_index]
        text = raw.decode("utf-8", "backslashreplace")
        is_text = text.encode() == raw
        return {
            "reason": row["reason"],
            "detail": row["detail"],
            "source": file.source,
            "subset": row.get("subset") or file.subset,
            "source_file": file.label,
            "source_line": row["line"] + place.line_base,
            "row_number": row["position"] + place.first_row + 1,
            "raw": text,
            "raw_bytes": None if is_text else raw,
        }

    def _add_pairs(self, place: Place, chunk: Prepared) -> None:
        table = read_spill(pairs_file(self.spill_dir, place.index))
        dropped, flagged = self._decide(place)
        if dropped or flagged:
            index_of = {p: i for i, p in enumerate(table["position"].to_pylist())}
            table = _with_flags(table, {index_of[p]: names for p, names in flagged.items()})
            if dropped:
                found = {index_of[position]: row for position, row in dropped.items()}
                chunk.left_out += self._dropped_entries(place, table, found)
                mask = np.ones(table.num_rows, bool)
                mask[list(found)] = False
                table = table.filter(pa.array(mask))
        codes = table["split_code"].to_numpy()
        for code, name in enumerate(SPLITS):
            mask = codes == code
            if mask.any():
                part = table if mask.all() else table.filter(pa.array(mask))
                chunk.pairs[name] = self._finished(place, part, name)

    def _decide(self, place: Place) -> tuple[dict[int, Decision], dict[int, list[str]]]:
        """Return what is dropped, by position, and which flags the others get."""
        dropped: dict[int, Decision] = {}
        flagged: dict[int, list[str]] = {}
        for decision in (d for f in self.found for d in f.read(place.first_row, place.n_rows)):
            action = self.actions[decision.reason.value]
            if action == "keep":
                flagged.setdefault(decision.position, []).append(decision.reason.value)
            else:
                dropped.setdefault(decision.position, decision)
        return dropped, {p: names for p, names in flagged.items() if p not in dropped}

    def _dropped_entries(
        self, place: Place, table: pa.Table, found: Mapping[int, Decision]
    ) -> list[Entry]:
        file = self.files[place.file_index]
        raw = raw_rows(self.spill_dir, place.index, file, place.payload)
        places = table.select(["position", "line", "subset"])
        entries = []
        for index, decision in found.items():
            row = {name: places[name][index].as_py() for name in places.column_names}
            row |= {"reason": decision.reason.value, "detail": self._detail(place, decision)}
            entry = self._entry(place, row, raw[decision.position])
            if self.actions[decision.reason.value] == "fail":
                raise must_not_be(file, entry["source_line"], row)
            entries.append(entry)
        return entries

    def _detail(self, place: Place, decision: Decision) -> str:
        line = f"line {decision.other_line}"
        if decision.other_file != place.file_index:
            line = f"{self.files[decision.other_file].label}, {line}"
        return f"{line} {_SAYS[decision.reason]}"

    def _finished(self, place: Place, table: pa.Table, split: str) -> pa.Table:
        file, n = self.files[place.file_index], table.num_rows
        lines = table["line"].to_numpy() + place.line_base
        numbers = table["position"].to_numpy().astype(np.int64) + place.first_row + 1
        added = {
            "split": pa.repeat(pa.scalar(split), n),
            "source": pa.repeat(pa.scalar(file.source), n),
            "source_file": pa.repeat(pa.scalar(file.label), n),
            "source_line": pa.array(lines, pa.int64()),
            "row_number": pa.array(numbers, pa.int64()),
        }
        columns = [added[n] if n in added else table[n] for n in self.schema.names]
        return pa.Table.from_arrays(columns, schema=self.schema)


_SAYS: Final = {
    QuarantineReason.DUPLICATE: "has the same pair",
    QuarantineReason.NORMALIZED_DUPLICATE: "has the same pair but for case and white space",
    QuarantineReason.LABEL_CONFLICT: "has the same pair with the opposite label",
    QuarantineReason.LEAKED_FROM_OTHER_SPLIT: "of a more held-out split begins the same",
}


def _with_flags(table: pa.Table, flagged: Mapping[int, Sequence[str]]) -> pa.Table:
    if not flagged:
        return table
    index = table.schema.get_field_index("flags")
    flags = table["flags"].to_pylist()
    for row, names in flagged.items():
        flags[row] = [*flags[row], *names]
    column = pa.array(flags, table.schema.field(index).type)
    return table.set_column(index, table.schema.field(index), column)


def must_not_be(file: InputFile, line: int, row: Mapping[str, Any]) -> DataError:
    """Return the error of a row whose reason is set to fail."""
    return DataError(
        f"{file.path}, line {line}: {row['reason']}, {row['detail']}",
        f"no such row (ingest.reasons.{row['reason']} is fail)",
        "correct the row, or set the reason to drop",
    )
