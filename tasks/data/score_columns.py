"""Scores of responses, computed once and kept as Parquet columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from tasks.data.keyed_parquet import keyed_file, read_keyed, write_keyed


def cached_scores(
    directory: Path, identity: Sequence[str], compute: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the scores of N responses from their Parquet columns, computing them once.

    Args:
        directory: of such files.
        identity: fingerprints of everything that the numbers depend on.
        compute: called when the file is not there; name to (K, N) fp32 scores by the K members of
            a component.

    Raises:
        ArtifactError: the file is torn.
    """
    file, key = keyed_file(directory, identity)
    if not file.exists():
        columns = {
            f"{name}.{member}": pa.array(scores.numpy(), pa.float32())
            for name, members in compute().items()
            for member, scores in enumerate(members.to(torch.float32))
        }
        write_keyed(file, pa.table(columns), key, {})
    table, _ = read_keyed(file, key)
    found: dict[str, list[Tensor]] = {}
    for column in table.column_names:
        values = torch.from_numpy(table[column].to_numpy().copy())
        found.setdefault(column.rpartition(".")[0], []).append(values)
    return {name: torch.stack(members) for name, members in found.items()}
