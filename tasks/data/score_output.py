"""Scored rows on disk: JSON Lines or Parquet, the original fields as they were, whole or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.score_files import ERROR_FIELD, FileRow, ScoreFile
from tasks.errors import ConfigError, DataError, MissingInputError
from tasks.whole_file import appearing

JSONL: Final = ".jsonl"
PARQUET: Final = ".parquet"
_READ_SUFFIXES: Final = (".jsonl.gz", ".json.gz", ".jsonl", ".json", ".gz", ".parquet")

Added = Mapping[str, float | str | None]


def default_output(path: Path) -> Path:
    """Return ``pairs.scored.jsonl`` for ``pairs.jsonl``, ``.jsonl.gz`` and ``.parquet``."""
    for suffix in _READ_SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name.removesuffix(suffix) + ".scored" + JSONL)
    return path.with_name(path.name + ".scored" + JSONL)


def check_output(output: Path, source: Path) -> None:
    """Refuse an output that cannot be written, before any work.

    Raises:
        ConfigError: another suffix, a directory, or the input itself.
        MissingInputError: its directory is not there.
    """
    if output.suffix not in (JSONL, PARQUET):
        raise ConfigError(
            f"--output {output} has the suffix {output.suffix!r}", ".jsonl or .parquet", "rename it"
        )
    if output.is_dir() or output.resolve() == source.resolve():
        what = "is a directory" if output.is_dir() else "is the input"
        raise ConfigError(f"--output {output} {what}", "another file", "choose another name")
    if not output.parent.is_dir():
        raise MissingInputError(
            f"--output: no directory {output.parent}", "an existing directory", "create it"
        )


def write_scored(output: Path, file: ScoreFile, scored: Iterable[tuple[FileRow, Added]]) -> None:
    """Write every row with its scores; the file appears when all are there.

    JSON Lines are written as the rows come; for Parquet they are held in memory.

    Args:
        scored: rows of the file in order with what scoring adds, made as they are taken.

    Raises:
        DataError: a field that the output format cannot hold, found before the first row is scored.
    """
    if output.suffix == PARQUET:
        table = _original_table(file)
        added = [extra for _, extra in scored]
        with appearing(output) as temporary:
            pq.write_table(_with_columns(table, added), temporary, compression="zstd")
        return
    if file.schema is not None:
        _check_json_columns(file.schema)
    with appearing(output) as temporary, temporary.open("wb") as handle:
        for row, extra in scored:
            handle.write(_json_line({**row.fields, **extra}))


def _json_line(row: Mapping[str, Any]) -> bytes:
    # A NaN or an unpaired surrogate of the source is kept: escapes carry what UTF-8 cannot.
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def _check_json_columns(schema: pa.Schema) -> None:
    for field in schema:
        if not _is_json_type(field.type):
            raise DataError(
                f"Column {field.name!r} is of type {field.type}, which JSON cannot hold",
                "numbers, text, lists and structures of them",
                "give an --output that ends in .parquet",
            )


def _is_json_type(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json_type(kind.field(index).type) for index in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    checks = ("integer", "floating", "boolean", "string", "large_string", "null")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in checks)


def _original_table(file: ScoreFile) -> pa.Table:
    """Return the source as a table; of JSON Lines the types are inferred from all rows."""
    if file.schema is not None:
        return pq.read_table(file.path)
    rows = [row.fields for row in file.rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _inferred(name, [row.get(name) for row in rows]) for name in names})


def _inferred(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"Field {name!r} cannot become a Parquet column: {error}",
            "values of one type in all rows",
            "give an --output that ends in .jsonl",
        ) from error


def _with_columns(table: pa.Table, added: list[Added]) -> pa.Table:
    names = dict.fromkeys(name for row in added for name in row)
    for name in names:
        kind = pa.string() if name == ERROR_FIELD else pa.float64()
        table = table.append_column(name, pa.array([row.get(name) for row in added], type=kind))
    return table
