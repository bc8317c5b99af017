"""Parquet schemas of the preference data, and how tables are written and opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.artifacts import appearing
from tasks.errors import ArtifactError, DataError

SCHEMA_VERSION: Final = 2
PAIR_SCHEMA_VERSION: Final = 3
_RENDERER_KEY: Final = b"rlhf.renderer"
_NAME_KEY: Final = b"rlhf.schema"
_VERSION_KEY: Final = b"rlhf.schema_version"


def make_schema(
    name: str, fields: Sequence[tuple[str, pa.DataType, bool]], version: int = SCHEMA_VERSION
) -> pa.Schema:
    """Return a named schema of a version; a field is name, type, and whether it may be null."""
    metadata = {_NAME_KEY: name.encode(), _VERSION_KEY: str(version).encode()}
    return pa.schema([pa.field(*field) for field in fields], metadata=metadata)


MESSAGE_TYPE: Final = pa.struct(
    [pa.field("role", pa.string(), False), pa.field("content", pa.large_string(), False)]
)

_FLAGS: Final = pa.list_(pa.field("element", pa.string(), False))
_TOKEN_IDS: Final = pa.list_(pa.field("element", pa.int32(), False))

PAIR_SCHEMA: Final = make_schema(
    "preference_pair",
    [
        ("pair_id", pa.string(), False),
        ("prompt_id", pa.string(), False),
        ("group_id", pa.string(), False),
        ("split", pa.string(), False),
        ("source", pa.string(), False),
        ("subset", pa.string(), False),
        ("prompt", pa.list_(pa.field("element", MESSAGE_TYPE, False)), False),
        ("chosen", pa.large_string(), False),
        ("rejected", pa.large_string(), False),
        ("n_turns", pa.int32(), False),
        ("prompt_chars", pa.int32(), False),
        ("chosen_chars", pa.int32(), False),
        ("rejected_chars", pa.int32(), False),
        ("alternating", pa.bool_(), False),
        ("flags", _FLAGS, False),
        ("chosen_score", pa.float64(), True),
        ("rejected_score", pa.float64(), True),
        ("margin", pa.float64(), True),
        ("chosen_logprob", pa.float64(), True),
        ("rejected_logprob", pa.float64(), True),
        ("source_file", pa.string(), False),
        ("source_line", pa.int64(), False),
        ("row_number", pa.int64(), False),
    ],
    PAIR_SCHEMA_VERSION,
)

TOKEN_FIELDS: Final = tuple(
    pa.field(name, _TOKEN_IDS, True) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
)

QUARANTINE_SCHEMA: Final = make_schema(
    "quarantined_row",
    [
        ("reason", pa.string(), False),
        ("detail", pa.string(), True),
        ("source", pa.string(), False),
        ("subset", pa.string(), False),
        ("source_file", pa.string(), False),
        ("source_line", pa.int64(), False),
        ("row_number", pa.int64(), False),
        ("raw", pa.large_string(), False),
        ("raw_bytes", pa.large_binary(), True),
    ],
    PAIR_SCHEMA_VERSION,
)


def with_tokens(renderer_fingerprint: str) -> pa.Schema:
    """Return the schema of pairs that also have their token ids, by this renderer."""
    schema = pa.schema([*PAIR_SCHEMA, *TOKEN_FIELDS], metadata=PAIR_SCHEMA.metadata)
    metadata = {**PAIR_SCHEMA.metadata, _RENDERER_KEY: renderer_fingerprint.encode()}
    return schema.with_metadata(metadata)


def renderer_of(schema: pa.Schema) -> str | None:
    """Return the fingerprint of the renderer of a file's token ids, or None when it has none."""
    found = (schema.metadata or {}).get(_RENDERER_KEY)
    return found.decode() if found is not None else None


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Build a table of exactly this schema; an optional column that is all None keeps its type.

    Raises:
        DataError: a row has a column that the schema lacks, lacks one that may not be null, or
            holds a value of another type.
    """
    known = set(schema.names)
    for index, row in enumerate(rows):
        unknown = sorted(set(row) - known)
        if unknown:
            raise DataError(
                f"Row {index} has column {', '.join(map(repr, unknown))}, which the schema lacks",
                f"only {schema.names}",
                "add the column to the schema and raise its version, or leave it out of the row",
            )
    arrays = [_to_array([row.get(field.name) for row in rows], field) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _to_array(values: list[Any], field: pa.Field) -> pa.Array:
    if not field.nullable and None in values:
        raise DataError(
            f"Row {values.index(None)} has no value in column {field.name!r}",
            "a value in every row",
            "fill the column or declare it nullable",
        )
    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"Column {field.name!r} cannot hold a value: {error}",
            f"values of type {field.type}",
            "correct the value",
        ) from error


def write_rows(
    path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema, rows_per_group: int
) -> None:
    """Write rows to Parquet, so many a row group; the file appears only when complete.

    Raises:
        DataError: a row does not fit the schema.
    """
    left = iter(rows)
    with (
        appearing(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        while group := list(islice(left, rows_per_group)):
            writer.write_table(to_table(group, schema), row_group_size=rows_per_group)


def open_parquet(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Open a Parquet file that must have this schema.

    Raises:
        ArtifactError: the file is torn, or has another schema or schema version.
    """
    fix = "run the stage that wrote it again"
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "a Parquet file", fix) from error
    found = file.schema_arrow
    expected = _identity(schema)
    if _identity(found) != expected:
        raise ArtifactError(f"{path} has schema {_identity(found)}", str(expected), fix)
    bare = pa.schema([f for f in found if f not in TOKEN_FIELDS]) if renderer_of(found) else found
    if not bare.equals(schema, check_metadata=False):
        changed = sorted(set(map(str, found)) ^ set(map(str, schema)))
        raise ArtifactError(f"{path} has other columns: {changed}", f"schema {expected}", fix)
    return file


def _identity(schema: pa.Schema) -> tuple[str, str]:
    metadata = schema.metadata or {}
    return metadata.get(_NAME_KEY, b"unknown").decode(), metadata.get(_VERSION_KEY, b"0").decode()


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
    """Writes tables of any size in row groups of a set size; the file appears only when complete.

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
        self._stack = ExitStack()

    def __enter__(self) -> TableWriter:
        names = self._schema.names
        self._writer = self._stack.enter_context(
            pq.ParquetWriter(
                self._stack.enter_context(appearing(self.path)),
                self._schema,
                compression="zstd",
                use_dictionary=[n for n in _REPEATED if n.split(".")[0] in names],
                write_statistics=[n for n in names if n not in _BARE and n != "prompt"],
                sorting_columns=self._order,
                write_page_index=False,
            )
        )
        self._stack.push(self._flush_rest)
        return self

    def write(self, table: pa.Table) -> None:
        """Add rows, which must be of the schema and in order."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        while self._pending_rows >= self._rows_per_group:
            self._flush(self._rows_per_group)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _flush_rest(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._pending_rows:
            self._flush(self._pending_rows)

    def _flush(self, n_rows: int) -> None:
        # One piece per row group: pages must not depend on the pieces that the rows came in.
        table = pa.concat_tables(self._pending)
        group = table.slice(0, n_rows).combine_chunks()
        rest = table.slice(n_rows)
        self._writer.write_table(group, row_group_size=n_rows)
        self._pending = [rest] if rest.num_rows else []
        self._pending_rows = rest.num_rows
