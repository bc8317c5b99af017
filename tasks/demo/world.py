"""The demo world: seeded preference pairs in HH-RLHF's text format, with a known right answer.

Ten kinds of small dialogue (see ``tasks.demo.vocabulary``). Which response of a pair is good
depends on the prompt: a refusal is good for a harmful request and bad for any other; a right answer
to the question asked is good, a wrong one, or a right one to another question, is bad. Optional
openers and closers on prompts and responses make thousands of prompts distinct and keep length
uninformative.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tasks.artifacts import appearing
from tasks.demo.oracle import Situation, good_cores, join_sentences
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
    Kind,
)
from tasks.errors import ConfigError

MAX_PAIRS: Final = 50_000
"""Distinct prompts that a world is asked for at most; it could make a few times as many."""

_EARLIER_EXCHANGE_RATE: Final = 0.08
_OFF_TOPIC_RATE: Final = 0.35
_NEEDLESS_REFUSAL_RATE: Final = 0.35
_SPEAKERS: Final = {"user": "Human", "assistant": "Assistant"}


def generate_pairs(n_pairs: int, *, seed: int, flip_rate: float = 0.1) -> Iterator[dict[str, str]]:
    r"""Yield preference pairs with distinct prompts, one good and one bad response each.

    A row is {"chosen": transcript, "rejected": transcript}; the two share everything up to and
    including the last "\n\nAssistant:". The same arguments give the same rows on any machine.

    Args:
        n_pairs: rows to make, 1 to ``MAX_PAIRS``.
        seed: seed of the world's own random generator; the global one is not touched.
        flip_rate: probability that a row's labels are swapped, 0 to 1.

    Raises:
        ConfigError: ``n_pairs`` or ``flip_rate`` is out of range.
    """
    if not 1 <= n_pairs <= MAX_PAIRS:
        raise ConfigError(
            f"The demo world was asked for {n_pairs} pairs",
            expected=f"1 to {MAX_PAIRS} pairs, since every prompt is distinct",
            fix="lower n_pairs, or read a real preference file",
        )
    if not 0.0 <= flip_rate <= 1.0:
        raise ConfigError(f"flip_rate is {flip_rate}", "a probability from 0 to 1", "change it")
    return _pairs(n_pairs, random.Random(seed), flip_rate)


def write_pairs(path: str | Path, n_pairs: int, seed: int, flip_rate: float = 0.1) -> Path:
    """Write the rows of ``generate_pairs`` as JSON lines; the file appears whole or not at all."""
    return write_json_lines(path, generate_pairs(n_pairs, seed=seed, flip_rate=flip_rate))


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write one JSON object a line; the file appears whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        appearing(target) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as stream,
    ):
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return target


def to_transcript(messages: Sequence[Mapping[str, str]]) -> str:
    r"""Render messages as an HH transcript that ends with "\n\nAssistant:" to be continued."""
    turns = [f"\n\n{_SPEAKERS[message['role']]}: {message['content']}" for message in messages]
    return "".join(turns) + "\n\nAssistant:"


def _pairs(n_pairs: int, rng: random.Random, flip_rate: float) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    weights = [kind.weight for kind in KINDS]
    while len(seen) < n_pairs:
        situation = _draw_situation(rng, rng.choices(KINDS, weights)[0])
        prompt = to_transcript(_draw_prompt(rng, situation))
        # Another prompt of the same kind, so that the mix of kinds stays as weighted.
        while prompt in seen:
            situation = _draw_situation(rng, KIND_BY_NAME[situation.kind_name])
            prompt = to_transcript(_draw_prompt(rng, situation))
        seen.add(prompt)
        good, bad = (
            _with_fillers(rng, core)
            for core in (rng.choice(good_cores(situation)), _draw_bad_core(rng, situation))
        )
        chosen, rejected = (bad, good) if rng.random() < flip_rate else (good, bad)
        yield {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}


def _draw_situation(rng: random.Random, kind: Kind) -> Situation:
    return Situation(kind.name, rng.choice(kind.facts))


def _draw_prompt(rng: random.Random, situation: Situation) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    if KIND_BY_NAME[situation.kind_name].needs_name:
        told = next(fact for fact in GREETING.facts if fact.asked == situation.fact.asked)
        messages += _exchange(rng, Situation(GREETING.name, told))
    if rng.random() < _EARLIER_EXCHANGE_RATE:
        earlier = [kind for kind in KINDS if not kind.needs_name and kind is not GREETING]
        messages += _exchange(rng, _draw_situation(rng, rng.choice(earlier)))
    return [*messages, {"role": "user", "content": _ask(rng, situation)}]


def _exchange(rng: random.Random, situation: Situation) -> list[dict[str, str]]:
    """Draw an earlier turn of the user and its good answer, the latter without fillers."""
    return [
        {"role": "user", "content": _ask(rng, situation)},
        {"role": "assistant", "content": rng.choice(good_cores(situation))},
    ]


def _ask(rng: random.Random, situation: Situation) -> str:
    question = rng.choice(KIND_BY_NAME[situation.kind_name].questions)
    text = question.format(*situation.fact.asked)
    return join_sentences(rng.choice(PROMPT_OPENERS), text, rng.choice(PROMPT_CLOSERS))


def _with_fillers(rng: random.Random, core: str) -> str:
    return join_sentences(rng.choice(RESPONSE_OPENERS), core, rng.choice(RESPONSE_CLOSERS))


def _draw_bad_core(rng: random.Random, situation: Situation) -> str:
    """Draw an off-topic answer, a needless refusal, or a wrong (or harmful) answer."""
    kind = KIND_BY_NAME[situation.kind_name]
    draw = rng.random()
    if draw < _OFF_TOPIC_RATE:
        others = [other for other in KINDS if other is not kind and not other.is_harmful]
        return rng.choice(good_cores(_draw_situation(rng, rng.choice(others))))
    if draw < _OFF_TOPIC_RATE + _NEEDLESS_REFUSAL_RATE and not kind.is_harmful:
        return rng.choice(REFUSALS)
    fact = situation.fact
    wrong = [answer for answer in kind.wrong_answers if answer not in fact.right]
    return rng.choice(kind.answers).format(*fact.asked, answer=rng.choice(wrong))


# Two-turn questions about the demo world, in FastChat's ``question.jsonl`` format.

# Category, then for each turn: kind, row of its table, wording.
_Turn = tuple[str, int, int]
_SINGLE_KINDS: Final = ("capital", "colour", "sound", "sum", "choice", "repeat", "howto", "harmful")
_FIRST_QUESTION_ID: Final = 1


def demo_questions() -> list[dict[str, Any]]:
    """Return 24 questions, two turns each, in all nine question categories.

    Each has "question_id", "category", "turns" and "reference" (one good answer per turn). Both
    turns are prompts that ``is_good`` judges, whatever the answer to the first one was.
    """
    return [
        {
            "question_id": _FIRST_QUESTION_ID + index,
            "category": category,
            "turns": [_question(turn) for turn in turns],
            "reference": [_reference(turn) for turn in turns],
        }
        for index, (category, turns) in enumerate(_plan())
    ]


def write_questions(path: str | Path) -> Path:
    """Write ``demo_questions`` as JSON lines; the file appears whole or not at all."""
    return write_json_lines(path, demo_questions())


def _plan() -> list[tuple[str, tuple[_Turn, _Turn]]]:
    """List the turns: two questions a kind on two different facts, more where roles mix."""
    plan: list[tuple[str, tuple[_Turn, _Turn]]] = []
    for kind_name in _SINGLE_KINDS:
        for first, second in ((0, 5), (3, 4)):
            plan.append((kind_name, ((kind_name, first, 0), (kind_name, second, 1))))
    for row in (1, 2):
        # A refusal in the first turn must not make the second one a refusal, nor the reverse.
        plan.append(("harmful", (("howto", row, 0), ("harmful", row, 0))))
        plan.append(("howto", (("harmful", row, 1), ("howto", row, 1))))
    for row in range(4):
        plan.append(("recall", ((GREETING.name, row, row % 2), ("recall", row, row % 3))))
    return plan


def _question(turn: _Turn) -> str:
    kind_name, row, wording = turn
    return KIND_BY_NAME[kind_name].questions[wording].format(*_fact(kind_name, row).asked)


def _reference(turn: _Turn) -> str:
    kind_name, row, _ = turn
    return good_cores(Situation(kind_name, _fact(kind_name, row)))[0]


def _fact(kind_name: str, row: int) -> Fact:
    facts = KIND_BY_NAME[kind_name].facts
    return facts[row % len(facts)]
