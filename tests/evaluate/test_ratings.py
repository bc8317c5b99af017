"""Ratings and verdicts in what judges write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate.judges import parse_rating, parse_verdict
from tasks.evaluate.judgments import Verdict, is_rating

SharedCases = Callable[[str], list[dict[str, Any]]]


def test_known_judgments(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-01")
    found = [parse_rating(text) for text in case["input"]["judgments"]]
    assert found == case["expected"]["scores"]


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Rating: [[1]]", 1.0),
        ("Rating: [[10]]", 10.0),
        ("Rating: [[ 9.5 ]].", 9.5),
        ("**Rating: [[7]]**", 7.0),
        # The last on the scale counts.
        ("I first thought [[3]], now [[6]].", 6.0),
        ("[[6]] of [[100]]", 6.0),
        ("Rating: [[11]]", None),
        ("Rating: [[0]]", None),
        ("Rating: [[-5]]", None),
        ("Rating: [[0.99]]", None),
        ("Rating: [[10.01]]", None),
        ("Rating: [[8/10]]", None),
        ("Rating: [[rating]]", None),
        ("Rating: [[\u0665]]", None),
        ("Rating: [[1e1]]", None),
        ("Rating: [[NaN]]", None),
        # A single bracket is a verdict only where the text ends with it.
        ("Rating: [5]\n", 5.0),
        ("My rating is [5].", 5.0),
        ("It is fine.\n[5]", 5.0),
        ("It is fine. [5]", 5.0),
        ("**[5]**", 5.0),
        ("Rating: [11]", None),
        ("[5] is what I would say", None),
        ("Return arr[5]", None),
        ("Return arr[2][5]", None),
        ("As was shown in [5]", None),
        ("[[80]]", None),
        ("rating 5", None),
    ],
)
def test_rating(text: str, rating: float | None) -> None:
    assert parse_rating(text) == rating


@given(st.text(alphabet="[]0123456789.- Rating:\n", max_size=60))
def test_whatever_is_written_gives_a_rating_on_the_scale_or_none(text: str) -> None:
    found = parse_rating(text)
    assert found is None or is_rating(found)


@given(st.text(), st.integers(10, 100))
def test_closing_double_bracket_counts_whatever_came_before(text: str, tenths: int) -> None:
    assert parse_rating(f"{text} Rating: [[{tenths / 10}]]") == tenths / 10


def test_long_text_takes_no_time() -> None:
    assert parse_rating("[" * 50_000 + "5") is None
    assert parse_rating("rating " * 20_000 + "[5]") == 5.0
    assert parse_rating("rating " * 20_000 + "a. b [5]") is None
    assert parse_rating("x" * 1_000 + " [5]") is None
    assert parse_rating("x" * 1_000 + ". [5]") == 5.0


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("[[A]]", "A"),
        ("A is good, [[B]] at first, then [[ A ]].", "A"),
        ("[[C]]", "tie"),
        ("[[D]]", None),
        ("[A]", None),
        ("", None),
    ],
)
def test_verdict(text: str, verdict: Verdict | None) -> None:
    assert parse_verdict(text) == verdict
