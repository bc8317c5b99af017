"""Repeated pairs and leaks, against a plain count in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.quarantine import QuarantineReason
from tasks.ingest.chunks import KEY_RECORD
from tasks.ingest.dataset import DecisionFile, KeyFiles, count_shared, find_leaks, find_repeated

# Key, label, exact text.
pairs = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 1)), max_size=25)
places = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=25)


def records_of(columns: dict[str, list[Any]]) -> np.ndarray[Any, Any]:
    n = len(next(iter(columns.values())))
    records = np.zeros(n, KEY_RECORD)
    for name, values in columns.items():
        records[name] = values
    records["row"], records["line"] = np.arange(n), np.arange(n) + 1
    return records


def found_in(rows: np.ndarray[Any, Any], directory: Path, step: int) -> dict[int, tuple[str, int]]:
    keys, found = KeyFiles(directory, "pair"), DecisionFile(directory / "found", len(rows))
    for start in range(0, len(rows), step):
        keys.add(rows[start : start + step])
    find_repeated(keys, found, None)
    read = found.read(0, len(rows))
    return {d.position: (d.reason.value, d.other_line - 1) for d in read}


def plainly(rows: list[tuple[int, bool, int]]) -> dict[int, tuple[str, int]]:
    first: dict[tuple[int, bool], int] = {}
    for index, (key, label, _) in enumerate(rows):
        first.setdefault((key, label), index)
    right = {}
    for index, (key, label, text) in enumerate(rows):
        own, other = first[key, label], first.get((key, not label))
        if other is not None:
            right[index] = ("label_conflict", other)
        elif own != index:
            same = rows[own][2] == text
            right[index] = ("duplicate" if same else "normalized_duplicate", own)
    return right


@settings(max_examples=60, deadline=None)
@given(pairs, st.integers(1, 9))
def test_repeated_pairs(rows: list[tuple[int, bool, int]], step: int) -> None:
    names = ("pair_high", "direction", "exact")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    records = records_of(columns)
    with tempfile.TemporaryDirectory() as directory:
        assert found_in(records, Path(directory), step) == plainly(rows)


@settings(max_examples=60, deadline=None)
@given(places)
def test_leaks(rows: list[tuple[int, int]]) -> None:
    groups, splits = [g for g, _ in rows], [s for _, s in rows]
    columns = {"group_high": groups, "root_high": groups, "split": splits}
    records = records_of(columns)
    held_out = {g: max(s for other, s in rows if other == g) for g in groups}
    leaked = [i for i, (g, s) in enumerate(rows) if s < held_out[g]]
    shared = sum(s > 0 and (g, 0) in rows for g, s in rows)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = DecisionFile(directory / "leaks", len(rows))
        keys, roots = KeyFiles(directory, "group"), KeyFiles(directory, "root")
        keys.add(records)
        roots.add(records)
        find_leaks(keys, found)
        decisions = found.read(0, len(rows))
        assert [d.position for d in decisions] == leaked
        for decision in decisions:
            group, _ = rows[decision.position]
            holder = next(i for i, (g, s) in enumerate(rows) if g == group and s == held_out[g])
            assert decision.other_line - 1 == holder
            assert decision.reason is QuarantineReason.LEAKED_FROM_OTHER_SPLIT
        assert count_shared(roots, None) == shared
        # What leaked is out, so nothing is shared any more.
        assert count_shared(roots, found) == 0
