"""Answers to two-turn questions and to held-out prompts, by whatever writes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from tasks.backends.chat_endpoint import ChatEndpoint, ChatReply, ChatRequest
from tasks.backends.judging import ask_all, run_async
from tasks.backends.roles import Row
from tasks.backends.speaking import Prompt, Speaker
from tasks.config import GenerationConfig
from tasks.data.hh import Message
from tasks.data.line_store import LineStore
from tasks.data.questions import ModelAnswer, Question, temperature_for
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")
_SEEDS: Final = 2**31


@dataclass(frozen=True, slots=True)
class Said:
    """One response.

    Args:
        token_ids: as generated; None where only the text is known.
        truncated: whether it ended at the length limit.
        shortened: turns of the prompt that lost text to the length limit.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    truncated: bool = False
    shortened: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how to answer it.

    Args:
        key: a number of its own, for the seed.
    """

    key: int
    prompt: Prompt
    temperature: float


@dataclass(frozen=True)
class AnswerPlan:
    """What is asked.

    Args:
        temperatures: by category.
        default_temperature: of all other categories, and of the held-out prompts.
        batch_questions: answered together.
    """

    questions: Sequence[Question]
    temperatures: Mapping[str, float]
    default_temperature: float
    batch_questions: int
    seed: int

    def temperature(self, question: Question) -> float:
        """Return the temperature of a question; 0 is greedy."""
        return temperature_for(question.category, self.temperatures, self.default_temperature)

    def batches(self) -> Iterator[list[Question]]:
        """Yield the questions in parts of one temperature.

        The parts never depend on what is answered already, so that a run that continues another
        one draws the same samples.
        """
        groups: dict[float, list[Question]] = {}
        for question in self.questions:
            groups.setdefault(self.temperature(question), []).append(question)
        for group in groups.values():
            for start in range(0, len(group), self.batch_questions):
                yield group[start : start + self.batch_questions]


@dataclass(frozen=True)
class Answered:
    """One model's answers to both turns of a question."""

    question: Question
    said: tuple[Said, Said]
    tstamp: float = 0.0

    def as_answer(self, model: str) -> ModelAnswer:
        """Return it in FastChat's terms."""
        first, second = self.said
        return ModelAnswer(
            self.question.question_id,
            model,
            (first.text, second.text),
            self.tstamp,
            (first.truncated, second.truncated),
        )

    def row(self, turn: int, renderer: Renderer) -> Row | str:
        """Return the token ids of a turn with its prompt, or why there are none."""
        first, second = self.said
        said = first if turn == 1 else second
        prompt = opening(self.question) if turn == 1 else follow_up(self.question, first.text)
        response = said.token_ids
        if response is None:
            try:
                response = renderer.response_ids(said.text)[0]
            except ResponseTooLong as error:
                return f"too long for the reward model: {error.found}"
        return Row(renderer.prompt_ids(prompt)[0], response)


class Answerer(Protocol):
    """Something that answers."""

    @property
    def draws_together(self) -> bool:
        """Whether samples depend on what else is answered in the same batch."""

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer prompts in any order; ``done`` is called for each, one at a time."""

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer both turns of questions; ``done`` is called for each, one at a time."""


class LocalAnswerer:
    """A model directory, with transformers, in this process."""

    draws_together = True

    def __init__(self, speaker: Speaker, renderer: Renderer, cfg: GenerationConfig) -> None:
        self.speaker = speaker
        self.renderer = renderer
        self.cfg = cfg

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer together what has one temperature."""
        by_temperature: dict[float, list[Asked]] = {}
        for one in asked:
            by_temperature.setdefault(one.temperature, []).append(one)
        for temperature, group in by_temperature.items():
            cfg = self.cfg.model_copy(update={"temperature": temperature})
            replies = self.speaker.reply([one.prompt for one in group], cfg, seed)
            for one, reply in zip(group, replies, strict=True):
                ids = tuple(reply.row.response_ids)
                is_cut = self.renderer.end_of_turn_id not in ids
                shortened = self.renderer.prompt_ids(one.prompt)[1]
                done(one, Said(reply.text, ids, is_cut, shortened))

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer all first turns together, then all second ones."""
        seed = mixed_seed(plan.seed, questions[0].question_id)
        first: dict[int, Said] = {}
        second: dict[int, Said] = {}
        asked = [Asked(q.question_id, opening(q), plan.temperature(q)) for q in questions]
        self.answer(asked, seed, lambda one, said: first.__setitem__(one.key, said))
        again = [
            Asked(q.question_id, follow_up(q, first[q.question_id].text), plan.temperature(q))
            for q in questions
        ]
        self.answer(again, seed + 1, lambda one, said: second.__setitem__(one.key, said))
        for question in questions:
            key = question.question_id
            done(Answered(question, (first[key], second[key]), time.time()))


class EndpointAnswerer:
    """A model on a server, asked concurrently.

    What a method raises: ConfigError for a refused key or an unknown model; ClusterError for a
    spent budget, a server that answers nothing, or prompts that it left without an answer, because
    a model is not compared on a part of the questions.
    """

    draws_together = False

    def __init__(self, endpoint: ChatEndpoint, cfg: GenerationConfig) -> None:
        self.endpoint = endpoint
        self.cfg = cfg

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer each prompt by itself."""

        async def ask(one: Asked) -> ChatReply:
            return await self._ask(one, seed)

        def take(one: Asked, reply: ChatReply) -> str:
            if not reply.failure:
                done(one, _said(reply))
            return reply.failure

        self._all(asked, ask, take)

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer both turns of each question by itself."""

        async def ask(question: Question) -> tuple[ChatReply, ChatReply]:
            key, temperature = question.question_id, plan.temperature(question)
            first = await self._ask(Asked(key, opening(question), temperature), plan.seed)
            if first.failure:
                return first, first
            prompt = follow_up(question, first.text.strip())
            return first, await self._ask(Asked(key, prompt, temperature), plan.seed + 1)

        def take(question: Question, replies: tuple[ChatReply, ChatReply]) -> str:
            first, second = replies
            if not second.failure:
                done(Answered(question, (_said(first), _said(second)), time.time()))
            return second.failure

        self._all(questions, ask, take)

    async def _ask(self, one: Asked, seed: int) -> ChatReply:
        return await self.endpoint.ask(
            ChatRequest(
                one.prompt,
                one.temperature,
                self.cfg.max_new_tokens,
                mixed_seed(seed, one.key),
                self.cfg.top_p,
            )
        )

    def _all(
        self,
        items: Sequence[T],
        ask: Callable[[T], Coroutine[Any, Any, R]],
        take: Callable[[T, R], str],
    ) -> None:
        lost: list[str] = []

        def done(item: T, reply: R) -> None:
            failure = take(item, reply)
            if failure:
                lost.append(failure)

        run_async(ask_all(self.endpoint, items, ask, done))
        if lost:
            cfg = self.endpoint.cfg
            raise ClusterError(
                f"{cfg.model} at {cfg.base_url} left {len(lost)} of {len(items)} without an "
                f"answer; the first: {lost[0]}",
                "an answer to each",
                "run again: only what is missing is asked again",
            )


def _said(reply: ChatReply) -> Said:
    return Said(reply.text.strip(), truncated=reply.truncated)


def answer_questions(
    name: str,
    answerer: Answerer,
    plan: AnswerPlan,
    store: LineStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Answered]:
    """Answer the questions that the store lacks, each stored once both its turns are there.

    Raises:
        RlhfError: the backend cannot go on; what was answered stays in the store.
    """
    known = _known(name, plan.questions, store)

    def take(found: Answered) -> None:
        if found.question.question_id not in known:
            store.append(_row(name, found))
            known[found.question.question_id] = found
            progress(len(known), len(plan.questions))

    progress(len(known), len(plan.questions))
    for batch in plan.batches() if answerer.draws_together else [list(plan.questions)]:
        missing = [question for question in batch if question.question_id not in known]
        if missing:
            answerer.converse(batch if answerer.draws_together else missing, plan, take)
    return [known[question.question_id] for question in plan.questions]


def opening(question: Question) -> Prompt:
    """Return the prompt of the first turn."""
    return (Message("user", question.turns[0]),)


def follow_up(question: Question, answer: str) -> Prompt:
    """Return the prompt of the second turn, with the first answer in it."""
    first, second = question.turns
    return (Message("user", first), Message("assistant", answer), Message("user", second))


def answer_prompts(
    answerer: Answerer, prompts: Sequence[Prompt], temperature: float, seed: int
) -> list[Said]:
    """Answer held-out prompts, in their order."""
    found: dict[int, Said] = {}
    asked = [Asked(index, prompt, temperature) for index, prompt in enumerate(prompts)]
    answerer.answer(asked, seed, lambda one, said: found.__setitem__(one.key, said))
    return [found[index] for index in range(len(prompts))]


def mixed_seed(seed: int, key: int) -> int:
    """Return a seed for one of many draws, which does not depend on the others."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8]) % _SEEDS


def _row(name: str, answered: Answered) -> dict[str, Any]:
    said = answered.said
    return {
        "model_id": name,
        "question_id": answered.question.question_id,
        "turns": [one.text for one in said],
        "token_ids": [None if one.token_ids is None else list(one.token_ids) for one in said],
        "truncated": [one.truncated for one in said],
        "shortened": [one.shortened for one in said],
        "tstamp": answered.tstamp,
    }


def _known(name: str, questions: Sequence[Question], store: LineStore) -> dict[int, Answered]:
    by_id = {question.question_id: question for question in questions}
    found = {}
    for row in store.rows:
        question = by_id.get(row["question_id"])
        if row["model_id"] != name or question is None:
            continue
        first, second = (
            Said(text, None if ids is None else tuple(ids), truncated, shortened)
            for text, ids, truncated, shortened in zip(
                row["turns"], row["token_ids"], row["truncated"], row["shortened"], strict=True
            )
        )
        found[question.question_id] = Answered(question, (first, second), row["tstamp"])
    return found
