"""Answers: who gives them, how they are kept line by line, and what the reward model says of them.

A dialogue is a question with its follow-up, or a held-out prompt; both are answered alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

from tasks.config.shared import GenerationConfig
from tasks.context import RunLog
from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.errors import ClusterError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import ChatEndpoint, ChatRequest, ask_all, run_async
from tasks.evaluate.judgments import UNBOUNDED_METHOD, Score
from tasks.evaluate.questions import ModelAnswer, Question
from tasks.evaluate.report import HeldOut
from tasks.runtime.generation import Prompt, Speaker
from tasks.runtime.rows import Row
from tasks.runtime.scoring import RewardScorer

_SEEDS: Final = 2**31
# Is told how many responses have come in since it was called last.
Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Response:
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
class Dialogue:
    """What to answer, turn by turn.

    Args:
        key: the question's id, or the place of a held-out prompt: for the seed and the store.
        prompt: up to and with the first turn.
        follow_ups: what the user says after each response but the last.
        temperature: 0 is greedy.
    """

    key: int
    prompt: Prompt
    follow_ups: tuple[str, ...]
    temperature: float


def next_prompt(prompt: Prompt, follow_ups: Sequence[str], responses: Sequence[Response]) -> Prompt:
    """Return the prompt of the turn that follows these responses."""
    for response, follow_up in zip(responses, follow_ups, strict=False):
        prompt += (Message("assistant", response.text), Message("user", follow_up))
    return prompt


@dataclass(frozen=True)
class Answered:
    """One model's responses to both turns of a question."""

    question: Question
    responses: tuple[Response, ...]
    tstamp: float

    def as_answer(self, model: str) -> ModelAnswer:
        """Return it in FastChat's terms."""
        first, second = self.responses
        return ModelAnswer(
            self.question.question_id,
            model,
            (first.text, second.text),
            self.tstamp,
            (first.truncated, second.truncated),
        )

    def reward_row(self, turn: int, renderer: Renderer) -> Row | str:
        """Return the token ids of a turn with its prompt, or why there are none."""
        first, second = self.question.turns
        prompt = next_prompt((Message("user", first),), (second,), self.responses[: turn - 1])
        return reward_row(prompt, self.responses[turn - 1], renderer)


# Who answers.

# Is called for each dialogue as it is through, one at a time, from any thread.
Done = Callable[[Dialogue, Sequence[Response]], None]


class Answerer(Protocol):
    """Something that answers."""

    @property
    def draws_together(self) -> bool:
        """Whether samples depend on what else is answered in the same call."""

    def answer(self, dialogues: Sequence[Dialogue], seed: int, done: Done) -> None:
        """Answer dialogues in any order; ``done`` gets a failure for those that are left without
        an answer before that is raised.

        Those that are drawn together have one temperature and equally many turns.
        """


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

    def answer(self, dialogues: Sequence[Dialogue], seed: int, done: Done) -> None:
        """Answer all first turns together, then all second ones."""
        responses: list[list[Response]] = [[] for _ in dialogues]
        for turn in range(1 + len(dialogues[0].follow_ups)):
            prompts = [
                next_prompt(dialogue.prompt, dialogue.follow_ups, earlier)
                for dialogue, earlier in zip(dialogues, responses, strict=True)
            ]
            new = self._respond(prompts, dialogues[0].temperature, seed + turn)
            for earlier, response in zip(responses, new, strict=True):
                earlier.append(response)
        for dialogue, whole in zip(dialogues, responses, strict=True):
            done(dialogue, whole)

    def _respond(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> list[Response]:
        cfg = self.cfg.model_copy(update={"temperature": temperature})
        counted = 0

        def progress(n_done: int, total: int) -> None:
            nonlocal counted
            self.count(n_done - counted)
            counted = n_done

        replies = self.speaker.reply(prompts, cfg, seed, progress)
        responses = []
        for prompt, reply in zip(prompts, replies, strict=True):
            ids = tuple(reply.row.response_ids)
            is_cut = self.renderer.end_of_turn_id not in ids
            shortened = self.renderer.prompt_ids(prompt)[1]
            responses.append(Response(reply.text, ids, is_cut, shortened))
        return responses


class EndpointAnswerer:
    """A model on a server, asked concurrently.

    Args:
        connect: gives the endpoint when the first prompt is there: where nothing is missing, no
            server has to be started.
    """

    draws_together = False

    def __init__(
        self,
        connect: Callable[[], ChatEndpoint],
        cfg: GenerationConfig,
        count: Count = lambda n_new: None,
    ) -> None:
        self._connect = connect
        self.cfg = cfg
        self.count = count

    @cached_property
    def endpoint(self) -> ChatEndpoint:
        """The endpoint, from its first use on."""
        return self._connect()

    def answer(self, dialogues: Sequence[Dialogue], seed: int, done: Done) -> None:
        """Answer each dialogue by itself.

        Raises:
            ConfigError: a refused key or an unknown model.
            ClusterError: a spent budget, a server that answers nothing, or prompts that it left
                without an answer: a model is not compared on a part of the questions.
        """
        lost: list[str] = []

        async def ask(dialogue: Dialogue) -> list[Response]:
            responses: list[Response] = []
            for turn in range(1 + len(dialogue.follow_ups)):
                if responses and responses[-1].failure:
                    responses.append(Response("", failure=responses[-1].failure))
                    continue
                prompt = next_prompt(dialogue.prompt, dialogue.follow_ups, responses)
                seed_of_turn = mixed_seed(seed + turn, dialogue.key)
                responses.append(await self._ask(prompt, dialogue.temperature, seed_of_turn))
            return responses

        def take(dialogue: Dialogue, responses: Sequence[Response]) -> None:
            done(dialogue, responses)
            self.count(len(responses))
            lost.extend([one.failure for one in responses if one.failure][:1])

        run_async(ask_all(self.endpoint, dialogues, ask, take))
        if lost:
            cfg = self.endpoint.cfg
            raise ClusterError(
                f"{cfg.model} at {cfg.base_url} left {len(lost)} of {len(dialogues)} without an "
                f"answer; the first: {lost[0]}",
                "an answer to each",
                "run again: only what is missing is asked again",
            )

    async def _ask(self, prompt: Prompt, temperature: float, seed: int) -> Response:
        cfg = self.cfg
        reply = await self.endpoint.ask(
            ChatRequest(prompt, temperature, cfg.max_new_tokens, seed, cfg.top_p)
        )
        return Response(
            reply.text.strip(),
            truncated=reply.truncated,
            failure=reply.failure,
            requests=reply.attempts,
            tokens=reply.tokens,
        )


def mixed_seed(seed: int, key: int) -> int:
    """Return a seed for one of many draws, which does not depend on the others."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8]) % _SEEDS


# Answers that outlive the run that asked for them: only what a store lacks is asked.


def answer_questions(
    name: str,
    answerer: Answerer,
    questions: Sequence[Question],
    cfg: EvaluateConfig,
    store: LineStore,
) -> list[Answered]:
    """Answer the questions that the store lacks, each stored once both its turns are there.

    Raises:
        RlhfError: the backend cannot go on; what was answered stays in the store.
    """
    stored = _stored(name, store)

    def done(dialogue: Dialogue, responses: Sequence[Response]) -> None:
        # A batch that is answered again has some that are there already.
        if dialogue.key not in stored:
            store.append(_row(name, dialogue.key, responses))

    batches = list(question_batches(questions, cfg)) if answerer.draws_together else [questions]
    for batch in batches:
        missing = [question for question in batch if question.question_id not in stored]
        if not missing:
            continue
        if answerer.draws_together:
            # The whole batch again: a run that continues another one draws the same samples.
            seed = mixed_seed(cfg.seed, batch[0].question_id)
            answerer.answer([_dialogue(question, cfg) for question in batch], seed, done)
        else:
            answerer.answer([_dialogue(question, cfg) for question in missing], cfg.seed, done)
    stored = _stored(name, store)
    return [Answered(question, *stored[question.question_id]) for question in questions]


def question_batches(
    questions: Sequence[Question], cfg: EvaluateConfig
) -> Iterator[list[Question]]:
    """Yield the questions in parts of one temperature.

    The parts never depend on what is answered already.
    """
    groups: dict[float, list[Question]] = {}
    for question in questions:
        groups.setdefault(temperature_of(question.category, cfg), []).append(question)
    for group in groups.values():
        for start in range(0, len(group), cfg.answers.batch_questions):
            yield group[start : start + cfg.answers.batch_questions]


def temperature_of(category: str, cfg: EvaluateConfig) -> float:
    """Return the sampling temperature of a category of questions; 0 is greedy."""
    return cfg.category_temperatures.get(category, cfg.generation.temperature)


def _dialogue(question: Question, cfg: EvaluateConfig) -> Dialogue:
    first, second = question.turns
    temperature = temperature_of(question.category, cfg)
    return Dialogue(question.question_id, (Message("user", first),), (second,), temperature)


def answer_prompts(
    name: str,
    answerer: Answerer,
    prompts: Sequence[Prompt],
    cfg: EvaluateConfig,
    store: LineStore,
) -> list[Response]:
    """Answer held-out prompts, in their order; what the store has from a server is not asked again.

    Raises:
        RlhfError: the backend cannot go on; what a server answered stays in the store.
    """
    responses = {key: response for key, ((response,), _) in _stored(name, store).items()}

    def done(dialogue: Dialogue, said: Sequence[Response]) -> None:
        # What is drawn together is drawn again in one go, with the same result.
        if not answerer.draws_together:
            store.append(_row(name, dialogue.key, said))
        responses[dialogue.key] = said[0]

    missing = [
        Dialogue(index, prompt, (), cfg.generation.temperature)
        for index, prompt in enumerate(prompts)
        if index not in responses
    ]
    if missing:
        answerer.answer(missing, cfg.seed, done)
    return [responses[index] for index in range(len(prompts))]


def _row(name: str, key: int, responses: Sequence[Response]) -> dict[str, Any]:
    return {
        "model_id": name,
        "question_id": key,
        "turns": [one.text for one in responses],
        "token_ids": [None if one.token_ids is None else list(one.token_ids) for one in responses],
        "truncated": [one.truncated for one in responses],
        "shortened": [one.shortened for one in responses],
        "failure": next((one.failure for one in responses if one.failure), ""),
        "requests": sum(one.requests for one in responses),
        "tokens": sum(one.tokens for one in responses),
        "tstamp": time.time(),
    }


def _stored(name: str, store: LineStore) -> dict[int, tuple[tuple[Response, ...], float]]:
    """Return what a store has of a model by key, with its time, without what has no answer."""
    stored = {}
    for row in store.rows:
        if row["model_id"] == name and not row["failure"]:
            responses = tuple(
                Response(text, None if ids is None else tuple(ids), truncated, shortened)
                for text, ids, truncated, shortened in zip(
                    row["turns"], row["token_ids"], row["truncated"], row["shortened"], strict=True
                )
            )
            stored[int(row["question_id"])] = responses, float(row["tstamp"])
    return stored


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


# The reward model's scores of answers.


def reward_row(prompt: Prompt, response: Response, renderer: Renderer) -> Row | str:
    """Return prompt and response as token ids, or why they cannot be scored."""
    ids = response.token_ids
    if ids is None:
        try:
            ids = renderer.response_ids(response.text)[0]
        except ResponseTooLong as error:
            return f"too long for the reward model: {error.found}"
    return Row(renderer.prompt_ids(prompt)[0], ids)


def reward_judgments(
    name: str, answered: Sequence[Answered], scorer: RewardScorer, renderer: Renderer
) -> list[Score]:
    """Score both turns of every answer of a model with the reward model."""
    turns = [(one, turn) for turn in (1, 2) for one in answered]
    rows = [one.reward_row(turn, renderer) for one, turn in turns]
    totals, _ = _reward_scores(scorer, rows)
    now = time.time()
    return [
        Score(
            one.question.question_id,
            name,
            turn,
            total,
            ("reward_model", UNBOUNDED_METHOD),
            tstamp=now,
            failure=row if isinstance(row, str) else "",
        )
        for (one, turn), row, total in zip(turns, rows, totals, strict=True)
    ]


def held_out_scores(
    prompts: Mapping[Prompt, str],
    responses: Sequence[Response],
    scorer: RewardScorer,
    renderer: Renderer,
) -> HeldOut:
    """Score the responses to held-out prompts, given with their subsets, with the reward model."""
    pairs = zip(prompts, responses, strict=True)
    totals, components = _reward_scores(scorer, [reward_row(*pair, renderer) for pair in pairs])
    return HeldOut([one.text for one in responses], totals, components, list(prompts.values()))


def _reward_scores(
    scorer: RewardScorer, rows: Sequence[Row | str]
) -> tuple[list[float | None], Mapping[str, list[float | None]]]:
    """Return the score of each row, in all and by component; what is no row has none."""
    scores = scorer.score([row for row in rows if not isinstance(row, str)])

    def spread(values: list[float]) -> list[float | None]:
        in_order = iter(values)
        return [None if isinstance(row, str) else next(in_order) for row in rows]

    components = {name: spread(c.total.tolist()) for name, c in scores.components.items()}
    return spread(scores.total.tolist()), components
