"""Micro-batches of like length: every unit once, within the budget, at the least cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.backends.micro_batches import length_buckets, match_count

COST = 5
Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def _padded(bucket: Sequence[int], lengths: Sequence[int]) -> int:
    return len(bucket) * max(lengths[i] for i in bucket)


def _cost(buckets: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return sum(_padded(bucket, lengths) + COST for bucket in buckets)


def _partitions(order: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Yield every way to cut a sequence into pieces."""
    inner = range(1, len(order))
    for n_cuts in range(len(order)):
        for cuts in combinations(inner, n_cuts):
            places = [0, *cuts, len(order)]
            yield [order[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # [10, 9], [2, 2, 1]: 20 + 5 + 6 + 5 = 36. In one: 50 + 5. In three: 10 + 9 + 6 + 15 = 40.
        (100, [[0, 2], [1, 3, 4]]),
        # 10 and 9 together are 20 and too much.
        (12, [[0], [2], [1, 3, 4]]),
        # 10 and 9 exceed the budget and stand alone; [2, 2], [1] is 15, [2], [2, 1] is 16.
        (5, [[0], [2], [1, 3], [4]]),
    ],
)
def test_buckets_by_hand(budget: int, expected: list[list[int]]) -> None:
    assert length_buckets([10, 2, 9, 2, 1], budget, COST) == expected


@given(lengths=Lengths, budget=st.integers(1, 200))
def test_no_other_cut_of_a_small_batch_costs_less(lengths: list[int], budget: int) -> None:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    allowed = [
        cut
        for cut in _partitions(order)
        if all(len(piece) == 1 or _padded(piece, lengths) <= budget for piece in cut)
    ]
    found = length_buckets(lengths, budget, COST)
    assert _cost(found, lengths) == min(_cost(cut, lengths) for cut in allowed)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=200), budget=st.integers(1, 4000))
def test_every_unit_once_and_within_the_budget(lengths: list[int], budget: int) -> None:
    buckets = length_buckets(lengths, budget, COST)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket) == 1 or _padded(bucket, lengths) <= budget
    assert sum(_padded(bucket, lengths) for bucket in buckets) <= len(lengths) * max(lengths)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=64), budget=st.integers(300, 4000)
)
def test_never_dearer_than_filling_one_bucket_after_the_other(
    lengths: list[int], budget: int
) -> None:
    filled: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if filled[-1] and _padded([*filled[-1], i], lengths) > budget:
            filled.append([])
        filled[-1].append(i)
    assert _cost(length_buckets(lengths, budget, COST), lengths) <= _cost(filled, lengths)


def test_the_largest_bucket_is_halved() -> None:
    # 4 rows become 2 and 2; then the next of the largest becomes 1 and 1.
    assert sorted(match_count([[0, 1, 2, 3], [4]], 3)) == [[0, 1], [2, 3], [4]]
    assert sorted(map(len, match_count([[0, 1, 2, 3], [4]], 4))) == [1, 1, 1, 2]
    assert match_count([[0], [1]], 2) == [[0], [1]]


def test_too_few_rows_for_the_count() -> None:
    with pytest.raises(RuntimeError, match="2 rows cannot make 3 micro-batches"):
        match_count([[0, 1]], 3)
