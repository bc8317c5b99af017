"""Row formats: what each gives, how it is told from the others, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tasks.data.hh import Refusal
from tasks.data.quarantine import QuarantineReason, default_actions
from tasks.ingest.rows import SIDES, Judge, Row, check_characters, detect_form, read_row

SharedCases = Callable[[str], list[dict[str, Any]]]
H, A = "\n\nHuman: ", "\n\nAssistant: "


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(row: dict[str, Any], form: str = "auto", **actions: Any) -> Row:
    return read_row(row, form, Judge({**default_actions(), **actions}))


def refused(row: dict[str, Any], form: str = "auto", **actions: Any) -> str:
    with pytest.raises(Refusal) as caught:
        read(row, form, **actions)
    return caught.value.reason.value


ROWS: dict[str, dict[str, Any]] = {
    "hh": {"chosen": f"{H}q{A}yes", "rejected": f"{H}q{A}no"},
    "prompt": {"prompt": "q", "chosen": "yes", "rejected": "no"},
    "messages": {"chosen": [user("q"), answer("yes")], "rejected": [user("q"), answer("no")]},
    "scored": {"text": [f"{H}q{A}no", f"{H}q{A}yes"], "score": [1, 2]},
    "verl": {
        "data_source": "helpful",
        "prompt": [user("q")],
        "response": "no",
        "reward_model": {"style": "rule", "ground_truth": "yes"},
        "extra_info": {"index": 3},
    },
}


@pytest.mark.parametrize("form", ROWS)
def test_every_format_gives_the_same_pair(form: str) -> None:
    assert detect_form(ROWS[form]) == form
    for named in (form, "auto"):
        row = read(ROWS[form], named)
        assert (row.roles, row.contents) == (["user"], ["q"])
        assert (row.chosen, row.rejected) == ("yes", "no")


def test_prompt_may_be_text_messages_or_a_transcript() -> None:
    turns = [user("q"), answer("a"), user("r")]
    for prompt in (turns, f"{H}q{A}a{H}r{A}", f"{H}q{A}a{H}r\n\nAssistant:"):
        row = read({"prompt": prompt, "chosen": " yes ", "rejected": [answer("no")]})
        assert row.contents == ["q", "a", "r"]
        assert (row.chosen, row.rejected) == ("yes", "no")
    system = [{"role": "system", "content": "be kind"}, user("q")]
    assert read({"prompt": system, "chosen": "a", "rejected": "b"}).roles == ["system", "user"]


def test_role_words_inside_a_message_are_text() -> None:
    text = "Human: is a word\nAssistant: too"
    row = read({"prompt": text, "chosen": f"I say\n{text}", "rejected": "b"})
    assert (row.contents, row.chosen) == ([text], f"I say\n{text}")
    row = read({"chosen": f"{H}{text}{A}a", "rejected": f"{H}{text}{A}b"})
    assert row.contents == [text]


def test_responses_that_repeat_their_prompt_are_cut() -> None:
    both = ROWS["messages"] | {"prompt": "q"}
    assert read(both).contents == ["q"]
    assert read(ROWS["hh"] | {"prompt": f"{H}q{A}"}).contents == ["q"]


def test_a_prompt_apart_must_be_the_one_that_the_responses_begin_with() -> None:
    head = f"{H}q{A}a{H}r{A}"
    whole = {"chosen": f"{head}yes", "rejected": f"{head}no"}
    turns = [user("q"), answer("a"), user("r")]
    lists = {side: [*turns, answer(side)] for side in SIDES}
    # The whole prompt, its first or last turns, or nothing at all.
    for prompt in (head, turns, turns[:1], turns[1:], "q", " r ", f"{H}q{A}", None, "", []):
        for row in (whole, lists):
            assert read({"prompt": prompt, **row}).contents == ["q", "a", "r"]
    for prompt in ("other", "a", f"{H}r{A}x", [user("r"), answer("a")], [*turns[:2], user("x")]):
        for row in (whole, lists):
            assert refused({"prompt": prompt, **row}) == "prompt_mismatch"
            kept = read({"prompt": prompt, **row}, prompt_mismatch="keep")
            assert kept.contents == ["q", "a", "r"]
    assert refused({"prompt": 3, **whole}) == "wrong_type"
    with_system = [{"role": "system", "content": "be kind"}, user("q")]
    row = {side: [*with_system, answer(side)] for side in SIDES}
    assert read({"prompt": "q", **row}).contents == ["be kind", "q"]


def test_an_empty_prompt_can_be_kept() -> None:
    judge = Judge({**default_actions(), "empty_prompt": "keep"})
    row = read_row({"prompt": "", "chosen": "a", "rejected": "b"}, "auto", judge)
    assert (row.contents, judge.flags) == ([""], ["empty_prompt"])


def test_verl_rows_name_their_subset_and_may_bring_the_rejected_response() -> None:
    row = ROWS["verl"]
    assert read(row).subset == "helpful"
    exported = {**row, "extra_info": {"rejected": "worse"}}
    del exported["response"]
    assert read(exported).rejected == "worse"
    del row["extra_info"]
    assert refused({k: v for k, v in row.items() if k != "response"}) == "missing_field"
    assert refused({**row, "reward_model": "x"}) == "missing_field"


def test_scores_orient_ties_drop_and_contradictions_are_found() -> None:
    rated = ROWS["prompt"] | {"score_chosen": 3, "score_rejected": 1.5}
    row = read(rated)
    assert (row.scores, row.margin) == ((3.0, 1.5), 1.5)
    assert refused(rated | {"score_rejected": 3.0}) == "tie"
    assert refused(rated | {"score_rejected": 9}) == "scores_contradict_label"
    assert refused(rated | {"score_rejected": None}) == "wrong_type"
    assert refused(rated | {"score_rejected": "1"}) == "wrong_type"
    scored = read(ROWS["scored"])
    assert (scored.scores, scored.margin) == ((2.0, 1.0), 1.0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a"}, "missing_field"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "wrong_type"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "no_turns"),
        ({"prompt": [answer("x")], "chosen": "a", "rejected": "b"}, "first_turn_not_human"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "last_turn_not_assistant"),
        ({"prompt": "q", "chosen": [user("x")], "rejected": "b"}, "last_turn_not_assistant"),
        ({"prompt": "q", "chosen": " ", "rejected": "b"}, "empty_response"),
        ({"prompt": "q", "chosen": "b", "rejected": "b "}, "identical_pair"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": [user("q"), answer("a"), user("")], "chosen": "a", "rejected": "b"},
         "empty_prompt"),
        ({"chosen": f"{H}{A}a", "rejected": f"{H}{A}b"}, "empty_prompt"),
        ({"chosen": f"{H}q{A}a{H} \u3000{A}b", "rejected": f"{H}q{A}a{H} \u3000{A}c"},
         "empty_prompt"),
        ({"prompt": "q", "chosen": {"a": 1}, "rejected": "b"}, "wrong_type"),
        ({"chosen": [], "rejected": []}, "no_turns"),
        ({"chosen": [user("q")], "rejected": [user("q")]}, "last_turn_not_assistant"),
        ({"chosen": [{"role": "bot", "content": ""}], "rejected": []}, "wrong_type"),
        ({"chosen": [user("q"), answer("a")], "rejected": "b"}, "wrong_type"),
        ({"chosen": [user("q"), answer("a")], "rejected": [user("r"), answer("b")]},
         "prompt_mismatch"),
        ({"prompt": "q", "chosen": "\ud800", "rejected": "b"}, "invalid_encoding"),
        ({"response": "a", "prompt": "q"}, "missing_field"),
    ],
)  # fmt: skip
def test_refused_rows(row: dict[str, Any], reason: str) -> None:
    assert refused(row) == reason


def test_a_named_format_is_not_guessed() -> None:
    assert refused(ROWS["prompt"], "hh") == "no_turns"
    assert refused(ROWS["hh"], "messages") == "wrong_type"


def test_mismatch_that_is_kept_is_cut_at_the_first_different_answer() -> None:
    # The shape of the known case: the rejected conversation ends two turns earlier.
    row = {
        "chosen": f"{H}Hi.{A}Hello, what next?{H}A tale.{A}Once upon a time.",
        "rejected": f"{H}Hi.{A}Go away.",
    }
    assert refused(row) == "prompt_mismatch"
    kept = read(row, prompt_mismatch="keep")
    assert kept.contents == ["Hi."]
    assert (kept.chosen, kept.rejected) == ("Hello, what next?", "Go away.")
    other_question = {"chosen": f"{H}q{A}a", "rejected": f"{H}r{A}b"}
    assert refused(other_question, prompt_mismatch="keep") == "prompt_mismatch"


def test_kept_reasons_become_flags() -> None:
    judge = Judge({**default_actions(), "empty_response": "keep", "identical_pair": "keep"})
    row = read_row({"prompt": "q", "chosen": "", "rejected": ""}, "auto", judge)
    assert (row.chosen, row.rejected) == ("", "")
    assert judge.flags == ["empty_response", "identical_pair"]


def test_control_characters_are_found_but_not_tabs_and_line_ends() -> None:
    judge = Judge(default_actions())
    check_characters(Row(["user"], ["a\tb\r\nc\u2028"], "d", "e"), judge)
    assert judge.flags == []
    check_characters(Row(["user"], ["a"], "d\x1b[0m", "e"), judge)
    assert judge.flags == ["control_characters"]
    strict = Judge({**default_actions(), "control_characters": "drop"})
    with pytest.raises(Refusal) as caught:
        check_characters(Row(["user"], ["a\x00"], "d", "e"), strict)
    assert caught.value.reason is QuarantineReason.CONTROL_CHARACTERS
    assert json.dumps(caught.value.detail)


def test_known_identical_pair_is_no_pair(shared_cases: SharedCases) -> None:
    # Nothing may look for the first difference of two responses that have none.
    case = next(case for case in shared_cases("ingest") if case["id"] == "ING-05")
    texts = {side: " ".join(map(str, case["input"][f"{side}_ids"])) for side in SIDES}
    assert refused({"prompt": "q", **texts}) == case["expected"]["reason"]
