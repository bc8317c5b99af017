"""Filters by flag, margin and length: which rows go, why, and that never all of them do."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.data_filters import (
    Filtered,
    filter_rows,
    lower_quantile,
    missing_end_penalty,
    upper_quantile,
)
from tasks.errors import DataError

QUIET = {"min_margin_quantile": 0.0, "max_length_quantile": 1.0, "drop_flags": ()}


def _filter(n: int, **given: Any) -> Filtered:
    """Filter n rows of equal margins and lengths and no flags, but for what is given."""
    margins, lengths = given.pop("margins", torch.zeros(n)), given.pop("lengths", torch.ones(n))
    flags = given.pop("flags", [set()] * n)
    return filter_rows(margins, lengths, flags, **(QUIET | given))


def test_lower_quantile_by_hand() -> None:
    margins = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    # 0.4 * 5 = 2: the place 2 of -1, 0, 0.5, 1, 2 is 0.5; two go
    assert lower_quantile(margins, 0.4) == 0.5
    keep = _filter(5, margins=margins, min_margin_quantile=0.4).keep
    assert keep.tolist() == [True, False, True, False, True]
    # 0.39 * 5 = 1.95: place 1
    assert lower_quantile(margins, 0.39) == 0.0
    assert lower_quantile(margins, 0.0) == -1.0


def test_upper_quantile_by_hand() -> None:
    lengths = torch.tensor([10, 50, 20, 40, 30])
    # 0.6 * 5 = 3: the third lowest is 30
    assert upper_quantile(lengths, 0.6) == 30.0
    keep = _filter(5, lengths=lengths, max_length_quantile=0.6).keep
    assert keep.tolist() == [True, False, True, False, True]
    # 0.61 * 5 = 3.05: the fourth
    assert upper_quantile(lengths, 0.61) == 40.0
    assert upper_quantile(lengths, 1.0) == 50.0


def test_equal_values_stay_or_go_together() -> None:
    same = torch.full((5,), 3.0)
    for quantile in (0.0, 0.5, 0.99):
        found = _filter(
            5,
            margins=same,
            lengths=same,
            min_margin_quantile=quantile,
            max_length_quantile=1.0 - quantile,
        )
        assert bool(found.keep.all())
    # 0.5 * 5 = 2.5: place 2 of 0, 1, 1, 1, 2 is 1, and all three 1 stay
    tied = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0])
    keep = _filter(5, margins=tied, min_margin_quantile=0.5).keep
    assert keep.tolist() == [True, False, True, True, True]


def test_rounding_does_not_move_a_quantile() -> None:
    # 0.29 * 100 is 28.999999999999996 and 0.07 * 100 is 7.000000000000001 in binary
    values = torch.arange(100.0)
    assert lower_quantile(values, 0.29) == 29.0
    assert upper_quantile(values, 0.07) == 6.0


def test_reasons_are_counted_in_order() -> None:
    result = filter_rows(
        torch.tensor([-9.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        torch.tensor([99, 90, 10, 80, 20, 30]),
        [{"toxic"}, set(), {"short"}, set(), set(), {"toxic", "short"}],
        min_margin_quantile=0.25,
        max_length_quantile=0.75,
        drop_flags=["toxic"],
    )
    # Flags take rows 0 and 5. Of the margins 0.1 to 0.4 place 1 is 0.2: row 1 goes. Of the lengths
    # 90, 10, 80, 20 the third lowest is 80: row 1 is too long as well, but counted before.
    assert result.keep.tolist() == [False, False, True, True, True, False]
    assert result.dropped == {"flags": 2, "margin": 1, "length": 0}


def test_what_is_off_drops_nothing_and_is_not_counted() -> None:
    result = _filter(2, flags=[{"a"}, set()])
    assert result.keep.tolist() == [True, True]
    assert result.dropped == {}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(1, 6), st.sets(st.sampled_from("abc"))),
        min_size=1,
        max_size=30,
    ),
    low=st.floats(0.0, 0.9),
    high=st.floats(0.1, 1.0),
    random=st.randoms(use_true_random=False),
)
def test_the_mask_moves_with_the_rows_and_the_counts_add_up(
    rows: list[tuple[int, int, set[str]]], low: float, high: float, random: Random
) -> None:
    def outcome(order: list[int]) -> tuple[list[bool], object] | str:
        margins, lengths = (torch.tensor([float(rows[i][k]) for i in order]) for k in (0, 1))
        try:
            result = filter_rows(
                margins,
                lengths,
                [rows[i][2] for i in order],
                min_margin_quantile=low,
                max_length_quantile=high,
                drop_flags="a",
            )
        except DataError as error:
            return str(error)
        assert sum(result.dropped.values()) + int(result.keep.sum()) == len(rows)
        return result.keep.tolist(), result.dropped

    order = list(range(len(rows)))
    straight = outcome(order)
    random.shuffle(order)
    moved = outcome(order)
    if isinstance(straight, str) or isinstance(moved, str):
        assert straight == moved
    else:
        assert moved == ([straight[0][i] for i in order], straight[1])


def test_dropping_all_is_an_error_with_thresholds_and_counts() -> None:
    with pytest.raises(DataError, match=r"dropped all 2 rows: flags 2 \(any of \['bad'\]\)"):
        _filter(2, flags=[{"bad"}, {"bad"}], drop_flags=["bad"])
    # The longer of the two has the greater margin: one goes by margin, the other by length.
    margins, lengths = torch.tensor([1.0, 2.0]), torch.tensor([5, 9])
    with pytest.raises(DataError) as caught:
        _filter(
            2, margins=margins, lengths=lengths, min_margin_quantile=0.5, max_length_quantile=0.5
        )
    assert "margin 1 (below 2.0, quantile 0.5); length 1 (above 5.0 tokens" in str(caught.value)


def test_missing_end_penalty() -> None:
    has_end = torch.tensor([True, False, True])
    assert missing_end_penalty(has_end, 0.5).tolist() == [0.0, -0.5, 0.0]
    assert missing_end_penalty(has_end, 0.0).tolist() == [0.0, 0.0, 0.0]
