"""Answers to two-turn questions and to held-out prompts, by whatever writes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

from tasks.config.shared import GenerationConfig
from tasks.context import RunLog
from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.errors import ClusterError
from tasks.evaluate.endpoint import ChatEndpoint, ChatRequest
from tasks.evaluate.judges import ask_all, run_async
from tasks.evaluate.judgments import UNBOUNDED_METHOD, Score
from tasks.evaluate.questions import ModelAnswer, Question, temperature_for
from tasks.evaluate.report import HeldOut
from tasks.runtime.generation import Prompt, Speaker
from tasks.runtime.rows import Row
from tasks.runtime.scoring import RewardScorer

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


# What one model said to the questions and to the held-out prompts, and its reward scores.

REWARD_JUDGE = ("reward_model", UNBOUNDED_METHOD)


@dataclass
class Heard:
    """All that one model said.

    Args:
        held_out: its responses to the held-out prompts; empty for a model that is known by its
            answers only.
    """

    name: str
    answered: list[Answered]
    held_out: list[Said] = field(default_factory=list)

    @property
    def answers(self) -> list[ModelAnswer]:
        """The answers in the order of the questions."""
        return [one.as_answer(self.name) for one in self.answered]

    @property
    def shortened(self) -> int:
        """Prompts that lost text to the length limit."""
        spoken = [said for one in self.answered for said in one.said]
        return sum(said.shortened > 0 for said in (*spoken, *self.held_out))


def reward_judgments(heard: Heard, scorer: RewardScorer, renderer: Renderer) -> list[Score]:
    """Score both turns of every answer with the reward model."""
    turns = [(one, turn) for turn in (1, 2) for one in heard.answered]
    rows = [one.row(turn, renderer) for one, turn in turns]
    totals, _ = _scores(scorer, rows)
    now = time.time()
    return [
        Score(
            one.question.question_id,
            heard.name,
            turn,
            value,
            REWARD_JUDGE,
            tstamp=now,
            failure=row if isinstance(row, str) else "",
        )
        for (one, turn), row, value in zip(turns, rows, totals, strict=True)
    ]


def held_out_scores(
    heard: Heard,
    prompts: Sequence[Prompt],
    subsets: Sequence[str],
    scorer: RewardScorer,
    renderer: Renderer,
) -> HeldOut:
    """Score the responses to the held-out prompts with the reward model."""
    rows = [_heard_row(p, said, renderer) for p, said in zip(prompts, heard.held_out, strict=True)]
    totals, components = _scores(scorer, rows)
    return HeldOut([said.text for said in heard.held_out], totals, components, subsets)


def _heard_row(prompt: Prompt, said: Said, renderer: Renderer) -> Row | str:
    response = said.token_ids
    if response is None:
        try:
            response = renderer.response_ids(said.text)[0]
        except ResponseTooLong as error:
            return error.found
    return Row(renderer.prompt_ids(prompt)[0], response)


def _scores(
    scorer: RewardScorer, rows: Sequence[Row | str]
) -> tuple[list[float | None], Mapping[str, list[float | None]]]:
    """Return the score of each row, in all and by component; what is no row has none."""
    places = [index for index, row in enumerate(rows) if not isinstance(row, str)]
    found = scorer.score([row for row in rows if not isinstance(row, str)])

    def spread(values: list[float]) -> list[float | None]:
        by_place = dict(zip(places, values, strict=True))
        return [by_place.get(index) for index in range(len(rows))]

    components = {name: spread(c.total.tolist()) for name, c in found.components.items()}
    return spread(found.total.tolist()), components


# Answers that outlive the run that asked for them: only what a store lacks is asked.


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
        if found.question.question_id in known:
            return
        store.append(_row(name, found.question.question_id, found.said, found.tstamp))
        if not found.failure:
            known[found.question.question_id] = found
            progress(len(known), len(plan.questions))

    progress(len(known), len(plan.questions))
    for batch in plan.batches() if answerer.draws_together else [list(plan.questions)]:
        missing = [question for question in batch if question.question_id not in known]
        if missing:
            answerer.converse(batch if answerer.draws_together else missing, plan, take)
    return [known[question.question_id] for question in plan.questions]


def answer_prompts(
    name: str, answerer: Answerer, prompts: Sequence[Prompt], plan: AnswerPlan, store: LineStore
) -> list[Said]:
    """Answer held-out prompts, in their order; what the store has from a server is not asked again.

    Raises:
        RlhfError: the backend cannot go on; what a server answered stays in the store.
    """
    found = {index: said for index, ((said,), _) in _stored(name, store).items()}

    def take(one: Asked, said: Said) -> None:
        # What is drawn together is drawn again in one go, with the same result.
        if not answerer.draws_together:
            store.append(_row(name, one.key, (said,), time.time()))
        if not said.failure:
            found[one.key] = said

    asked = [
        Asked(index, prompt, plan.default_temperature)
        for index, prompt in enumerate(prompts)
        if index not in found
    ]
    if asked:
        answerer.answer(asked, plan.seed, take)
    return [found[index] for index in range(len(prompts))]


class ResponseCount:
    """Tells how many responses of all models are there; stored ones count when their model is
    through."""

    def __init__(self, log: RunLog, per_model: int, n_models: int) -> None:
        self._log, self._per_model, self._total = log, per_model, per_model * n_models
        self._done = self._limit = 0
        self._name = ""

    def begin(self, index: int, name: str) -> None:
        """Go on with a model, by its place."""
        self._done, self._limit = index * self._per_model, (index + 1) * self._per_model
        self._name = name
        self(0)

    def __call__(self, n_new: int) -> None:
        """Count new responses."""
        self._done = min(self._done + n_new, self._limit, self._total)
        self._log.progress(self._done, self._total, f"answers, {self._name}")


def _row(name: str, key: int, said: Sequence[Said], tstamp: float) -> dict[str, Any]:
    """Return a row of a store.

    Args:
        key: the question's id, or the place of a held-out prompt.
    """
    return {
        "model_id": name,
        "question_id": key,
        "turns": [one.text for one in said],
        "token_ids": [None if one.token_ids is None else list(one.token_ids) for one in said],
        "truncated": [one.truncated for one in said],
        "shortened": [one.shortened for one in said],
        "failure": next((one.failure for one in said if one.failure), ""),
        "requests": sum(one.requests for one in said),
        "tokens": sum(one.tokens for one in said),
        "tstamp": tstamp,
    }


def _stored(name: str, store: LineStore) -> dict[int, tuple[tuple[Said, ...], float]]:
    """Return what a store has of a model by key, without what was left without an answer."""
    found = {}
    for row in store.rows:
        if row["model_id"] != name or row.get("failure"):
            continue
        said = tuple(
            Said(text, None if ids is None else tuple(ids), truncated, shortened)
            for text, ids, truncated, shortened in zip(
                row["turns"], row["token_ids"], row["truncated"], row["shortened"], strict=True
            )
        )
        found[int(row["question_id"])] = (said, float(row["tstamp"]))
    return found


def _known(name: str, questions: Sequence[Question], store: LineStore) -> dict[int, Answered]:
    stored = _stored(name, store)
    found = {}
    for question in questions:
        if question.question_id in stored:
            (first, second), tstamp = stored[question.question_id]
            found[question.question_id] = Answered(question, (first, second), tstamp)
    return found
