"""Preference pairs on disk: splits, rows, reading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from tasks.artifacts import PreferenceDataset
from tasks.data.hh import SPLITS, Message, Pair, split_of
from tasks.data.schemas import PAIR_SCHEMA, open_parquet
from tasks.errors import ConfigError

__all__ = [
    "SPLITS",
    "fold_of",
    "iter_pairs",
    "pair_to_row",
    "read_pairs",
    "row_to_pair",
    "split_of",
]


def fold_of(prompt_id: str, n_folds: int) -> int:
    """Return the fold of a prompt, from 0 to n_folds - 1; all pairs of a prompt share it."""
    return int(hashlib.sha256(prompt_id.encode()).hexdigest(), 16) % n_folds


def pair_to_row(pair: Pair, split: str) -> dict[str, Any]:
    """Return the Parquet row of a pair that is a group of its own."""
    return {
        "pair_id": pair.pair_id,
        "prompt_id": pair.prompt_id,
        "group_id": pair.prompt_id,
        "split": split,
        "source": pair.subset,
        "subset": pair.subset,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in pair.prompt],
        "chosen": pair.chosen,
        "rejected": pair.rejected,
        "n_turns": pair.n_turns,
        "prompt_chars": sum(len(turn.content) for turn in pair.prompt),
        "chosen_chars": len(pair.chosen),
        "rejected_chars": len(pair.rejected),
        "alternating": pair.alternating,
        "flags": list(pair.flags),
        "chosen_logprob": pair.logged[0] if pair.logged else None,
        "rejected_logprob": pair.logged[1] if pair.logged else None,
        "margin": pair.margin,
        "source_file": pair.source_file,
        "source_line": pair.source_line,
        "row_number": pair.source_line,
    }


def row_to_pair(row: dict[str, Any]) -> Pair:
    """Return the pair of a Parquet row."""
    return Pair(
        pair_id=row["pair_id"],
        prompt_id=row["prompt_id"],
        subset=row["subset"],
        prompt=tuple(Message(turn["role"], turn["content"]) for turn in row["prompt"]),
        chosen=row["chosen"],
        rejected=row["rejected"],
        source_file=row["source_file"],
        source_line=row["source_line"],
        logged=_logged_of(row),
        margin=row["margin"],
        flags=tuple(row["flags"]),
    )


def _logged_of(row: dict[str, Any]) -> tuple[float, float] | None:
    chosen, rejected = row["chosen_logprob"], row["rejected_logprob"]
    return None if chosen is None or rejected is None else (chosen, rejected)


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
                yield row_to_pair(row)


def read_pairs(dataset: PreferenceDataset, split: str) -> list[Pair]:
    """Return all pairs of a split in source order; errors as in `iter_pairs`."""
    return list(iter_pairs(dataset, split))
