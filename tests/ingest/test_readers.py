"""The written Parquet in one pass by pyarrow, datasets, pandas and DuckDB: all see the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from tasks.artifacts import PreferenceDataset
from tasks.data.hh import SPLITS

Ingest = Callable[..., PreferenceDataset]
H, A = "\n\nHuman: ", "\n\nAssistant: "


@pytest.fixture
def dataset(ingest: Ingest, tmp_path: Path) -> PreferenceDataset:
    """Turns, flags, scores, and nulls where there may be any, over several row groups."""
    rows: list[dict[str, Any]] = []
    for n in range(90):
        head = f"{H}question {n} \u2028 “é” 😀{A}so?{H}yes{A}"
        rows.append({"chosen": f"{head}good{n}", "rejected": f"{head}bad\x07" if n % 9 else head})
        if n % 3 == 0:
            rows[-1] |= {"score_chosen": n + 0.5, "score_rejected": -1.0, "chosen_logprob": -2.5}
            rows[-1] |= {"rejected_logprob": -0.125}
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ingest(path, rows_per_group=7)


def _as_plain(value: Any) -> Any:
    """Return lists, dicts and None for what a reader makes of them."""
    if isinstance(value, dict):
        return {key: _as_plain(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):
        return _as_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_plain(entry) for entry in value]
    return None if value is None or value != value else value


def _by_pandas(path: Path) -> list[dict[str, Any]]:
    return [_as_plain(row) for row in pd.read_parquet(path).to_dict("records")]


def _by_datasets(path: Path, cache: Path) -> list[dict[str, Any]]:
    loaded = load_dataset("parquet", data_files=str(path), cache_dir=str(cache))["train"]
    return [_as_plain(row) for row in loaded]


def _by_duckdb(path: Path) -> list[dict[str, Any]]:
    found = duckdb.connect().execute("SELECT * FROM read_parquet(?)", [str(path)])
    names = [column[0] for column in found.description]
    return [_as_plain(dict(zip(names, row, strict=True))) for row in found.fetchall()]


@pytest.mark.parametrize("name", [*SPLITS, "quarantine"])
def test_all_readers_see_the_same_rows(
    dataset: PreferenceDataset, name: str, tmp_path: Path
) -> None:
    path = dataset.path / f"{name}.parquet"
    right = pq.read_table(path).to_pylist()
    # 10 responses are empty, one in nine; 80 pairs are kept.
    assert len(right) == dataset.manifest.counts["quarantined" if name == "quarantine" else name]
    assert [row["row_number"] for row in right] == sorted(row["row_number"] for row in right)
    assert _by_pandas(path) == right
    assert _by_datasets(path, tmp_path / "cache") == right
    assert _by_duckdb(path) == right


def test_order_and_packing_are_recorded(dataset: PreferenceDataset) -> None:
    meta = pq.ParquetFile(dataset.split_path("train")).metadata
    group = meta.row_group(0)
    assert {meta.row_group(i).num_rows for i in range(meta.num_row_groups - 1)} == {7}
    order = [group.column(i).path_in_schema for i in range(group.num_columns)]
    assert order[group.sorting_columns[0].column_index] == "row_number"
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_duckdb_asks_across_splits(dataset: PreferenceDataset) -> None:
    files = [str(dataset.split_path(split)) for split in SPLITS]
    query = """
        SELECT split, count(*), min(len(prompt)), max(prompt[1].role), sum(chosen_score)
        FROM read_parquet(?) GROUP BY split
    """
    found = {row[0]: row[1:] for row in duckdb.connect().execute(query, [files]).fetchall()}
    assert {split: row[0] for split, row in found.items()} == {
        split: dataset.manifest.counts[split] for split in SPLITS
    }
    assert {row[1:3] for row in found.values()} == {(3, "user")}
    # Scored are 0, 3, ... 87 with n + 0.5, of which 0, 9, ... 81 have an empty response:
    # 3 (0 + ... + 29) - 9 (0 + ... + 9) + 0.5 * (30 - 10) = 1305 - 405 + 10.
    assert sum(row[3] for row in found.values()) == 910
