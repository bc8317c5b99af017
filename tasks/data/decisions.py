"""Finds repeated pairs and leaks among any number of rows, with bounded memory.

The keys of all rows are spread over files by hash, so that equal keys meet in one file; each file
is sorted by itself. What was found lies in a sparse file with a place for every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tasks.data.chunk_jobs import KEY_RECORD
from tasks.quarantine import QuarantineReason

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
