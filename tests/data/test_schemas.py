"""Parquet: typed nulls, unknown columns, row groups, and files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.schemas import (
    PAIR_SCHEMA,
    QUARANTINE_SCHEMA,
    TableWriter,
    open_parquet,
    to_table,
    write_rows,
)
from tasks.errors import ArtifactError, DataError

SharedCases = Callable[[str], list[dict[str, Any]]]

SMALL = pa.schema([pa.field("id", pa.int64(), False), pa.field("reason", pa.string())])


@pytest.fixture
def cases(shared_cases: SharedCases) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in shared_cases("parquet")}


def test_column_that_starts_all_null_keeps_its_type(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    case = cases["PQ-01"]
    path = tmp_path / "rows.parquet"
    write_rows(path, [*case["input"]["batch0"], *case["input"]["batch1"]], SMALL, 1)
    table = pq.read_table(path)
    expected = case["expected"]
    assert {f.name: str(f.type) for f in table.schema} == expected["file_schema"]
    assert table.num_rows == expected["rows"]
    assert table.column("reason").to_pylist() == expected["reason"]


def test_column_outside_the_schema_is_refused_by_name(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["PQ-03"]["input"]
    with pytest.raises(DataError, match="'margin'"):
        to_table(case["batch"], pa.schema([(name, pa.int64()) for name in case["schema"]]))


def test_unknown_column_of_a_later_row_is_refused_too() -> None:
    with pytest.raises(DataError, match=r"Row 1 .*'margin'"):
        to_table([{"id": 1}, {"id": 2, "margin": 0.5}], SMALL)


def test_values_that_do_not_fit_are_refused_by_column() -> None:
    with pytest.raises(DataError, match="Row 1 has no value in column 'id'"):
        to_table([{"id": 1}, {"reason": "x"}], SMALL)
    with pytest.raises(DataError, match="'id' cannot hold"):
        to_table([{"id": "one"}], SMALL)
    with pytest.raises(DataError, match="'reason' cannot hold"):
        to_table([{"id": 1, "reason": "\ud800"}], SMALL)


def test_crash_leaves_the_previous_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"

    def rows(crash: bool) -> Iterator[dict[str, int]]:
        yield from ({"id": index} for index in range(4))
        if crash:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows(crash=True), SMALL, 2)
    assert list(tmp_path.iterdir()) == []
    write_rows(path, rows(crash=False), SMALL, 2)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows(crash=True), SMALL, 2)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]
    assert pq.read_table(path).column("id").to_pylist() == [0, 1, 2, 3]


def test_bad_row_in_the_last_group_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError):
        write_rows(path, [{"id": "text"}], SMALL, 10)
    assert list(tmp_path.iterdir()) == []


def test_row_groups_have_the_set_size_whatever_the_tables(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    given = cases["PQ-06"]["input"]
    n_rows, group_size = given["rows"], given["row_group_size"]
    whole = pa.table({"id": range(n_rows), "reason": [None] * n_rows}, schema=SMALL)
    contents = set()
    paths = [tmp_path / "rows.parquet"]
    write_rows(paths[0], whole.to_pylist(), SMALL, group_size)
    for rows_of in (given["write_calls_of"], 1000, 5000):
        paths.append(tmp_path / f"{rows_of}.parquet")
        with TableWriter(paths[-1], SMALL, group_size, sorted_by="id") as writer:
            for start in range(0, n_rows, rows_of):
                writer.write(whole.slice(start, rows_of))
        contents.add(paths[-1].read_bytes())
    # The pieces that the rows came in leave no trace.
    assert len(contents) == 1
    for path in paths:
        meta = pq.ParquetFile(path).metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        assert sizes == cases["PQ-06"]["expected"]["row_group_rows"]
        assert meta.row_group(0).column(0).compression == "ZSTD"
    order = pq.ParquetFile(paths[-1]).metadata.row_group(0).sorting_columns
    assert [column.column_index for column in order] == [0]


def test_known_crash_while_writing_leaves_no_file(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert "raise before close" in cases["PQ-04"]["input"]["plan"]
    groups = [pa.table({"id": ids, "reason": ["", ""]}, schema=SMALL) for ids in ([0, 1], [2, 3])]
    path = tmp_path / "rows.parquet"

    def write(crash: bool) -> None:
        with TableWriter(path, SMALL, 2, sorted_by="id") as writer:
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


def test_file_without_rows_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [], QUARANTINE_SCHEMA, 5)
    with open_parquet(path, QUARANTINE_SCHEMA) as file:
        assert file.metadata.num_rows == 0


def test_other_schema_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [], QUARANTINE_SCHEMA, 5)
    with pytest.raises(ArtifactError, match="quarantined_row"):
        open_parquet(path, PAIR_SCHEMA)
    newer = QUARANTINE_SCHEMA.with_metadata(
        {**QUARANTINE_SCHEMA.metadata, b"rlhf.schema_version": b"99"}
    )
    with pytest.raises(ArtifactError, match="99"):
        open_parquet(path, newer)
    fewer = QUARANTINE_SCHEMA.remove(1)
    with pytest.raises(ArtifactError, match="other columns"):
        open_parquet(path, fewer)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ArtifactError, match=r"rows\.parquet cannot be read"):
        open_parquet(path, QUARANTINE_SCHEMA)
