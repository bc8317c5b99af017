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

from tasks.data.chunk_jobs import InputFile, RowGroup, Span, left_out_file, pairs_file
from tasks.data.decisions import Decision, DecisionFile
from tasks.data.keys import SPLITS
from tasks.data.schemas import PAIR_SCHEMA, QUARANTINE_SCHEMA, to_table
from tasks.data.spill import RAW, raw_rows, read_spill
from tasks.data.summary import Summary
from tasks.data.table_writer import TableWriter
from tasks.errors import DataError
from tasks.quarantine import Action, QuarantineReason

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
