"""Writes Arrow tables to Parquet in row groups of a set size, whatever the size of the tables."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.schemas import publish_file

# Text hardly repeats: a dictionary of it is built in vain, and its minimum says nothing.
_REPEATED: Final = (
    "split",
    "source",
    "subset",
    "source_file",
    "reason",
    "prompt.list.element.role",
    "flags.list.element",
)
_BARE: Final = ("chosen", "rejected", "raw", "raw_bytes", "detail")


class TableWriter:
    """A Parquet file that appears under its name only when it is complete.

    Args:
        path: final path.
        schema: exact schema of the file.
        rows_per_group: rows of every row group but the last.
        sorted_by: column that the rows are sorted by; recorded in the file.
    """

    def __init__(self, path: Path, schema: pa.Schema, rows_per_group: int, sorted_by: str) -> None:
        self.path = path
        self.rows = 0
        self._schema = schema
        self._rows_per_group = rows_per_group
        # A list of messages is several columns of the file: the field's place is not the column's.
        self._order = pq.SortingColumn.from_ordering(schema, [(sorted_by, "ascending")])
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> TableWriter:
        names = self._schema.names
        self._writer = pq.ParquetWriter(
            self._temporary,
            self._schema,
            compression="zstd",
            use_dictionary=[n for n in _REPEATED if n.split(".")[0] in names],
            write_statistics=[n for n in names if n not in _BARE and n != "prompt"],
            sorting_columns=self._order,
            write_page_index=False,
        )
        return self

    def write(self, table: pa.Table) -> None:
        """Add rows, which must be of the schema and in order."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        while self._pending_rows >= self._rows_per_group:
            self._flush(self._rows_per_group)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._pending_rows:
                self._flush(self._pending_rows)
            self._close()
            if kind is None:
                publish_file(self._temporary, self.path)
        finally:
            self._close()
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _flush(self, n_rows: int) -> None:
        assert self._writer is not None, "a writer is used inside its with block"
        # One piece per row group: pages must not depend on the pieces that the rows came in.
        table = pa.concat_tables(self._pending)
        group = table.slice(0, n_rows).combine_chunks()
        rest = table.slice(n_rows)
        self._writer.write_table(group, row_group_size=n_rows)
        self._pending = [rest] if rest.num_rows else []
        self._pending_rows = rest.num_rows
