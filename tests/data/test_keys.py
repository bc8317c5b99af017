"""Identities of texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.data.hh import (
    ID_DIGITS,
    SPLITS,
    Message,
    first_user_turn,
    fold_many,
    has_control,
    is_taken,
    make_pair_id,
    make_prompt_id,
    normalized,
    pair_digest,
    prompt_id_of,
    prompt_key_of,
    split_codes_of,
    split_of,
    transcript_of,
    unordered_key,
)

texts = st.text(max_size=12)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), max_size=4)


@given(turns, texts, texts)
def test_fast_ids_are_the_ids(spoken: list[tuple[str, str]], chosen: str, rejected: str) -> None:
    prompt_id = make_prompt_id([Message(*turn) for turn in spoken])
    assert prompt_id_of([r for r, _ in spoken], [c for _, c in spoken]) == prompt_id
    found = pair_digest(prompt_id, chosen, rejected).hex()[:ID_DIGITS]
    assert found == make_pair_id(prompt_id, chosen, rejected)


def test_case_and_white_space_do_not_count() -> None:
    assert normalized(" Straße\t\n 1") == normalized("STRASSE\xa01") == b"strasse1"
    # The long s and the ligature are letters of another form in NFKC.
    assert normalized("\ufb01\u017fh") == normalized("FISH")
    assert normalized("a.b") != normalized("ab")


@given(texts)
def test_ascii_is_no_special_case(text: str) -> None:
    other = "é"
    assert normalized(text + other).startswith(normalized(text)) or not text.isascii()


@given(texts, texts, texts)
def test_the_label_does_not_change_the_key(prompt: str, one: str, other: str) -> None:
    p, a, b = (normalized(text) for text in (prompt, one, other))
    assert unordered_key(p, a, b) == unordered_key(p, b, a)


def test_text_at_a_border_belongs_to_its_side() -> None:
    keys = {unordered_key(b"ab", b"c", b"d"), unordered_key(b"a", b"bc", b"d"),
            unordered_key(b"a", b"b", b"cd")}  # fmt: skip
    assert len(keys) == 3


def test_prompts_are_the_same_but_for_case_and_white_space() -> None:
    turns = ["user", "assistant", "user"], ["Hi there", "yes", "more"]
    transcript = "\n\nHuman: hi  there\n\nAssistant:  Yes\n\nHuman:more"
    assert prompt_key_of(3, transcript) == prompt_key_of(3, transcript_of(*turns))
    assert prompt_key_of(1, transcript) != prompt_key_of(3, transcript)
    other = ["user", "assistant", "user"], ["Hi", "there yes", "more"]
    assert prompt_key_of(3, transcript) != prompt_key_of(3, transcript_of(*other))


def test_root_is_the_first_user_turn() -> None:
    assert first_user_turn(["user", "assistant", "user"], ["a", "b", "c"]) == "a"
    assert first_user_turn(["system", "user"], ["be kind", "a"]) == "a"
    assert first_user_turn(["assistant"], ["b"]) == "b"


def test_control_characters_ask_for_a_closer_look() -> None:
    for text in ("a\x00", "a\x01b", "\x7f", "\x1b[0m", "é\x07"):
        assert has_control(normalized(text))
    assert not has_control(normalized("a\tb\r\n\u2028é"))


def test_samples_grow_with_the_weight() -> None:
    groups = [str(number) for number in range(2000)]
    small = {group for group in groups if is_taken(group, 0, 0.3)}
    large = {group for group in groups if is_taken(group, 0, 0.6)}
    # Binomial means 600 and 1200, deviations sqrt(2000 * 0.3 * 0.7) = 20.5 and 21.9.
    assert abs(len(small) - 600) < 105 and abs(len(large) - 1200) < 110
    assert small < large
    assert all(is_taken(group, 0, 1.0) for group in groups)


@given(st.lists(st.text(max_size=4), max_size=9), st.integers(0, 3), st.floats(0, 0.4))
def test_splits_at_once_are_the_splits(groups: list[str], seed: int, share: float) -> None:
    right = [SPLITS.index(split_of(group, seed, share, 0.3)) for group in groups]
    assert split_codes_of(groups, seed, share, 0.3) == right


@given(
    st.lists(
        st.text(st.sampled_from("aB \n\u2019\u201c\u2026\xe9\u03a9\ufb01\U0001f600\xa0")),
        max_size=6,
    )
)
def test_many_texts_are_folded_like_each(texts: list[str]) -> None:
    raw = "".join(f"{text}\0" for text in texts).encode()
    assert fold_many(raw, len(texts)) == [normalized(text) for text in texts]


def test_many_texts_with_a_control_character_are_not_folded() -> None:
    assert fold_many(b"a\0b\x07\0", 2) is None
    assert fold_many(b"a\0b\0\0", 2) is None
