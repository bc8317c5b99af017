"""Files that say what they were computed from."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from tasks.data.columns import read_keyed, write_keyed
from tasks.errors import ArtifactError


def test_a_file_is_read_by_its_own_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "000000.parquet"
    write_keyed(path, pa.table({"x": [1, 2]}), "one", {b"more": b"yes"})
    table, metadata = read_keyed(path, "one")
    assert table["x"].to_pylist() == [1, 2] and metadata[b"more"] == b"yes"
    with pytest.raises(ArtifactError):
        read_keyed(path, "two")


def test_what_a_killed_run_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "000000.parquet"
    old, new, other = (
        tmp_path / f".tmp-{name}.parquet" for name in ("a-000000", "b-000000", "c-000001")
    )
    for file in (old, new, other):
        file.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    for file in (old, other):
        os.utime(file, (two_hours_ago, two_hours_ago))
    write_keyed(path, pa.table({"x": [1]}), "one", {})
    assert sorted(tmp_path.iterdir()) == sorted([path, new, other])
