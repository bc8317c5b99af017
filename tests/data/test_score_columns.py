"""Scores kept as Parquet columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.data.columns import cached_scores, hash_responses
from tasks.errors import ArtifactError

SCORES = {
    "preference": torch.tensor([[0.1, -2.5, float(2**-30)], [1.0, 2.0, 3.0]]),
    # A name with a dot, and one member.
    "help.ful": torch.tensor([[7.0, 8.0, 9.0]]),
}


def test_computed_once_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    asked: list[str] = []

    def compute() -> dict[str, torch.Tensor]:
        asked.append("x")
        return SCORES

    for _ in range(2):
        found = cached_scores(tmp_path / "scores", ["model", "rows"], compute)
        assert list(found) == list(SCORES)
        for name, values in SCORES.items():
            assert torch.equal(found[name], values) and found[name].dtype == torch.float32
    assert len(asked) == 1
    cached_scores(tmp_path / "scores", ["model", "other rows"], compute)
    assert len(asked) == 2


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    cached_scores(tmp_path, ["model"], lambda: SCORES)
    (file,) = tmp_path.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ArtifactError, match=f"{file.name} is torn.*remove"):
        cached_scores(tmp_path, ["model"], lambda: SCORES)


def test_a_hash_knows_where_prompt_and_response_end() -> None:
    rows = [([1, 2], [3]), ([1], [2, 3]), ([12], [3]), ([1, 2], [])]
    hashes = {hash_responses([prompt], [response]) for prompt, response in rows}
    prompts, responses = zip(*rows[:2], strict=True)
    assert len(hashes | {hash_responses(prompts, responses)}) == 5
    assert hash_responses(prompts, responses) != hash_responses(prompts[::-1], responses[::-1])
