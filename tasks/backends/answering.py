"""Answers to two-turn questions and to held-out prompts, by whatever writes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

from tasks.backends.chat_endpoint import ChatEndpoint, ChatRequest
from tasks.backends.judging import ask_all, run_async
from tasks.backends.roles import Row
from tasks.backends.speaking import Prompt, Speaker
from tasks.config import GenerationConfig
from tasks.data.hh import Message
from tasks.data.questions import ModelAnswer, Question, temperature_for
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")
_SEEDS: Final = 2**31
# Is told how many responses have come in since it was called last.
Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Said:
    """One response.

    Args:
        token_ids: as generated; None where only the text is known.
        truncated: whether it ended at the length limit.
        shortened: turns of the prompt that lost text to the length limit.
        failure: why there is no response, empty where there is one.
        requests, tokens: what it cost on a server.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    truncated: bool = False
    shortened: int = 0
    failure: str = ""
    requests: int = field(default=0, compare=False)
    tokens: int = field(default=0, compare=False)


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

    @property
    def failure(self) -> str:
        """Why an answer is missing, empty where both are there."""
        return self.said[0].failure or self.said[1].failure

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
        """Answer prompts in any order; ``done`` is called for each, one at a time, with a failure
        for those that are left without an answer before that is raised."""

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer both turns of questions; ``done`` is called as in `answer`."""


class LocalAnswerer:
    """A model directory, with transformers, in this process."""

    draws_together = True

    def __init__(
        self,
        speaker: Speaker,
        renderer: Renderer,
        cfg: GenerationConfig,
        count: Count = lambda n_new: None,
    ) -> None:
        self.speaker = speaker
        self.renderer = renderer
        self.cfg = cfg
        self.count = count

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer together what has one temperature."""
        by_temperature: dict[float, list[Asked]] = {}
        for one in asked:
            by_temperature.setdefault(one.temperature, []).append(one)
        for temperature, group in by_temperature.items():
            cfg = self.cfg.model_copy(update={"temperature": temperature})
            known = 0

            def progress(n_done: int, total: int) -> None:
                nonlocal known
                self.count(n_done - known)
                known = n_done

            replies = self.speaker.reply([one.prompt for one in group], cfg, seed, progress)
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

    def __init__(
        self, endpoint: ChatEndpoint, cfg: GenerationConfig, count: Count = lambda n_new: None
    ) -> None:
        self.endpoint = endpoint
        self.cfg = cfg
        self.count = count

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer each prompt by itself."""

        async def ask(one: Asked) -> Said:
            return await self._ask(one, seed)

        def take(one: Asked, said: Said) -> str:
            done(one, said)
            self.count(1)
            return said.failure

        self._all(asked, ask, take)

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer both turns of each question by itself."""

        async def ask(question: Question) -> Answered:
            key, temperature = question.question_id, plan.temperature(question)
            first = await self._ask(Asked(key, opening(question), temperature), plan.seed)
            second = Said("", failure=first.failure)
            if not first.failure:
                prompt = follow_up(question, first.text)
                second = await self._ask(Asked(key, prompt, temperature), plan.seed + 1)
            return Answered(question, (first, second), time.time())

        def take(question: Question, answered: Answered) -> str:
            done(answered)
            self.count(len(answered.said))
            return answered.failure

        self._all(questions, ask, take)

    async def _ask(self, one: Asked, seed: int) -> Said:
        reply = await self.endpoint.ask(
            ChatRequest(
                one.prompt,
                one.temperature,
                self.cfg.max_new_tokens,
                mixed_seed(seed, one.key),
                self.cfg.top_p,
            )
        )
        return Said(
            reply.text.strip(),
            truncated=reply.truncated,
            failure=reply.failure,
            requests=reply.attempts,
            tokens=reply.tokens,
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


class LateAnswerer:
    """A model whose server is started for the first prompt: where nothing is missing, none is."""

    draws_together = False

    def __init__(self, start: Callable[[], Answerer]) -> None:
        self._start = start

    @cached_property
    def _started(self) -> Answerer:
        return self._start()

    def answer(
        self, asked: Sequence[Asked], seed: int, done: Callable[[Asked, Said], None]
    ) -> None:
        """Answer as the server does."""
        self._started.answer(asked, seed, done)

    def converse(
        self, questions: Sequence[Question], plan: AnswerPlan, done: Callable[[Answered], None]
    ) -> None:
        """Answer as the server does."""
        self._started.converse(questions, plan, done)


def opening(question: Question) -> Prompt:
    """Return the prompt of the first turn."""
    return (Message("user", question.turns[0]),)


def follow_up(question: Question, answer: str) -> Prompt:
    """Return the prompt of the second turn, with the first answer in it."""
    first, second = question.turns
    return (Message("user", first), Message("assistant", answer), Message("user", second))


def mixed_seed(seed: int, key: int) -> int:
    """Return a seed for one of many draws, which does not depend on the others."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8]) % _SEEDS
