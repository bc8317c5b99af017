"""Files that say what they were computed from."""

from __future__ import annotations

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
