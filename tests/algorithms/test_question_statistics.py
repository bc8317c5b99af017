"""Intervals over questions, paired differences, agreement of repeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.statistics import (
    Agreement,
    Interval,
    agreement,
    clustered_interval,
    label_agreement,
    paired_interval,
    standard_error,
)
from tasks.errors import DataError

SCORES = st.lists(st.lists(st.floats(1, 10), min_size=1, max_size=2), min_size=1, max_size=8)


def test_mean_is_over_all_values() -> None:
    # (2 + 4 + 9) / 3, not the mean of the questions' means (3 + 9) / 2.
    assert clustered_interval([[2.0, 4.0], [9.0], []]).value == 5.0


@given(SCORES)
def test_interval_holds_its_value_and_lies_within_the_scores(clusters: list[list[float]]) -> None:
    value, low, high = clustered_interval(clusters, n_resamples=50)
    values = [v for cluster in clusters for v in cluster]
    slack = 1e-9
    assert min(values) - slack <= low <= high <= max(values) + slack
    assert min(values) - slack <= value <= max(values) + slack


def test_same_scores_have_no_spread_and_one_question_has_none() -> None:
    assert clustered_interval([[5.0, 5.0], [5.0]]) == Interval(5.0, 5.0, 5.0)
    assert clustered_interval([[3.0, 4.0]]) == Interval(3.5, 3.5, 3.5)


def test_width_is_that_of_independent_questions() -> None:
    draw = random.Random(1)
    clusters = [[value, value] for value in (draw.gauss(5.0, 1.0) for _ in range(400))]
    _, low, high = clustered_interval(clusters)
    # Two equal turns say no more than one: 2 * 1.96 / sqrt(400) = 0.196, not 0.139 as for 800.
    assert high - low == pytest.approx(0.196, rel=0.12)


def test_seed_repeats_the_interval() -> None:
    clusters = [[float(i % 7), float(i % 5)] for i in range(30)]
    assert clustered_interval(clusters, seed=3) == clustered_interval(clusters, seed=3)
    assert clustered_interval(clusters, seed=3) != clustered_interval(clusters, seed=4)


def test_nothing_judged_is_an_error_and_no_number() -> None:
    with pytest.raises(DataError, match="No judgment has a score"):
        clustered_interval([[], []])


def test_difference_is_taken_where_both_have_a_score() -> None:
    ours = {1: {1: 8.0, 2: 6.0}, 2: {1: 5.0}, 3: {1: 9.0}}
    theirs = {1: {1: 5.0}, 2: {1: 6.0, 2: 7.0}, 4: {1: 1.0}}
    interval, n = paired_interval(ours, theirs)
    # (8 - 5) and (5 - 6): mean 1.
    assert (interval.value, n) == (1.0, 2)
    with pytest.raises(DataError, match="no judged question in common"):
        paired_interval({1: {1: 2.0}}, {1: {2: 2.0}})


def test_pairing_removes_what_questions_share() -> None:
    draw = random.Random(0)
    hard = {q: draw.uniform(1, 9) for q in range(80)}
    ours = {q: {1: value + 1.0} for q, value in hard.items()}
    theirs = {q: {1: value} for q, value in hard.items()}
    interval, _ = paired_interval(ours, theirs)
    assert interval == pytest.approx(Interval(1.0, 1.0, 1.0))


def test_agreement_of_repeats() -> None:
    # Pairs: (7, 7), (7, 9), (7, 9) and (4, 5): one of four equal; (0 + 2 + 2 + 1) / 4.
    assert agreement([[7.0, 7.0, 9.0], [4.0, 5.0], [3.0], []]) == Agreement(4, 0.25, 1.25)
    assert label_agreement([["A", "A"], ["A", "tie"]]) == Agreement(2, 0.5, None)
    assert agreement([[1.0], []]) is None
    assert label_agreement([["A"]]) is None


def test_standard_error_by_hand() -> None:
    # Variance of (0, 1, 1, 0) is 4 * 0.25 / 3 = 1/3; sqrt(1/3 / 4).
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx((1 / 12) ** 0.5)
    assert standard_error([1.0]) is None
