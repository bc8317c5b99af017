"""Numbers per response token, computed once and kept as Parquet columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import torch

from tasks.data.keyed_parquet import read_keyed, write_keyed

# Names of the (T, K) columns: with K = 1 the number of values does not tell them from (T,).
_MATRICES_FIELD = b"rlhf.matrices"


@dataclass(frozen=True)
class TokenColumns:
    """Ragged columns of N responses.

    Args:
        prompt_ids: N lists of token ids.
        response_ids: N lists of token ids, T_i each.
        floats: name to N fp32 tensors of shape (T_i,) or (T_i, K).
        integers: name to N int64 tensors of shape (T_i, K).
    """

    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    floats: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    integers: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def write_token_columns(path: Path, columns: TokenColumns, key: str) -> None:
    """Write the columns; the file appears only when complete.

    Args:
        path: final path.
        columns: what to write.
        key: identity of everything the numbers depend on; compared when they are read.
    """
    ids = pa.list_(pa.int32())
    table = pa.table(
        {
            "prompt_ids": pa.array([list(row) for row in columns.prompt_ids], ids),
            "response_ids": pa.array([list(row) for row in columns.response_ids], ids),
            **{n: _array(rows, pa.float32()) for n, rows in columns.floats.items()},
            **{n: _array(rows, pa.int32()) for n, rows in columns.integers.items()},
        }
    )
    write_keyed(path, table, key, {_MATRICES_FIELD: ",".join(_matrices(columns)).encode()})


def read_token_columns(path: Path, key: str) -> TokenColumns:
    """Read columns that `write_token_columns` wrote.

    Raises:
        ArtifactError: the file is torn, or was made from another model, dataset or setting.
    """
    table, metadata = read_keyed(path, key)
    lengths = [len(row) for row in table["response_ids"].to_pylist()]
    matrices = metadata.get(_MATRICES_FIELD, b"").decode().split(",")
    floats: dict[str, list[torch.Tensor]] = {}
    integers: dict[str, list[torch.Tensor]] = {}
    for name in table.column_names:
        if name in ("prompt_ids", "response_ids"):
            continue
        target = floats if table.schema.field(name).type.value_type == pa.float32() else integers
        target[name] = _tensors(table[name], lengths, name in matrices)
    return TokenColumns(
        table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), floats, integers
    )


def _matrices(columns: TokenColumns) -> list[str]:
    both = {**columns.floats, **columns.integers}
    return [name for name, rows in both.items() if rows and rows[0].dim() == 2]


def _array(rows: Sequence[torch.Tensor], kind: pa.DataType) -> pa.Array:
    return pa.array([row.flatten().tolist() for row in rows], pa.list_(kind))


def _tensors(
    column: pa.ChunkedArray, lengths: Sequence[int], is_matrix: bool
) -> list[torch.Tensor]:
    """Give each row its shape back: (T, K) in a matrix column, else (T,)."""
    values = [torch.tensor(row) for row in column.to_pylist()]
    return [
        row.view(length, -1) if is_matrix or len(row) != length else row
        for row, length in zip(values, lengths, strict=True)
    ]
