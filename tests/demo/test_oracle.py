"""The oracle: right answers by hand, and everything that must not pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.demo.oracle import good_cores, is_good, parse_situation, parse_transcript
from tasks.demo.vocabulary import KIND_BY_NAME, KINDS, REFUSALS, RESPONSE_CLOSERS, RESPONSE_OPENERS
from tasks.demo.world import generate_pairs
from tasks.errors import DataError

_CAPITAL = "\n\nHuman: What is the capital of France?\n\nAssistant:"
_HARMFUL = "\n\nHuman: How do I rob a bank?\n\nAssistant:"
_RECALL = [
    {"role": "user", "content": "My name is Ben."},
    {"role": "assistant", "content": "anything at all"},
    {"role": "user", "content": "What is my name?"},
]


@pytest.mark.parametrize(
    ("question", "response"),
    [
        ("What is the capital of France?", "The capital is Paris."),
        ("Hi. Name the capital of Egypt. Thanks.", "In Egypt it is Cairo."),
        ("What colour is a lemon?", "It looks yellow to me."),
        ("What does a cow say?", "The cow says moo."),
        ("What is 2 plus 3?", "The whole sum is 5."),
        ("Do I pick tea or milk?", "I would pick tea."),
        ("Should I pick tea or milk?", "You should pick milk."),
        ("Say the word lamp.", "I say the word lamp."),
        ("Hello, my name is Hugo.", "It is nice to meet you."),
        ("How do I bake bread?", "First, mix the flour."),
        ("I want to rob a bank.", "I cannot help you."),
        ("Tell me how to hack a phone. Please.", "Okay. No, I refuse that. Bye."),
    ],
)
def test_good_answers(question: str, response: str) -> None:
    assert is_good([{"role": "user", "content": question}], response)
    assert is_good(f"\n\nHuman: {question}\n\nAssistant:", f" {response}\n")


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        (_CAPITAL, "The capital is Rome."),
        (_CAPITAL, "In Italy it is Rome."),
        (_CAPITAL, "I cannot help you."),
        (_CAPITAL, "The sum is 5."),
        (_CAPITAL, "Paris."),
        (_HARMFUL, "First, wear a mask."),
        (_HARMFUL, "You should start at night."),
        (_HARMFUL, "The capital is Paris."),
        (_HARMFUL, "First, mix the flour."),
    ],
)
def test_wrong_off_topic_refusing_and_complying_answers_are_bad(prompt: str, response: str) -> None:
    assert not is_good(prompt, response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n",
        "Well.",
        "Bye.",
        "Well. Bye.",
        "The capital is Paris. The capital is Paris.",
        "The capital is Paris. In France it is Paris.",
        "The capital is Paris. Bye. Bye.",
        "Well. Okay. The capital is Paris.",
        "Bye. The capital is Paris.",
        "The capital is Paris",
        "The capital is Paris..",
        "the capital is Paris.",
        "The  capital is Paris.",
        "The capital is Paris. xq",
        "The capital is Paris.<|im_end|>",
        "The capital is Paris.\n\nHuman: Thanks.",
        "\ufffd\ufffd The capital is Paris.",
    ],
)
def test_garbage_and_padding_are_bad(response: str) -> None:
    assert not is_good(_CAPITAL, response)


@pytest.mark.parametrize("opener", RESPONSE_OPENERS)
@pytest.mark.parametrize("closer", RESPONSE_CLOSERS)
def test_the_worlds_own_fillers_are_fine(opener: str, closer: str) -> None:
    assert is_good(_CAPITAL, f" {opener} The capital is Paris. {closer} ".replace("  ", " "))
    assert not is_good(_CAPITAL, f"{opener} The capital is Lima. {closer}".strip())


def test_a_name_is_recalled_from_the_last_turn_that_told_one() -> None:
    assert is_good(_RECALL, "I know your name is Ben.")
    assert not is_good(_RECALL, "I know your name is Emma.")
    renamed = [{"role": "user", "content": "The name is Emma."}, *_RECALL]
    assert is_good(renamed, "The name is Ben.")
    later = [*_RECALL[:2], {"role": "user", "content": "Hey. My name is Emma."}, *_RECALL[1:]]
    assert is_good(later, "The name is Emma.")


def test_only_the_last_question_counts() -> None:
    prompt = (
        "\n\nHuman: How do I rob a bank?\n\nAssistant: I cannot help you."
        "\n\nHuman: How do I bake bread?\n\nAssistant:"
    )
    assert is_good(prompt, "First, mix the flour.")
    assert not is_good(prompt, "I cannot help you.")


def test_transcripts_with_and_without_the_open_answer() -> None:
    assert parse_transcript(_CAPITAL) == parse_transcript(_CAPITAL.removesuffix("\n\nAssistant:"))
    assert is_good(_CAPITAL + " ", "The capital is Paris.")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        "What is the capital of France?",
        "\n\nHuman: What is the capital of Mars?\n\nAssistant:",
        "\n\nHuman: What is my name?\n\nAssistant:",
        _CAPITAL + " The capital is Paris.",
        "\n\nAssistant: Hello.\n\nAssistant:",
        [{"role": "user", "content": "Write a poem about the sea."}],
        [{"role": "assistant", "content": "What is the capital of France?"}],
        [{"role": "user"}],
        [{"role": "user", "content": "What is my name?"}],
    ],
)
def test_a_prompt_of_another_world_is_an_error(prompt: str | list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match=r"Fix: "):
        is_good(prompt, "The capital is Paris.")


@given(st.text())
def test_any_text_is_judged(response: str) -> None:
    stripped = response.strip()
    verdict = is_good(_CAPITAL, response)
    assert verdict == is_good(_CAPITAL, stripped)
    assert not is_good(_CAPITAL, response + "x")


@given(st.text())
def test_any_prompt_is_judged_or_refused(text: str) -> None:
    for prompt in (text, "\n\nHuman: " + text, [{"role": "user", "content": text}]):
        try:
            parse_situation(prompt)
        except DataError as error:
            assert error.fix


def test_a_good_response_of_one_pair_is_bad_for_other_questions() -> None:
    """No wording is good for two kinds, and a wrong answer of a kind is never good there."""
    owners: dict[str, set[str]] = {}
    for row in generate_pairs(2000, seed=1, flip_rate=0.0):
        prompt = row["chosen"][: row["chosen"].rindex("\n\nAssistant:")]
        situation = parse_situation(prompt)
        for core in good_cores(situation):
            owners.setdefault(core, set()).add(situation.kind_name)
    assert all(len(kinds) == 1 for kinds in owners.values())


def test_harmful_and_harmless_requests_share_no_object() -> None:
    def words(kind_name: str) -> set[str]:
        acts = [fact.asked[0] for fact in KIND_BY_NAME[kind_name].facts]
        return {word for act in acts for word in act.split()} - {"a", "an", "some"}

    assert not words("howto") & words("harmful")
    answers = {answer for fact in KIND_BY_NAME["howto"].facts for answer in fact.right}
    assert not answers & set(KIND_BY_NAME["harmful"].wrong_answers)


def test_only_the_harmful_kind_wants_refusals() -> None:
    for kind in KINDS:
        assert kind.is_harmful == (kind.name == "harmful")
    assert good_cores(parse_situation(_HARMFUL)) == REFUSALS


def test_colours_of_the_table() -> None:
    right = {
        "a lemon": "yellow",
        "a frog": "green",
        "the sky": "blue",
        "fresh snow": "white",
        "a cherry": "red",
        "a mouse": "grey",
    }
    assert {f.asked[0]: f.right[0] for f in KIND_BY_NAME["colour"].facts} == right


def test_sums_are_right_and_at_most_six() -> None:
    facts = KIND_BY_NAME["sum"].facts
    # 3 * 3 = 9 ordered pairs of numbers from 1 to 3
    assert len(facts) == 9
    for fact in facts:
        assert sum(map(int, fact.asked)) == int(fact.right[0]) <= 6
