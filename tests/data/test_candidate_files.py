"""Chunks of sampled responses on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.data.columns import CandidateChunk, read_chunk, write_chunk
from tasks.errors import ArtifactError


def test_chunks_come_back_as_they_were(tmp_path: Path) -> None:
    chunk = CandidateChunk(
        [3, 3], [[5, 1], [7]], ["a", "ü"], [torch.tensor([-0.1, -2.0]), torch.tensor([-30.0])],
        {"kept": 2}, 0.1 + 0.2, 1e-17,
    )  # fmt: skip
    file = tmp_path / "new" / "chunk.parquet"
    write_chunk(file, chunk, "key")
    found = read_chunk(file, "key")
    assert [v.tolist() for v in found.logprobs] == [v.tolist() for v in chunk.logprobs]
    assert (found.prompts, found.response_ids, found.texts) == ([3, 3], [[5, 1], [7]], ["a", "ü"])
    assert (found.counts, found.temperature, found.kl) == ({"kept": 2}, 0.1 + 0.2, 1e-17)
    assert [path.name for path in file.parent.iterdir()] == ["chunk.parquet"]
    with pytest.raises(ArtifactError, match="belongs to key"):
        read_chunk(file, "other")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="torn"):
        read_chunk(file, "key")
