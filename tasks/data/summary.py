"""What an ingested dataset holds, counted while it is written; memory stays bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.data.keys import SPLITS
from tasks.quarantine import REASONS

LENGTH_COLUMNS: Final = {
    "prompt": "prompt_chars",
    "chosen": "chosen_chars",
    "rejected": "rejected_chars",
}
_EXAMPLE_CHARS: Final = 240
_NAMED_LINES: Final = 20
_PARTITIONS: Final = 16
_SMALL: Final = 2**14
_PENDING_ROWS: Final = 2**18

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Example:
    """The first row that was left out for a reason."""

    source_file: str
    source_line: int
    detail: str
    raw: str
    is_cut: bool


class DistinctCounter:
    """Counts distinct ids of any number, which lie on disk meanwhile."""

    def __init__(self, directory: Path, name: str) -> None:
        self._paths = [directory / f"{name}-{part:02d}.ids" for part in range(_PARTITIONS)]
        self._pending: list[Array] = []

    def add(self, ids: pa.ChunkedArray) -> None:
        """Add ids, each of at least 16 hexadecimal digits of a hash."""
        for chunk in ids.chunks:
            if len(chunk):
                heads = pc.binary_slice(chunk.cast(pa.binary()), 0, 16).cast(pa.binary(16))
                raw = np.frombuffer(heads.buffers()[1], "u1").reshape(-1, 16)
                self._pending.append(_from_hex(raw[heads.offset : heads.offset + len(heads)]))
        if sum(map(len, self._pending)) > _PENDING_ROWS:
            self._flush()

    def count(self) -> int:
        """Return how many distinct ids there were."""
        if not any(path.is_file() for path in self._paths):
            return len(np.unique(np.concatenate(self._pending))) if self._pending else 0
        self._flush()
        found = (np.fromfile(path, "<u8") for path in self._paths if path.is_file())
        return sum(len(np.unique(ids)) for ids in found)

    def _flush(self) -> None:
        if not self._pending:
            return
        ids = np.concatenate(self._pending)
        part = ids % _PARTITIONS
        for number, path in enumerate(self._paths):
            with path.open("ab") as handle:
                ids[part == number].tofile(handle)
        self._pending.clear()


def _from_hex(digits: Array) -> Array:
    """Return the numbers that rows of 16 lower-case hexadecimal digits are."""
    values = (digits & 15) + 9 * (digits >> 6)
    pairs = values[:, ::2] << 4 | values[:, 1::2]
    numbers: Array = np.ascontiguousarray(pairs).view("<u8")[:, 0]
    return numbers


@dataclass
class Summary:
    """Counts of a dataset.

    Args:
        reasons: left-out rows by reason.
        flags: kept rows by what they were kept in spite of.
        kept_of, left_out_of: rows by (source, subset).
        lengths: for prompt, chosen and rejected: pairs by their characters.
        margins: pairs by characters of chosen minus rejected, in bins of 100.
        shared_rows: validation and test rows whose conversation begins like one of train.
    """

    directory: Path
    splits: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    kept_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    split_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    examples: dict[str, Example] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    longer_points: float = 0.0
    not_alternating: int = 0
    shared_rows: int = 0
    has_many_files: bool = False

    def __post_init__(self) -> None:
        self._prompts = {name: DistinctCounter(self.directory, name) for name in SPLITS}
        self.lengths = {name: Counter() for name in LENGTH_COLUMNS}

    @property
    def kept(self) -> int:
        """Rows kept."""
        return sum(self.splits.values())

    @property
    def left_out(self) -> int:
        """Rows left out."""
        return sum(self.reasons.values())

    @property
    def rows(self) -> int:
        """All rows."""
        return self.kept + self.left_out

    @property
    def longer_wins_share(self) -> float:
        """Share of pairs whose chosen response has more characters; a tie counts half."""
        return self.longer_points / self.kept if self.kept else 0.0

    @property
    def duplicate_share(self) -> float:
        """Share of all rows that repeat an earlier one."""
        repeated = self.reasons["duplicate"] + self.reasons["normalized_duplicate"]
        repeated += self.flags["duplicate"] + self.flags["normalized_duplicate"]
        return repeated / self.rows if self.rows else 0.0

    def prompts(self) -> dict[str, int]:
        """Return the distinct prompts of each split."""
        return {name: counter.count() for name, counter in self._prompts.items()}

    def add_pairs(self, split: str, pairs: pa.Table) -> None:
        """Count pairs of one split and one source."""
        self.splits[split] += pairs.num_rows
        self._prompts[split].add(pairs["prompt_id"])
        chosen, rejected = (pairs[f"{side}_chars"].to_numpy() for side in ("chosen", "rejected"))
        self.longer_points += float((0.5 + 0.5 * np.sign(chosen - rejected)).sum())
        self.not_alternating += pairs.num_rows - int(pc.sum(pairs["alternating"]).as_py() or 0)
        for name, column in LENGTH_COLUMNS.items():
            _count_into(self.lengths[name], pairs[column].to_numpy())
        flags = pc.list_flatten(pairs["flags"])
        self.flags.update(flags.to_pylist())
        self._add_places(split, pairs)

    def _add_places(self, split: str, pairs: pa.Table) -> None:
        source = pairs["source"][0].as_py()
        for entry in pc.value_counts(pairs["subset"]).to_pylist():
            subset, count = entry["values"], entry["counts"]
            self.kept_of[source, subset] += count
            self.split_of[subset, split] += count

    def add_left_out(self, entry: dict[str, Any]) -> None:
        """Count one row that was left out."""
        reason, raw = entry["reason"], entry["raw"]
        self.reasons[reason] += 1
        self.left_out_of[entry["source"], entry["subset"]] += 1
        named = self.lines.setdefault(reason, [])
        if len(named) < _NAMED_LINES:
            line = str(entry["source_line"])
            named.append(f"{entry['source_file']}:{line}" if self.has_many_files else line)
        if reason not in self.examples:
            self.examples[reason] = Example(
                entry["source_file"],
                entry["source_line"],
                entry["detail"],
                raw[:_EXAMPLE_CHARS],
                len(raw) > _EXAMPLE_CHARS,
            )

    def name_left_out(self) -> str:
        """Return how many rows were left out and, by reason, their lines."""
        parts = []
        for reason, lines in sorted(self.lines.items()):
            more = self.reasons[reason] - len(lines)
            ending = f" and {more} more" if more else ""
            parts.append(f"{reason} (lines {', '.join(lines)}{ending})")
        return f"{self.left_out} rows left out: {'; '.join(parts)}"

    def counts(self) -> dict[str, int]:
        """Return the counts for the manifest."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "quarantined": self.left_out,
            **{f"quarantined_{reason}": self.reasons[reason] for reason in REASONS},
            **{f"flagged_{name}": count for name, count in sorted(self.flags.items())},
            **{name: self.splits[name] for name in SPLITS},
            "held_out_sharing_a_first_turn_with_train": self.shared_rows,
        }


def _count_into(counter: Counter[int], values: Array) -> None:
    if len(values) and values.max() < _SMALL:
        # Faster than sorting, but with a place for every number.
        counts = np.bincount(values)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        counter[value] += count


def quantile(counts: Counter[int], q: float) -> int:
    r"""Return the value at rank $\max(1, \lceil q n \rceil)$ of $n$ counted values."""
    scaled = q * sum(counts.values())
    rank = max(int(scaled) + (scaled > int(scaled)), 1)
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    return 0
