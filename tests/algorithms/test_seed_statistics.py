"""Means over seeds and paired differences, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.statistics import SeedMean, paired_difference, seed_mean
from tasks.errors import DataError

RATES = st.floats(0.0, 1.0)


def test_mean_and_standard_error_by_hand() -> None:
    # Mean 0.9; squares 0.0004 + 0 + 0.0004 over n - 1 = 2 give s = 0.02; s / sqrt 3 = 0.011547.
    found = seed_mean([0.88, 0.90, 0.92])
    assert found.mean == pytest.approx(0.9)
    assert found.standard_error == pytest.approx(0.02 / math.sqrt(3))
    assert found.n == 3


def test_one_seed_has_no_standard_error() -> None:
    assert seed_mean([0.7]) == SeedMean(0.7, None, 1)


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [math.inf]])
def test_figures_that_are_none_are_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match="figures over seeds"):
        seed_mean(values)


def test_difference_is_taken_within_seeds_by_hand() -> None:
    # Both vary by 0.2 from seed to seed, the differences 0.02, 0.04, 0.06 hardly: mean 0.04,
    # s^2 = (0.0004 + 0 + 0.0004) / 2, s = 0.02, error 0.02 / sqrt 3. Unpaired it would be about
    # sqrt(2) * 0.2 / sqrt(3) = 0.16.
    reference = {3: 0.5, 4: 0.7, 5: 0.9}
    found = paired_difference({5: 0.96, 3: 0.52, 4: 0.74}, reference)
    assert found is not None
    assert found.mean == pytest.approx(0.04)
    assert found.standard_error == pytest.approx(0.02 / math.sqrt(3))


def test_only_seeds_that_both_have_count() -> None:
    # Seed 2 of the one and seed 9 of the other have no partner: 0.9 - 0.6 alone is left.
    found = paired_difference({1: 0.9, 2: 0.1}, {1: 0.6, 9: 0.0})
    assert found is not None and (found.standard_error, found.n) == (None, 1)
    assert found.mean == pytest.approx(0.3)
    assert paired_difference({1: 0.9}, {2: 0.9}) is None


@given(st.dictionaries(st.integers(0, 9), RATES, min_size=2), st.floats(-1.0, 1.0))
def test_a_constant_difference_has_no_error(values: dict[int, float], shift: float) -> None:
    found = paired_difference({seed: value + shift for seed, value in values.items()}, values)
    assert found is not None and found.standard_error is not None
    assert found.mean == pytest.approx(shift, abs=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


@given(st.lists(RATES, min_size=2, max_size=8))
def test_order_does_not_matter(values: list[float]) -> None:
    forth, back = seed_mean(values), seed_mean(values[::-1])
    assert forth.mean == pytest.approx(back.mean)
    assert forth.standard_error == pytest.approx(back.standard_error, abs=1e-12)
