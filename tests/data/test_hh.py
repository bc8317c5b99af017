"""HH-RLHF rows: right values of known faults, the real file, and arbitrary text."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.hh import (
    Message,
    Pair,
    Quarantined,
    make_prompt_id,
    orient_scored,
    parse_transcript,
)
from tasks.data.quarantine import QuarantineReason
from tasks.ingest.rows import parse_line

SharedCases = Callable[[str], list[dict[str, Any]]]

H, A = "\n\nHuman: ", "\n\nAssistant: "


def parse(row: object) -> Pair | Quarantined:
    return parse_line(json.dumps(row).encode(), "demo", "source.jsonl", 7)


def parse_pair(chosen: str, rejected: str) -> Pair | Quarantined:
    return parse({"chosen": chosen, "rejected": rejected})


def as_transcript(prompt: tuple[Message, ...]) -> str:
    names = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{names[m.role]}: {m.content}" for m in prompt) + "\n\nAssistant:"


def reason_of(row: Pair | Quarantined) -> str:
    assert isinstance(row, Quarantined)
    return row.reason.value


def test_prompt_ends_at_the_last_assistant_turn() -> None:
    row = parse_pair(
        f"{H}Name a fruit.{A}Apple.{H}More?{A}Pear.", f"{H}Name a fruit.{A}Apple.{H}More?{A}No."
    )
    assert isinstance(row, Pair)
    assert row.prompt == (
        Message("user", "Name a fruit."),
        Message("assistant", "Apple."),
        Message("user", "More?"),
    )
    assert (row.chosen, row.rejected, row.n_turns, row.alternating) == ("Pear.", "No.", 4, True)
    assert (row.subset, row.source_file, row.source_line) == ("demo", "source.jsonl", 7)


def test_known_faults_have_their_right_values(shared_cases: SharedCases) -> None:
    cases = {case["id"]: case for case in shared_cases("ingest")}
    for name in ("ING-01", "ING-07"):
        row = parse(cases[name]["input"])
        assert isinstance(row, Pair)
        assert as_transcript(row.prompt) == cases[name]["expected"]["prompt"]
    expected = cases["ING-01"]["expected"]
    row = parse(cases["ING-01"]["input"])
    assert isinstance(row, Pair)
    assert row.chosen == expected["chosen_response"]
    assert row.rejected == expected["rejected_response"]
    assert row.n_turns == expected["n_turns"]
    for name in ("ING-02", "ING-04"):
        assert reason_of(parse(cases[name]["input"])) == cases[name]["expected"]["reason"]


def test_known_scored_pairs_drop_the_tie(shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("ingest") if case["id"] == "ING-09")
    oriented = [orient_scored(pair["text"], pair["score"]) for pair in case["input"]["pairs"]]
    right = case["expected"]
    assert oriented.count(None) == right["dropped_ties"]
    assert oriented[1] == (right["row1"]["chosen"], right["row1"]["rejected"])
    assert oriented[2] == (right["row2"]["chosen"], right["row2"]["rejected"])


def test_scored_rows_take_the_better_text_as_chosen() -> None:
    texts = [f"{H}q{A}worse", f"{H}q{A}better"]
    row = parse({"text": texts, "score": [0.5, 1.5]})
    assert isinstance(row, Pair)
    assert (row.chosen, row.rejected) == ("better", "worse")
    assert reason_of(parse({"text": texts, "score": [1, 1.0]})) == "tie"
    for score in ([1], [1, "2"], [True, False], [1, float("nan")], [1, None]):
        assert reason_of(parse({"text": texts, "score": score})) == "wrong_type"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"chosen": "a', "invalid_json"),
        (b"", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"9" * 10_000, "invalid_json"),
        (b'{"chosen": "\xff"}', "invalid_encoding"),
        (b'{"chosen": "\\ud800", "rejected": "a"}', "invalid_encoding"),
        (b'["a"]', "wrong_type"),
        (b'{"chosen": 1, "rejected": "a"}', "wrong_type"),
        (b'{"chosen": "a", "rejected": null}', "wrong_type"),
        (b'{"chosen": "a"}', "missing_field"),
        (b'{"\\ud800": 1}', "missing_field"),
    ],
)
def test_rows_that_are_no_pairs(line: bytes, reason: str) -> None:
    row = parse_line(line, "demo", "s", 3)
    assert reason_of(row) == reason
    assert isinstance(row, Quarantined)
    assert row.source_line == 3
    assert (row.raw + row.detail).encode()


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("hello", f"{H}q{A}a", "no_turns"),
        ("", "", "no_turns"),
        (f"intro{H}q{A}a", f"{H}q{A}b", "leading_text"),
        # One newline does not start a turn, so all of this stands before the first delimiter.
        ("Human: q\nAssistant: a", f"{H}q{A}b", "no_turns"),
        (f"{A}a", f"{A}b", "first_turn_not_human"),
        (f"{H}q", f"{H}q{A}b", "last_turn_not_assistant"),
        (f"{H}q{A}a{H}", f"{H}q{A}b{H}", "last_turn_not_assistant"),
        (f"{H}q{A}a", f"{H}r{A}b", "prompt_mismatch"),
        (f"{H}q{A}a", f"{H}q{A}x{H}q{A}b", "prompt_mismatch"),
        (f"{H}q{A}a", f"{H}q{A} \n ", "empty_response"),
        (f"{H}q{A}a", f"{H}q{A}a  ", "identical_pair"),
    ],
)
def test_pairs_that_are_left_out(chosen: str, rejected: str, reason: str) -> None:
    assert reason_of(parse_pair(chosen, rejected)) == reason


def test_content_is_stripped_at_turn_borders_only() -> None:
    turns = parse_transcript("\n\nHuman:  two  words \n\n\nAssistant:\tline one\n\n  line two\n")
    assert turns == (Message("user", "two  words"), Message("assistant", "line one\n\n  line two"))


def test_turns_of_one_role_in_a_row_are_kept_and_flagged() -> None:
    row = parse_pair(f"{H}q{H}still{A}a", f"{H}q{H}still{A}b")
    assert isinstance(row, Pair)
    assert not row.alternating
    answered = parse_pair(f"{H}q{A}x{A}a", f"{H}q{A}x{A}b")
    assert isinstance(answered, Pair)
    assert not answered.alternating


def test_ids_name_content_and_direction() -> None:
    pair, again = parse_pair(f"{H}q{A}a", f"{H}q{A}b"), parse_pair(f"{H} q {A}a", f"{H}q{A} b")
    swapped = parse_pair(f"{H}q{A}b", f"{H}q{A}a")
    assert isinstance(pair, Pair) and isinstance(again, Pair) and isinstance(swapped, Pair)
    assert pair.pair_id == again.pair_id
    assert pair.prompt_id == swapped.prompt_id
    assert pair.pair_id != swapped.pair_id
    assert make_prompt_id([Message("user", "ab")]) != make_prompt_id(
        [Message("user", "a"), Message("b", "")]
    )


def test_real_file_keeps_exactly_the_right_rows(shared_data: Path) -> None:
    path = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    with gzip.open(path, "rb") as handle:
        rows = [
            parse_line(line, "harmless-base", path.name, number)
            for number, line in enumerate(handle, start=1)
        ]
    pairs = [row for row in rows if isinstance(row, Pair)]
    left_out = {row.source_line: row.reason.value for row in rows if isinstance(row, Quarantined)}
    assert left_out == dict.fromkeys((87, 517, 926, 1104), "empty_response") | dict.fromkeys(
        (1255, 1689, 1951, 1953, 2037), "prompt_mismatch"
    )
    # 2,312 rows - 4 empty - 5 mismatched = 2,303; four of them have turns that do not alternate.
    assert len(pairs) == 2303
    flagged = [pair.source_line for pair in pairs if not pair.alternating]
    assert flagged == [668, 764, 1320, 1850]
    lines = {pair.source_line: pair.prompt_id for pair in pairs}
    assert lines[251] == lines[1484]
    assert lines[1263] == lines[1453]
    # 2,310 distinct prompts in 2,312 rows; each of the 9 rows left out has a prompt of its own.
    assert len(set(lines.values())) == 2310 - 9
    assert len({pair.pair_id for pair in pairs}) == 2303


def test_real_file_has_the_right_number_of_turns(shared_data: Path) -> None:
    path = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    turns: Counter[str] = Counter()
    with gzip.open(path, "rb") as handle:
        for line in handle:
            for side, text in json.loads(line).items():
                turns[side] += len(parse_transcript(text))
    assert turns == {"chosen": 11520, "rejected": 11517}


fragments = st.lists(
    st.one_of(
        st.sampled_from([H, A, "\n\nHuman:", "\n\nAssistant:", "\n", " ", "\u2028", "\x00"]),
        st.text(max_size=6),
        st.just("\ud800"),
    ),
    max_size=8,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | fragments,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["chosen", "rejected", "text", "score"]), inner)
    ),
    max_leaves=6,
)


def check_row(row: Pair | Quarantined) -> None:
    if isinstance(row, Quarantined):
        assert row.reason in QuarantineReason
        assert row.raw.encode() is not None and row.detail.encode()
        return
    assert row.prompt[0].role == "user"
    assert row.chosen.strip() == row.chosen != ""
    assert row.rejected.strip() == row.rejected != ""
    assert row.chosen != row.rejected


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({"chosen": fragments, "rejected": fragments}) | json_values)
def test_any_json_value_is_kept_or_left_out(value: object) -> None:
    check_row(parse(value))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_kept_or_left_out(line: bytes) -> None:
    check_row(parse_line(line, "demo", "s", 1))


contents = st.text(min_size=1, max_size=8).map(str.strip).filter(lambda t: t and "\n\n" not in t)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(contents, contents), max_size=3), contents, contents, contents)
def test_a_written_conversation_is_read_back(
    history: list[tuple[str, str]], question: str, chosen: str, rejected: str
) -> None:
    head = "".join(f"{H}{asked}{A}{answered}" for asked, answered in history) + f"{H}{question}{A}"
    row = parse_pair(head + chosen, head + rejected)
    if chosen == rejected:
        assert reason_of(row) == "identical_pair"
        return
    assert isinstance(row, Pair)
    assert row.n_turns == 2 * len(history) + 2
    assert (row.prompt[-1].content, row.chosen, row.rejected) == (question, chosen, rejected)


PAIR_ROW = {"chosen": f"{H}q{A}yes", "rejected": f"{H}q{A}no"}
SCORED_ROW = {"text": [f"{H}q{A}no", f"{H}q{A}yes"], "score": [0, 1]}


def test_logged_probabilities_follow_their_response() -> None:
    row = parse(PAIR_ROW | {"chosen_logprob": -3, "rejected_logprob": -4.5})
    assert isinstance(row, Pair)
    assert row.logged == (-3.0, -4.5)
    # The second text scores higher and so is the chosen one.
    scored = parse(SCORED_ROW | {"logprob": [-1.0, -2.0]})
    assert isinstance(scored, Pair)
    assert (scored.chosen, scored.logged) == ("yes", (-2.0, -1.0))
    for bare in (PAIR_ROW, SCORED_ROW, PAIR_ROW | {"chosen_logprob": None}):
        found = parse(bare)
        assert isinstance(found, Pair)
        assert found.logged is None


@pytest.mark.parametrize(
    "extra",
    [
        {"chosen_logprob": -3.0},  # one without the other
        {"chosen_logprob": -3.0, "rejected_logprob": None},
        {"chosen_logprob": "-3", "rejected_logprob": -1.0},
        {"chosen_logprob": 0.5, "rejected_logprob": -1.0},  # a probability above 1
        {"chosen_logprob": float("nan"), "rejected_logprob": -1.0},
        {"chosen_logprob": float("-inf"), "rejected_logprob": -1.0},
        {"chosen_logprob": True, "rejected_logprob": -1.0},
        {"chosen_logprob": -(10**400), "rejected_logprob": -1.0},
    ],
)
def test_unusable_logged_probability_is_a_wrong_type(extra: dict[str, object]) -> None:
    assert reason_of(parse(PAIR_ROW | extra)) == "wrong_type"


@pytest.mark.parametrize("logprob", [-1.0, [-1.0], [-1.0, None], [-1.0, 2.0], "no"])
def test_unusable_logged_pair_is_a_wrong_type(logprob: object) -> None:
    assert reason_of(parse(SCORED_ROW | {"logprob": logprob})) == "wrong_type"


def test_margin_is_given_or_the_difference_of_the_scores() -> None:
    given, scored, bare = parse(PAIR_ROW | {"margin": 3}), parse(SCORED_ROW), parse(PAIR_ROW)
    assert isinstance(given, Pair) and isinstance(scored, Pair) and isinstance(bare, Pair)
    assert (given.margin, scored.margin, bare.margin) == (3.0, 1.0, None)
    for value in (-1, "3", True, float("inf"), 10**400):
        assert reason_of(parse(PAIR_ROW | {"margin": value})) == "wrong_type"
    assert reason_of(parse(SCORED_ROW | {"score": [-(10**400), 1]})) == "wrong_type"
