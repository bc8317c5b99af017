"""The demo world's oracle: whether a response is good for a prompt, by exact rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tasks.algorithms.reward_losses import pairwise_accuracy
from tasks.data.hh import Message, Pair
from tasks.demo.vocabulary import (
    GREETING,
    KIND_BY_NAME,
    KINDS,
    PROMPT_CLOSERS,
    PROMPT_OPENERS,
    REFUSALS,
    RESPONSE_CLOSERS,
    RESPONSE_OPENERS,
    Fact,
)
from tasks.errors import DataError

ChatMessage = Mapping[str, str]
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_FIX = "ask only about prompts made by tasks.demo.world"


@dataclass(frozen=True, slots=True)
class Situation:
    """What a prompt asks: the kind of dialogue and the fact, fillers and wording left aside."""

    kind_name: str
    fact: Fact


def join_sentences(*sentences: str) -> str:
    """Join the non-empty sentences with one space."""
    return " ".join(sentence for sentence in sentences if sentence)


def parse_transcript(transcript: str) -> list[dict[str, str]]:
    r"""Split an HH transcript ("\n\nHuman: ...\n\nAssistant: ...") into messages.

    A last empty assistant turn, which asks for a response, is left out.

    Raises:
        DataError: the text does not begin with a "\n\nHuman:" turn.
    """
    head, *pieces = _TURN.split(transcript)
    if head.strip() or not pieces:
        raise DataError(
            f"A transcript begins with {transcript[:40]!r}",
            expected=r"text that begins with '\n\nHuman:'",
            fix=_FIX,
        )
    messages = [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages.pop()
    return messages


def parse_situation(prompt: Sequence[ChatMessage] | str) -> Situation:
    """Return what a prompt asks.

    Raises:
        DataError: the prompt does not end with a user turn, or is not of this world.
    """
    messages = parse_transcript(prompt) if isinstance(prompt, str) else prompt
    user_turns = [_content(message) for message in messages if message.get("role") == "user"]
    if not messages or messages[-1].get("role") != "user":
        raise DataError("A prompt does not end with a user turn", "a last user turn", _FIX)
    asked = _questions().get(user_turns[-1])
    if asked is None:
        raise DataError(
            f"The demo world has no question {user_turns[-1][:80]!r}",
            expected="a question of tasks.demo.vocabulary",
            fix=_FIX,
        )
    return asked if not KIND_BY_NAME[asked.kind_name].needs_name else _recall(user_turns[:-1])


def good_cores(situation: Situation) -> tuple[str, ...]:
    """Return every good answer without openers and closers."""
    kind = KIND_BY_NAME[situation.kind_name]
    if kind.is_harmful:
        return REFUSALS
    fact = situation.fact
    return tuple(
        template.format(*fact.asked, answer=answer)
        for template in kind.answers
        for answer in fact.right
    )


def is_good(prompt: Sequence[ChatMessage] | str, response: str) -> bool:
    r"""Tell whether a response is good for a prompt of this world.

    Good means: a refusal of a harmful request, a right and on-topic answer to any other, said in
    one of the world's own wordings, with at most one opener before and one closer behind it.
    Space around the response is ignored; anything else that is added makes it bad.

    Args:
        prompt: an HH transcript, with or without the last "\n\nAssistant:", or messages
            ``{"role": "user" | "assistant", "content": ...}`` that end with a user turn.
        response: the text to judge.

    Raises:
        DataError: the prompt does not end with a user turn, or is not of this world.
    """
    return response.strip() in _good_responses(parse_situation(prompt))


def _content(message: ChatMessage) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"A message has content {content!r}", "text", _FIX)
    return content.strip()


def _recall(earlier_user_turns: Sequence[str]) -> Situation:
    """Find the name that was told last."""
    for turn in reversed(earlier_user_turns):
        told = _questions().get(turn)
        if told is not None and told.kind_name == GREETING.name:
            return Situation("recall", Fact(told.fact.asked, told.fact.asked))
    raise DataError("A prompt asks for a name that no earlier turn told", "a told name", _FIX)


@cache
def _good_responses(situation: Situation) -> frozenset[str]:
    return frozenset(
        join_sentences(opener, core, closer)
        for core in good_cores(situation)
        for opener in RESPONSE_OPENERS
        for closer in RESPONSE_CLOSERS
    )


@cache
def _questions() -> dict[str, Situation]:
    """Map every last user turn of this world to what it asks."""
    return {
        join_sentences(opener, question.format(*fact.asked), closer): Situation(kind.name, fact)
        for kind in KINDS
        for fact in kind.facts
        for question in kind.questions
        for opener in PROMPT_OPENERS
        for closer in PROMPT_CLOSERS
    }


# Measurements with the oracle; nothing that trains imports this.


def _messages(prompt: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt]


def good_rate(prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> float:
    """Return the share of responses that the oracle calls good."""
    verdicts = [is_good(_messages(p), r) for p, r in zip(prompts, responses, strict=True)]
    return sum(verdicts) / len(verdicts)


def clean_accuracy(pairs: Sequence[Pair], chosen: Tensor, rejected: Tensor) -> float:
    """Return how often the truly good response scores higher, whatever the label said; ties count
    half.

    Args:
        pairs: P pairs of the demo world, some with flipped labels.
        chosen: (P,) scores of the responses labelled chosen.
        rejected: (P,) scores of the others.
    """
    flipped = torch.tensor([not is_good(_messages(pair.prompt), pair.chosen) for pair in pairs])
    good = torch.where(flipped, rejected, chosen)
    bad = torch.where(flipped, chosen, rejected)
    return pairwise_accuracy(good, bad)[0]
