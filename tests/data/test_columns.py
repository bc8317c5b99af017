"""What is computed once and kept as Parquet columns comes back, or is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.columns import (
    CandidateChunk,
    TokenColumns,
    cached_scores,
    hash_responses,
    read_chunk,
    read_keyed,
    read_token_columns,
    write_chunk,
    write_keyed,
    write_token_columns,
)
from tasks.errors import ArtifactError


def test_a_file_is_read_by_its_own_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "000000.parquet"
    write_keyed(path, pa.table({"x": [1, 2]}), "one", {b"more": b"yes"})
    table, metadata = read_keyed(path, "one")
    assert table["x"].to_pylist() == [1, 2] and metadata[b"more"] == b"yes"
    with pytest.raises(ArtifactError):
        read_keyed(path, "two")


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


KEY = "a" * 64
COLUMNS = TokenColumns(
    [[1, 2], [3]],
    [[4, 5, 6], [7]],
    {
        "logprobs": [torch.tensor([-0.1, -2.5, -1e-8]), torch.tensor([-30.25])],
        "rewards": [torch.arange(3.0), torch.tensor([0.5])],
    },
)


def test_columns_come_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "columns.parquet"
    write_token_columns(file, COLUMNS, KEY)
    found = read_token_columns(file, KEY)
    assert (found.prompt_ids, found.response_ids) == (COLUMNS.prompt_ids, COLUMNS.response_ids)
    assert set(found.floats) == set(COLUMNS.floats)
    for name, rows in COLUMNS.floats.items():
        for row, other in zip(rows, found.floats[name], strict=True):
            assert row.shape == other.shape and torch.equal(row, other), name
    assert [path.name for path in file.parent.iterdir()] == ["columns.parquet"]


@given(
    rows=st.lists(
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_any_finite_or_infinite_number_comes_back(
    rows: list[list[float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("columns") / "numbers.parquet"
    ids = [list(range(len(row))) for row in rows]
    written = [torch.tensor(row) for row in rows]
    write_token_columns(file, TokenColumns([[1]] * len(rows), ids, {"x": written}), KEY)
    found = read_token_columns(file, KEY).floats["x"]
    assert [row.tolist() for row in found] == [row.tolist() for row in written]


def test_one_number_of_one_token_keeps_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "one.parquet"
    write_token_columns(file, TokenColumns([[1]], [[2]], {"x": [torch.tensor([0.5])]}), KEY)
    assert read_token_columns(file, KEY).floats["x"][0].shape == (1,)


def test_another_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "columns.parquet"
    write_token_columns(file, COLUMNS, KEY)
    with pytest.raises(ArtifactError) as caught:
        read_token_columns(file, "b" * 64)
    for part in (str(file), KEY, "b" * 64, "remove"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kept_bytes", [0, 3, 200])
def test_torn_file_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    file = tmp_path / "columns.parquet"
    write_token_columns(file, COLUMNS, KEY)
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ArtifactError, match=r"columns\.parquet is torn"):
        read_token_columns(file, KEY)


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "columns.parquet"
    write_token_columns(file, COLUMNS, KEY)
    before = file.read_bytes()
    broken = TokenColumns([[1]], [[2], [3]], {"x": [torch.tensor([0.5])]})
    with pytest.raises(ValueError, match="length"):
        write_token_columns(file, broken, KEY)
    assert file.read_bytes() == before
