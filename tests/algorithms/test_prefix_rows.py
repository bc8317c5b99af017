"""Merged rows: every token once in its place, every response by itself, no more work than apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from tasks.algorithms.packed_rows import (
    MergeLimit,
    PromptTree,
    RowShape,
    dense_mask,
    lay_out,
    merge_rows,
    merged_tokens,
    prefix_mask_mod,
)

WIDE = MergeLimit(10_000)
# Prompt "a" has 2 tokens and responses of 1, 2 and 1, prompt "b" 1 token and a response of 3.
ROWS = [RowShape("a", 2, 1), RowShape("b", 1, 3), RowShape("a", 2, 2), RowShape("a", 2, 1)]
IDS = torch.tensor([1, 2, 10, 5, 50, 51, 52, 1, 2, 20, 21, 1, 2, 30])
MERGED = [[0, 2, 3], [1]]

Rows = st.lists(
    # The prompt of n tokens is called n.
    st.tuples(st.integers(1, 4), st.integers(1, 6)).map(lambda size: RowShape(size[0], *size)),
    min_size=1,
    max_size=8,
)


def test_layout_by_hand() -> None:
    layout = lay_out(ROWS, MERGED)
    assert layout.merge(IDS, 0).tolist() == [[1, 2, 10, 20, 21, 30], [5, 50, 51, 52, 0, 0]]
    # Every response goes on where the prompt ends.
    assert layout.positions.tolist() == [[0, 1, 2, 2, 3, 2], [0, 1, 2, 3, 0, 0]]
    assert layout.segments.tolist() == [[0, 0, 1, 2, 2, 3], [0, 1, 1, 1, -1, -1]]
    # Tokens 2; 4, 5, 6; 9, 10; 13 are the responses'; each is predicted from the token before.
    assert layout.before_response.tolist() == [1, 3, 4, 5, 8, 9, 12]
    assert layout.slots[layout.before_response].tolist() == [1, 6, 7, 8, 1, 3, 1]


def test_packed_layout_by_hand() -> None:
    layout = lay_out(ROWS, MERGED, packed=True)
    # The six tokens of "a" and its responses, then the four of "b", without padding.
    assert layout.merge(IDS, 0).tolist() == [[1, 2, 10, 20, 21, 30, 5, 50, 51, 52]]
    assert layout.positions.tolist() == [[0, 1, 2, 2, 3, 2, 0, 1, 2, 3]]
    assert layout.segments.tolist() == [[0, 0, 1, 2, 2, 3, 0, 1, 1, 1]]
    assert layout.trees == (PromptTree(2, (1, 2, 1)), PromptTree(1, (3,)))
    assert layout.slots[layout.before_response].tolist() == [1, 6, 7, 8, 1, 3, 1]
    assert layout.trees == layout.to(torch.device("cpu")).trees
    assert lay_out(ROWS, MERGED).trees == ()


@given(rows=Rows)
def test_packed_rows_hold_every_token_once(rows: list[RowShape]) -> None:
    layout = lay_out(rows, merge_rows(rows, WIDE), packed=True)
    n_slots = sum(tree.tokens for tree in layout.trees)
    assert layout.segments.shape == (1, n_slots)
    assert sorted(set(layout.slots.tolist())) == list(range(n_slots))
    # Each row finds its own positions again.
    expected = [position for row in rows for position in range(row.tokens)]
    assert layout.spread(layout.positions).tolist() == expected


def test_what_was_computed_goes_back_to_the_rows() -> None:
    layout = lay_out(ROWS, MERGED)
    assert torch.equal(layout.spread(layout.merge(IDS, 0)), IDS)
    filled = layout.fill(torch.arange(1.0, 8.0))
    assert filled.tolist() == [0, 1, 0, 2, 3, 4, 0, 0, 5, 6, 0, 0, 7, 0]


def test_mask_by_hand() -> None:
    # Prompt of 2, then responses of 1 and 2 tokens, then one token of padding.
    mask = dense_mask(torch.tensor([[0, 0, 1, 2, 2, -1]]))
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert mask.dtype == torch.bool and mask[0, 0].int().tolist() == expected


@given(rows=Rows)
def test_a_token_sees_what_it_sees_in_its_own_row(rows: list[RowShape]) -> None:
    layout = lay_out(rows, merge_rows(rows, WIDE))
    mask = dense_mask(layout.segments)[:, 0]
    width = layout.segments.shape[1]
    start = 0
    for row in rows:
        slots = layout.slots[start : start + row.tokens]
        start += row.tokens
        places, at = slots % width, int(slots[0]) // width
        assert layout.positions[at, places].tolist() == list(range(row.tokens))
        for position, place in enumerate(places.tolist()):
            seen = mask[at, place].nonzero()[:, 0]
            assert seen.tolist() == places[: position + 1].tolist()
    assert mask.any(-1).all()


@given(rows=Rows)
def test_the_block_sparse_mask_is_the_dense_one(rows: list[RowShape]) -> None:
    segments = lay_out(rows, merge_rows(rows, WIDE)).segments
    n_rows, width = segments.shape
    found = create_mask(prefix_mask_mod(segments), n_rows, 1, width, width, device="cpu")
    assert torch.equal(found, dense_mask(segments))


@given(rows=Rows, limit=st.integers(1, 30), attention=st.sampled_from([3.0, 50.0, math.inf]))
def test_every_row_once_and_never_more_work_than_apart(
    rows: list[RowShape], limit: int, attention: float
) -> None:
    bound = MergeLimit(limit, attention)
    merged = merge_rows(rows, bound)
    assert sorted(i for members in merged for i in members) == list(range(len(rows)))
    for members in merged:
        assert members == sorted(members)
        assert len({rows[i].prompt for i in members}) == 1
        assert len(members) == 1 or merged_tokens(rows, members) <= limit
    apart = sum(bound.cost(row.tokens) for row in rows)
    together = sum(bound.cost(merged_tokens(rows, members)) for members in merged)
    assert together <= apart + 1e-6


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (MergeLimit(6), [[0, 2, 3], [1]]),
        # 2 + 1 + 2 = 5 tokens are allowed, the third response begins a row.
        (MergeLimit(5), [[0, 2], [1], [3]]),
        (MergeLimit(2), [[0], [1], [2], [3]]),
        # cost(n) = n + n^2 / 2. Row 2 alone: 4 + 8 = 12; beside row 0: 5 + 12.5 - 3 - 4.5 = 10.
        # Row 3 alone: 3 + 4.5 = 7.5; as the third: 6 + 18 - 17.5 = 6.5.
        (MergeLimit(99, 2.0), [[0, 2, 3], [1]]),
        # cost(n) = n + 2 n^2. Row 2 alone: 4 + 32 = 36; beside row 0: 55 - 21 = 34.
        # Row 3 alone: 3 + 18 = 21; as the third: 78 - 55 = 23 is more.
        (MergeLimit(99, 0.5), [[0, 2], [1], [3]]),
    ],
)
def test_merging_stops_at_the_budget_and_where_it_costs_more(
    limit: MergeLimit, expected: list[list[int]]
) -> None:
    assert merge_rows(ROWS, limit) == expected
