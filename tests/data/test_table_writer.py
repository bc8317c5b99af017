"""Arrow tables to Parquet: row groups of a set size, and files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.schemas import TableWriter

SharedCases = Callable[[str], list[dict[str, Any]]]


def test_row_groups_have_the_set_size_whatever_the_tables(
    shared_cases: SharedCases, tmp_path: Path
) -> None:
    case = next(case for case in shared_cases("parquet") if case["id"] == "PQ-06")
    given, expected = case["input"], case["expected"]["row_group_rows"]
    schema = pa.schema([pa.field("id", pa.int64(), False)])
    whole = pa.table({"id": list(range(given["rows"]))}, schema=schema)
    contents = set()
    for rows_of in (given["write_calls_of"], 1000, 5000):
        path = tmp_path / f"{rows_of}.parquet"
        with TableWriter(path, schema, given["row_group_size"], sorted_by="id") as writer:
            for start in range(0, given["rows"], rows_of):
                writer.write(whole.slice(start, rows_of))
        meta = pq.ParquetFile(path).metadata
        assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == expected
        contents.add(path.read_bytes())
    # The pieces that the rows came in leave no trace.
    assert len(contents) == 1


def test_known_crash_while_writing_leaves_no_file(
    shared_cases: SharedCases, tmp_path: Path
) -> None:
    case = next(case for case in shared_cases("parquet") if case["id"] == "PQ-04")
    assert "raise before close" in case["input"]["plan"]
    schema = pa.schema([pa.field("id", pa.int64(), False)])
    groups = [pa.table({"id": [0, 1]}, schema=schema), pa.table({"id": [2, 3]}, schema=schema)]
    path = tmp_path / "rows.parquet"

    def write(crash: bool) -> None:
        with TableWriter(path, schema, 2, sorted_by="id") as writer:
            for group in groups:
                writer.write(group)
            if crash:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(crash=True)
    assert list(tmp_path.iterdir()) == []
    write(crash=False)
    assert pq.read_table(path)["id"].to_pylist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
