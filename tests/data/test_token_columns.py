"""Columns of numbers per response token: what is written comes back, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.columns import TokenColumns, read_token_columns, write_token_columns
from tasks.errors import ArtifactError

KEY = "a" * 64
COLUMNS = TokenColumns(
    [[1, 2], [3]],
    [[4, 5, 6], [7]],
    {
        "logprobs": [torch.tensor([-0.1, -2.5, -1e-8]), torch.tensor([-30.25])],
        "teacher_logprobs": [torch.arange(6.0).view(3, 2), torch.tensor([[0.5, 0.25]])],
    },
    {"teacher_ids": [torch.arange(6).view(3, 2), torch.tensor([[9, 131071]])]},
)


def test_columns_come_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "columns.parquet"
    write_token_columns(file, COLUMNS, KEY)
    found = read_token_columns(file, KEY)
    assert (found.prompt_ids, found.response_ids) == (COLUMNS.prompt_ids, COLUMNS.response_ids)
    for kind in ("floats", "integers"):
        expected, read = getattr(COLUMNS, kind), getattr(found, kind)
        assert set(read) == set(expected)
        for name, rows in expected.items():
            for row, other in zip(rows, read[name], strict=True):
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


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_one_teacher_token_per_position_keeps_its_shape(tmp_path: Path, n_tokens: int) -> None:
    file = tmp_path / "top1.parquet"
    top = torch.full((n_tokens, 1), -0.5)
    write_token_columns(file, TokenColumns([[1]], [[2] * n_tokens], {"x": [top]}), KEY)
    assert read_token_columns(file, KEY).floats["x"][0].shape == (n_tokens, 1)


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
