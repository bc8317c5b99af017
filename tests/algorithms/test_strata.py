"""How many groups of each subset a batch holds."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.samplers import Strata, next_quota


def test_quota_by_hand() -> None:
    # Shares 1/2, 1/3, 1/6 in batches of 4: exactly 2, 4/3, 2/3. Floors 2, 1, 0 leave one place.
    # Batch 1: behind by 0, 1/3, 2/3: the third. Batch 2: 8 drawn make 4, 8/3, 4/3; the floors reach
    # 4, 2, 1: behind by 0, 2/3, 1/3: the second. Batch 3: 6, 4, 2 less 6, 4, 1: the third.
    shares = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    assert next_quota(shares, [0, 0, 0], 4) == (2, 1, 1)
    assert next_quota(shares, [2, 1, 1], 4) == (2, 2, 0)
    assert next_quota(shares, [4, 3, 1], 4) == (2, 1, 1)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60),
)
def test_quotas_are_within_one_group_and_never_drift(parts: list[int], sizes: list[int]) -> None:
    shares = [Fraction(part, sum(parts)) for part in parts]
    drawn = [0] * len(parts)
    for size in sizes:
        quota = next_quota(shares, drawn, size)
        assert sum(quota) == size
        assert all(abs(n - size * share) < 1 for n, share in zip(quota, shares, strict=True))
        drawn = [before + n for before, n in zip(drawn, quota, strict=True)]
        # Looser than what is seen (below 1), and it does not grow with the number of batches.
        total = sum(drawn)
        assert all(abs(n - total * s) < len(parts) for n, s in zip(drawn, shares, strict=True))


def test_shares_by_hand() -> None:
    # 3 of a and 1 of b at weight 2: 3 / 5 and 2 / 5
    assert Strata(["a", "b", "a", "a"], {"b": 2.0}).shares() == {
        "a": Fraction(3, 5),
        "b": Fraction(2, 5),
    }
