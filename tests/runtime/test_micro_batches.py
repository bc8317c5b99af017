"""Micro-batches of like length: every unit once, within the budget, at the least cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.packed_rows import MergeLimit, RowShape
from tasks.runtime.micro_batches import (
    bucket_units,
    layout_of,
    length_buckets,
    make_micro_batches,
    match_count,
    pack_units,
    select_rows,
    split_units,
)
from tasks.runtime.rows import Batch, Row, to_tensordict

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


def _row(seed: int, prompt_tokens: int, response_tokens: int) -> Row:
    """Return a row whose prompt depends on its length alone."""
    return Row((prompt_tokens,) * prompt_tokens, (10 + seed,) * response_tokens)


def _indices(batch: Batch, budget: int, packed: bool = False) -> list[list[int]]:
    """Return the rows of each micro-batch, after a look at what it holds."""
    # What is packed keeps to the limit of its rows.
    data = to_tensordict(batch, {"max_token_len_per_gpu": 10_000 if packed else budget})
    limit = MergeLimit(budget, 200.0, packed)
    micro_batches, indices = make_micro_batches(data, limit, None)
    for micro_batch, index in zip(micro_batches, indices, strict=True):
        layout = layout_of(micro_batch)
        assert layout is not None and layout.segments.numel() <= budget
        assert bool(layout.trees) == packed
        found = [row.tolist() for row in micro_batch["responses"].unbind()]
        assert found == [list(batch.rows[i].response_ids) for i in index]
    return indices


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=12),
    budget=st.integers(26, 200),
    group_size=st.sampled_from([1, 2]),
    one_prompt=st.booleans(),
    packed=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_every_row_once_within_the_budget(
    sizes: list[tuple[int, int]], budget: int, group_size: int, one_prompt: bool, packed: bool
) -> None:
    rows = [
        _row(i, prompt if one_prompt else prompt + k, response)
        for i, (prompt, response) in enumerate(sizes)
        for k in range(group_size)
    ]
    indices = _indices(Batch(rows, group_size=group_size), budget, packed)
    assert sorted(i for index in indices for i in index) == list(range(len(rows)))
    for index in indices:
        firsts = index[::group_size]
        assert index == [first + k for first in firsts for k in range(group_size)]


def test_a_pair_of_different_prompts_stays_in_one_micro_batch() -> None:
    rows = [_row(0, 2, 3), _row(1, 5, 3), _row(2, 4, 3), _row(3, 4, 3)]
    # The first pair takes 2 * 8 tokens, the second 4 + 3 + 3; a budget of 20 holds either.
    assert _indices(Batch(rows, group_size=2), 20) == [[2, 3], [0, 1]]


def test_packed_units_fill_the_budget_from_the_longest() -> None:
    # 7 and 3 fill 10 tokens, and so do 6 and 4; 5 is left.
    shapes = [RowShape(str(n), 1, n - 1) for n in (3, 6, 5, 7, 4)]
    assert pack_units([[[i]] for i in range(5)], shapes, 10) == [[3, 0], [1, 4], [2]]
    # A unit over the budget has a micro-batch of its own.
    assert pack_units([[[0], [1]], [[2]]], shapes, 8) == [[0], [1]]


def test_packed_rows_of_any_length_share_a_micro_batch() -> None:
    # 16 and 4 tokens are 20 packed, and 32 padded.
    rows = [_row(0, 2, 14), _row(1, 3, 1)]
    assert _indices(Batch(rows), 20, packed=True) == [[0, 1]]
    assert sorted(_indices(Batch(rows), 20)) == [[0], [1]]
    # The fourth response of a prompt of 4 and responses of 5 would be over 20 tokens.
    rows = [_row(i, 4, 5) for i in range(4)]
    assert sorted(map(len, _indices(Batch(rows), 20, packed=True))) == [1, 3]


def test_selected_rows_keep_their_columns_and_the_plain_values() -> None:
    columns = {"values": [torch.full((n,), float(n)) for n in (1, 2, 5)]}
    rows = [_row(n, 2, n) for n in (1, 2, 5)]
    data = to_tensordict(Batch(rows, columns, scalars={"calculate_entropy": True}), {})
    found = select_rows(data, [1, 0])
    assert found["values"].unbind()[0].tolist() == [2.0, 2.0]
    # Padded to the longest of the two, not of all three.
    padded = torch.nested.to_padded_tensor(found["values"], padding=0.0)
    assert padded.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    assert found["calculate_entropy"] is True and found["temperature"] == 1.0


def test_one_rank_with_fewer_prompts_than_the_other_has_micro_batches() -> None:
    shapes = [RowShape("a", 2, 3)] * 5
    units = [[[0, 1, 2, 3, 4]]]
    buckets = bucket_units(units, shapes, 100)
    split_units(units, buckets, 3)
    # 5 rows become 2 and 3; the 3 become 1 and 2.
    assert sorted(len(unit[0]) for unit in units) == [1, 2, 2]
    assert sorted(i for unit in units for i in unit[0]) == [0, 1, 2, 3, 4]
    assert sorted(match_count(buckets, 3)) == [[0], [1], [2]]
