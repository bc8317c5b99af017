"""Splits by prompt hash."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.hh import split_of
from tasks.errors import ConfigError


def test_split_follows_the_hash() -> None:
    # SHA-256 of "0:a" starts with 9df3c5fab8ef8fe7, which over 2^64 is 0.617.
    assert split_of("a", 0, 0.1, 0.62) == "test"
    assert split_of("a", 0, 0.1, 0.61) == "validation"
    assert split_of("a", 0, 0.62, 0.0) == "validation"
    assert split_of("a", 0, 0.3, 0.31) == "train"


def test_split_shares_are_met_and_seeded() -> None:
    names = [split_of(str(index), 0, 0.1, 0.2) for index in range(4000)]
    counts = Counter(names)
    # Binomial means 800 and 400, deviations sqrt(4000 * 0.2 * 0.8) = 25 and 19; five of them each.
    assert abs(counts["test"] - 800) < 125
    assert abs(counts["validation"] - 400) < 95
    assert names != [split_of(str(index), 1, 0.1, 0.2) for index in range(4000)]


@given(st.text(), st.integers(0, 9), st.floats(0, 0.4), st.floats(0, 0.4))
def test_larger_test_share_only_adds_to_test(
    prompt_id: str, seed: int, small: float, large: float
) -> None:
    small, large = sorted((small, large))
    if split_of(prompt_id, seed, 0.1, small) == "test":
        assert split_of(prompt_id, seed, 0.1, large) == "test"


def test_shares_that_leave_nothing_to_train_on_are_refused() -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        split_of("a", 0, 0.5, 0.5)
