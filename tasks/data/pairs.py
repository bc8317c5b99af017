"""Reads the preference pairs of an ingested dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from tasks.artifacts import PreferenceDataset
from tasks.data.hh import SPLITS, Message, Pair
from tasks.data.schemas import PAIR_SCHEMA, open_parquet
from tasks.errors import ConfigError


def fold_of(prompt_id: str, n_folds: int) -> int:
    """Return the fold of a prompt, from 0 to n_folds - 1; all pairs of a prompt share it."""
    return int(hashlib.sha256(prompt_id.encode()).hexdigest(), 16) % n_folds


_PAIR_COLUMNS: Final = [
    "pair_id",
    "prompt_id",
    "subset",
    "prompt",
    "chosen",
    "rejected",
    "chosen_logprob",
    "rejected_logprob",
    "margin",
    "flags",
    "source_file",
    "source_line",
]


def iter_pairs(dataset: PreferenceDataset, split: str) -> Iterator[Pair]:
    """Yield the pairs of a split in source order, one row group in memory at a time.

    Raises:
        ConfigError: no such split.
        ArtifactError: the file is torn or of another schema version.
    """
    if split not in SPLITS:
        raise ConfigError(f"Unknown split {split!r}", f"one of {SPLITS}", "name one of them")
    file = open_parquet(dataset.split_path(split), PAIR_SCHEMA)
    with file:
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group, columns=_PAIR_COLUMNS).to_pylist():
                yield _pair_of(row)


def _pair_of(row: dict[str, Any]) -> Pair:
    logged = (row.pop("chosen_logprob"), row.pop("rejected_logprob"))
    prompt = tuple(Message(turn["role"], turn["content"]) for turn in row.pop("prompt"))
    flags = tuple(row.pop("flags"))
    return Pair(prompt=prompt, flags=flags, logged=None if None in logged else logged, **row)


def read_pairs(dataset: PreferenceDataset, split: str) -> list[Pair]:
    """Return all pairs of a split in source order; errors as in `iter_pairs`."""
    return list(iter_pairs(dataset, split))
