"""Numbers per response token, computed once and kept as Parquet columns."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tasks.errors import ArtifactError

_KEY_FIELD = b"rlhf.key"
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
    ).replace_schema_metadata(
        {_KEY_FIELD: key.encode(), _MATRICES_FIELD: ",".join(_matrices(columns)).encode()}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    pq.write_table(table, temporary, compression="zstd")
    temporary.rename(path)


def read_token_columns(path: Path, key: str) -> TokenColumns:
    """Read columns that `write_token_columns` wrote.

    Raises:
        ArtifactError: the file is torn, or was made from another model, dataset or setting.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(
            f"{path} is torn: {error}", "a complete Parquet file", f"remove {path}"
        ) from error
    metadata = table.schema.metadata or {}
    found = metadata.get(_KEY_FIELD, b"").decode()
    if found != key:
        raise ArtifactError(f"{path} belongs to {found or 'nothing known'}", key, f"remove {path}")
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
