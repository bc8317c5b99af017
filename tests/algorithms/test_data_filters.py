"""Filters by flag, margin and length: which rows go, why, and that never all of them do."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.data_filters import (
    FilterColumns,
    FilterRules,
    filter_rows,
    lower_quantile_keep,
    missing_end_penalty,
    upper_quantile_keep,
)
from tasks.errors import ConfigError, DataError, TrainingError

ALL5 = torch.ones(5, dtype=torch.bool)


def test_lower_quantile_by_hand() -> None:
    margins = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    # 0.4 * 5 = 2: the place 2 of -1, 0, 0.5, 1, 2 is 0.5; two go
    keep, threshold = lower_quantile_keep(margins, 0.4, ALL5)
    assert keep.tolist() == [True, False, True, False, True]
    assert threshold == 0.5
    # 0.39 * 5 = 1.95: place 1
    assert lower_quantile_keep(margins, 0.39, ALL5)[0].tolist() == [True, False, True, True, True]
    assert bool(lower_quantile_keep(margins, 0.0, ALL5)[0].all())


def test_upper_quantile_by_hand() -> None:
    lengths = torch.tensor([10, 50, 20, 40, 30])
    # 0.6 * 5 = 3: the third lowest is 30
    keep, threshold = upper_quantile_keep(lengths, 0.6, ALL5)
    assert keep.tolist() == [True, False, True, False, True]
    assert threshold == 30.0
    # 0.61 * 5 = 3.05: the fourth
    assert upper_quantile_keep(lengths, 0.61, ALL5)[1] == 40.0
    assert bool(upper_quantile_keep(lengths, 1.0, ALL5)[0].all())


def test_equal_values_stay_or_go_together() -> None:
    same = torch.full((5,), 3.0)
    for quantile in (0.0, 0.5, 0.99):
        assert bool(lower_quantile_keep(same, quantile, ALL5)[0].all())
        assert bool(upper_quantile_keep(same, 1.0 - quantile, ALL5)[0].all())
    # 0.5 * 5 = 2.5: place 2 of 0, 1, 1, 1, 2 is 1, and all three 1 stay
    tied = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0])
    assert lower_quantile_keep(tied, 0.5, ALL5)[0].tolist() == [True, False, True, True, True]


def test_rounding_does_not_move_a_quantile() -> None:
    # 0.29 * 100 is 28.999999999999996 and 0.07 * 100 is 7.000000000000001 in binary
    values = torch.arange(100.0)
    rows = torch.ones(100, dtype=torch.bool)
    assert lower_quantile_keep(values, 0.29, rows)[1] == 29.0
    assert upper_quantile_keep(values, 0.07, rows)[1] == 6.0


def test_reasons_are_counted_in_order() -> None:
    columns = FilterColumns(
        margins=torch.tensor([-9.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        lengths=torch.tensor([99, 90, 10, 80, 20, 30]),
        flags=[{"toxic"}, set(), {"short"}, set(), set(), {"toxic", "short"}],
    )
    rules = FilterRules(0.25, 0.75, frozenset({"toxic"}))
    result = filter_rows(columns, rules)
    # Flags take rows 0 and 5. Of the margins 0.1 to 0.4 place 1 is 0.2: row 1 goes. Of the lengths
    # 90, 10, 80, 20 the third lowest is 80: row 1 is too long as well, but counted before.
    assert result.keep.tolist() == [False, False, True, True, True, False]
    assert result.dropped == {"flags": 2, "margin": 1, "length": 0}
    assert result.thresholds == pytest.approx({"margin": 0.2, "length": 80.0})


def test_defaults_drop_nothing_and_need_no_column() -> None:
    result = filter_rows(FilterColumns(flags=[{"a"}, set()]), FilterRules())
    assert result.keep.tolist() == [True, True]
    assert result.dropped == {} and result.thresholds == {}


def test_rows_under_a_false_valid_never_matter() -> None:
    margins = torch.tensor([1.0, math.nan, 3.0, -math.inf, 2.0])
    valid = torch.tensor([True, False, True, False, True])
    result = filter_rows(FilterColumns(margins=margins, valid=valid), FilterRules(0.34))
    # 0.34 * 3 = 1.02: place 1 of 1, 2, 3
    assert result.keep.tolist() == [False, False, True, False, True]
    assert result.dropped == {"margin": 1}
    with pytest.raises(TrainingError, match="not finite"):
        filter_rows(FilterColumns(margins=margins), FilterRules(0.34))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-3, 3), st.integers(1, 6), st.sets(st.sampled_from("abc")), st.booleans()
        ),
        min_size=1,
        max_size=30,
    ),
    low=st.floats(0.0, 0.9),
    high=st.floats(0.1, 1.0),
    random=st.randoms(use_true_random=False),
)
def test_the_mask_moves_with_the_rows_and_the_counts_add_up(
    rows: list[tuple[int, int, set[str], bool]], low: float, high: float, random: Random
) -> None:
    def outcome(order: list[int]) -> tuple[list[bool], object] | str:
        columns = FilterColumns(
            margins=torch.tensor([float(rows[i][0]) if rows[i][3] else math.nan for i in order]),
            lengths=torch.tensor([rows[i][1] for i in order]),
            flags=[rows[i][2] for i in order],
            valid=torch.tensor([rows[i][3] for i in order]),
        )
        try:
            result = filter_rows(columns, FilterRules(low, high, frozenset("a")))
        except DataError as error:
            return str(error)
        n_valid = sum(rows[i][3] for i in order)
        assert sum(result.dropped.values()) + int(result.keep.sum()) == n_valid
        return result.keep.tolist(), (result.dropped, result.thresholds)

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
        filter_rows(
            FilterColumns(flags=[{"bad"}, {"bad"}]), FilterRules(0.0, 1.0, frozenset({"bad"}))
        )
    # The longer of the two has the greater margin: one goes by margin, the other by length.
    columns = FilterColumns(margins=torch.tensor([1.0, 2.0]), lengths=torch.tensor([5, 9]))
    with pytest.raises(DataError) as caught:
        filter_rows(columns, FilterRules(0.5, 0.5))
    assert "margin 1 (below 2.0, quantile 0.5); length 1 (above 5.0 tokens" in str(caught.value)


def test_bad_rules_and_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_margin_quantile is 1"):
        FilterRules(min_margin_quantile=1.0)
    with pytest.raises(ConfigError, match="max_length_quantile is 0"):
        FilterRules(max_length_quantile=0.0)
    with pytest.raises(ConfigError, match="drop_flags is set"):
        filter_rows(FilterColumns(margins=torch.ones(2)), FilterRules(drop_flags=frozenset("a")))
    with pytest.raises(ConfigError, match="without any column"):
        filter_rows(FilterColumns(), FilterRules())
    with pytest.raises(DataError, match="lengths has shape"):
        filter_rows(FilterColumns(margins=torch.ones(2), lengths=torch.ones(3)), FilterRules(0.1))
    with pytest.raises(DataError, match="no row"):
        filter_rows(FilterColumns(margins=torch.ones(0)), FilterRules(0.1))
    with pytest.raises(DataError, match="no row"):
        filter_rows(
            FilterColumns(margins=torch.ones(1), valid=torch.zeros(1, dtype=torch.bool)),
            FilterRules(),
        )


def test_missing_end_penalty() -> None:
    has_end = torch.tensor([True, False, True])
    assert missing_end_penalty(has_end, 0.5).tolist() == [0.0, -0.5, 0.0]
    assert missing_end_penalty(has_end, 0.0).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="penalty"):
        missing_end_penalty(has_end, -1.0)
    with pytest.raises(DataError, match=r"torch\.bool"):
        missing_end_penalty(torch.ones(3), 1.0)
