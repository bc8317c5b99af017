"""The reward functions that ship as examples."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "reward_functions"
Score = Callable[[str, str], float]
TEXTS = st.text(alphabet="ab ,.\n", max_size=30)


def _score(name: str) -> Score:
    function: Any = runpy.run_path(str(FOLDER / f"{name}.py"))["reward_fn"]

    def score(response: str, reference: str) -> float:
        value = function(
            data_source="helpful", solution_str=response, ground_truth=reference, extra_info={}
        )
        assert type(value) is float
        return value

    return score


BLEU = _score("bleu")
EXACT = _score("exact_match")
LENGTH = _score("length_cost")


def test_bleu_by_hand() -> None:
    # Response: the cat sat on a mat (6). Reference: the cat sat on the mat (6), so BP = 1.
    # p1 = 5/6; p2 = (3 + 1)/(5 + 1), the cat, cat sat, sat on; p3 = (2 + 1)/(4 + 1);
    # p4 = (1 + 1)/(3 + 1).
    expected = (5 / 6 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    assert BLEU("the cat sat on a mat", "the cat sat on the mat") == pytest.approx(expected)


def test_bleu_counts_a_word_as_often_as_the_reference_has_it() -> None:
    # the the the: m1 = 1 of 3, no bigram of (2) or trigram of (1) matches, no 4-gram exists.
    # BP = exp(1 - 4/3); p = 1/3, 1/3, 1/2, 1/1.
    expected = math.exp(1 - 4 / 3) * (1 / 3 * 1 / 3 * 1 / 2 * 1) ** 0.25
    assert BLEU("the the the", "the cat sat down") == pytest.approx(expected)


def test_bleu_penalises_brevity_alone() -> None:
    # All n-grams match, 2 of 8 tokens: BP = exp(1 - 8/2).
    assert BLEU("a b", "a b c d e f g h") == pytest.approx(math.exp(-3))
    # A longer response has no brevity penalty: p = 2/4, 2/4, 1/3, 1/2.
    assert BLEU("a b x y", "a b") == pytest.approx((2 / 4 * 2 / 4 * 1 / 3 * 1 / 2) ** 0.25)


def test_bleu_reads_words_and_marks() -> None:
    assert BLEU("Yes , it is !", "Yes, it is!") == pytest.approx(1.0)
    # Case counts: p = 3/4, (2 + 1)/(3 + 1), (1 + 1)/(2 + 1), (0 + 1)/(1 + 1).
    assert BLEU("yes it is !", "Yes it is !") == pytest.approx((3 / 4 * 3 / 4 * 2 / 3 / 2) ** 0.25)
    assert BLEU("", "a b") == BLEU("x", "a b") == BLEU("a", "") == 0.0


@given(TEXTS, TEXTS)
def test_bleu_is_a_share(response: str, reference: str) -> None:
    assert 0.0 <= BLEU(response, reference) <= 1.0 + 1e-9
    if reference.strip():
        assert BLEU(reference, reference) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("Paris", "paris.", 1.0),
        ("The  answer\nis: a CAT!", "answer is cat", 1.0),
        ("ﬁne", "fine", 1.0),  # one letter in the first, NFKC makes it two
        ("Straße", "STRASSE", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("1.5", "15", 1.0),  # punctuation goes, within numbers too
        ("theory", "ory", 0.0),  # articles are whole words
        ("", "Paris", 0.0),
        ("...", "?!", 0.0),
        (" ? ", "?", 1.0),
    ],
)
def test_exact_match(response: str, reference: str, expected: float) -> None:
    assert EXACT(response, reference) == expected


@given(TEXTS)
def test_a_text_matches_itself(text: str) -> None:
    assert EXACT(text, f" {text}\n") == 1.0


def test_length_pays_one_per_token() -> None:
    assert LENGTH("Well, no.", "anything") == 4.0
    assert LENGTH("", "anything") == 0.0
    assert LENGTH("a " * 100, "") - LENGTH("a " * 99, "") == 1.0


def test_length_costs_beyond_what_is_free(tmp_path: Path) -> None:
    text = (FOLDER / "length_cost.py").read_text()
    for old, new in (
        ("PER_TOKEN = 1.0", "PER_TOKEN = -0.5"),
        ("FREE_TOKENS = 0", "FREE_TOKENS = 3"),
        ("MAX_TOKENS = 1_000_000", "MAX_TOKENS = 7"),
    ):
        assert text.count(f"\n{old}\n") == 1
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    file = tmp_path / "mine.py"
    file.write_text(text)
    function: Any = runpy.run_path(str(file))["reward_fn"]
    # 3 tokens are free; from 7 on nothing is added: -0.5 * 4.
    found = [function("helpful", "a " * n, "", {}) for n in (0, 3, 4, 7, 50)]
    assert found == [0.0, 0.0, -0.5, -2.0, -2.0]
