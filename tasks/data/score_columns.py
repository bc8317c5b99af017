"""Scores of responses, computed once and kept as Parquet columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from tasks.data.keyed_parquet import read_keyed, write_keyed


def hash_responses(responses: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Return a hash of prompts and responses, both as token ids, in their order."""
    digest = hashlib.sha256()
    for prompt_ids, response_ids in responses:
        digest.update(f"{list(prompt_ids)}{list(response_ids)}".encode())
    return digest.hexdigest()


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
    key = hashlib.sha256("|".join(identity).encode()).hexdigest()
    file = directory / f"{key[:16]}.parquet"
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
