"""Judges: what they are asked, what they answer, and the two that are language models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.data.rendering import Renderer
from tasks.errors import ClusterError, DataError
from tasks.evaluate.endpoint import ChatEndpoint, ChatReply, ChatRequest
from tasks.evaluate.judgments import PairJudgment, Score, Verdict, parse_rating, parse_verdict
from tasks.evaluate.prompts import JudgePrompts, Kind, Turns, judge_messages
from tasks.evaluate.questions import ModelAnswer, Question
from tasks.runtime.generation import Prompt, Speaker

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JudgeTask:
    """One judgment to make.

    Args:
        task_id: identity of judge, prompt and repeat: the same judgment has the same id.
        seed: of the sampling.
    """

    task_id: str
    kind: Kind
    messages: tuple[Message, ...]
    seed: int = 0

    def is_decided(self, text: str) -> bool:
        """Whether a text holds a decision of this kind."""
        parse: Callable[[str], object] = parse_rating if self.kind == "single" else parse_verdict
        return parse(text) is not None

    @property
    def no_decision(self) -> str:
        """What failed where a text holds none."""
        wanted = "rating from 1 to 10" if self.kind == "single" else "verdict"
        return f"no {wanted} in the judge's text"


@dataclass(frozen=True, slots=True)
class JudgeOutcome:
    """What a judge said.

    Args:
        failure: why there is no decision, empty where there is one.
        is_lost: no text at all for reasons of the connection: asked again by the next run.
        requests, tokens: what it cost.
    """

    text: str
    failure: str = ""
    is_lost: bool = False
    requests: int = 0
    tokens: int = 0


Done = Callable[[JudgeTask, JudgeOutcome], None]


class Judge(Protocol):
    """Something that judges."""

    @property
    def name(self) -> str:
        """How judgments name it."""

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Make judgments in any order; ``done`` is called for each as it is there, from any thread
        but one at a time.

        Raises:
            RlhfError: it cannot go on; what ``done`` was called for stays.
        """


@dataclass(frozen=True)
class Sampling:
    """How a language model judges."""

    temperature: float
    max_new_tokens: int
    rating_attempts: int


class EndpointJudge:
    """A model behind an endpoint, asked concurrently."""

    def __init__(self, endpoint: ChatEndpoint, sampling: Sampling) -> None:
        self.endpoint = endpoint
        self.sampling = sampling

    @property
    def name(self) -> str:
        """Model on the server."""
        return self.endpoint.cfg.model

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Ask for each judgment, with as many requests at a time as the endpoint allows.

        Raises:
            ConfigError: a refused key, or an unknown model.
            ClusterError: a spent budget, or a server that answers nothing.
        """
        run_async(ask_all(self.endpoint, tasks, self._one, done))

    async def _one(self, task: JudgeTask) -> JudgeOutcome:
        requests, tokens = 0, 0
        reply = ChatReply()
        for attempt in range(self.sampling.rating_attempts):
            reply = await self.endpoint.ask(
                ChatRequest(
                    task.messages,
                    self.sampling.temperature,
                    self.sampling.max_new_tokens,
                    task.seed + attempt,
                )
            )
            requests, tokens = requests + reply.attempts, tokens + reply.tokens
            if reply.failure or task.is_decided(reply.text):
                break
        failure = reply.failure
        if not failure and not task.is_decided(reply.text):
            cut = ", which ends at the length limit" if reply.truncated else ""
            failure = task.no_decision + cut
        is_lost = bool(reply.failure) and not reply.is_final
        return JudgeOutcome(reply.text, failure, is_lost, requests, tokens)


async def ask_all(
    endpoint: ChatEndpoint,
    items: Sequence[T],
    ask: Callable[[T], Coroutine[Any, Any, R]],
    done: Callable[[T, R], None],
) -> None:
    """Ask for all items concurrently; ``done`` runs in a thread, one call at a time.

    Raises:
        RlhfError: what stopped the endpoint, once everything under way has ended; or what ``done``
            raised.
    """
    waiting = iter(items)
    # One thread at a time: those that wait find all that has come in meanwhile handed over.
    turn = asyncio.Lock()
    replies = _Replies(done)

    async def work() -> None:
        for item in waiting:
            if endpoint.stopped is not None:
                return
            replies.add(item, await ask(item))
            async with turn:
                await asyncio.to_thread(replies.hand_over)

    async with endpoint.open():
        workers = [asyncio.create_task(work()) for _ in range(endpoint.cfg.max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            # What was answered is paid for, whatever ended the work.
            replies.hand_over()
    if endpoint.stopped is not None:
        raise endpoint.stopped


class _Replies(Generic[T, R]):
    """Replies on their way to whoever wanted them."""

    def __init__(self, done: Callable[[T, R], None]) -> None:
        self._done = done
        self._waiting: deque[tuple[T, R]] = deque()
        self._lock = threading.Lock()

    def add(self, item: T, reply: R) -> None:
        """Keep one until the next hand-over."""
        self._waiting.append((item, reply))

    def hand_over(self) -> None:
        """Call ``done`` for each that waits, one call at a time, from whichever thread.

        Raises:
            Exception: the first that ``done`` raised, once it was called for the others, too.
        """
        errors: list[Exception] = []
        with self._lock:
            while self._waiting:
                item, reply = self._waiting.popleft()
                try:
                    self._done(item, reply)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end, whether or not this thread has an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


# Grading of answers by a judge: which judgments are wanted, which are there already, the rest.

TURNS: Final = (1, 2)
_NOT_ASKED: Final = "not asked"


@dataclass(frozen=True)
class GradingPlan:
    """What to judge.

    Args:
        questions: with the references to show.
        answers: of each model, one per question.
        reference_categories: categories that are judged with the reference, where there is one.
        baseline: model that all others are compared with in pairs; None compares none.
    """

    questions: Sequence[Question]
    answers: Mapping[str, Sequence[ModelAnswer]]
    prompts: JudgePrompts
    reference_categories: Sequence[str]
    repeats: int = 1
    baseline: str | None = None
    seed: int = 0

    @property
    def without_reference(self) -> list[int]:
        """Questions of categories with references that have none."""
        return [
            question.question_id
            for question in self.questions
            if question.category in self.reference_categories and not question.reference
        ]


@dataclass(frozen=True)
class Graded:
    """All judgments of a plan.

    Args:
        scores: single-answer grading, failed judgments included.
        pairs: of both orders.
        reused: judgments that were there before.
        requests, tokens: what all of them cost.
    """

    scores: list[Score]
    pairs: list[PairJudgment]
    reused: int
    requests: int
    tokens: int


@dataclass(frozen=True)
class _Wanted:
    """A judgment: of one answer, or of two in one order.

    Args:
        models: the one that is graded, or those in places A and B.
    """

    task: JudgeTask
    question_id: int
    models: tuple[str, ...]
    turn: int
    repeat: int
    prompt_name: str


def grade(
    judge: Judge,
    plan: GradingPlan,
    store: LineStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Graded:
    """Make the judgments that the store lacks, each stored as it arrives, and return all.

    Raises:
        ClusterError: judgments were lost with the connection: a mean over the others would pass for
            the whole.
        RlhfError: the judge cannot go on.

    Whatever is raised, what arrived stays in the store.
    """
    wanted = _wanted(judge.name, plan)
    known = outcomes_in(store)
    missing = [w.task for w in wanted if w.task.task_id not in known]
    reused = len(wanted) - len(missing)
    n_done = reused
    by_id = {w.task.task_id: w for w in wanted}

    def done(task: JudgeTask, outcome: JudgeOutcome) -> None:
        nonlocal n_done
        store.append(_row(by_id[task.task_id], judge.name, outcome))
        known[task.task_id] = store.rows[-1]
        n_done += 1
        progress(n_done, len(wanted))

    progress(n_done, len(wanted))
    if missing:
        judge.judge(missing, done)
    _check_complete(wanted, store)
    rows = {w.task.task_id: known.get(w.task.task_id, {}) for w in wanted}
    return Graded(
        scores=[_score(w, judge.name, rows[w.task.task_id]) for w in wanted if len(w.models) == 1],
        pairs=_pairs([w for w in wanted if len(w.models) == 2], judge.name, rows),
        reused=reused,
        requests=sum(int(row.get("requests", 0)) for row in store.rows),
        tokens=sum(int(row.get("tokens", 0)) for row in store.rows),
    )


def outcomes_in(store: LineStore) -> dict[str, dict[str, Any]]:
    """Return the judgments of a store by id, without those that the connection lost."""
    latest = {str(row["task_id"]): row for row in store.rows}
    return {key: row for key, row in latest.items() if not row.get("is_lost")}


def _check_complete(wanted: Sequence[_Wanted], store: LineStore) -> None:
    found = outcomes_in(store)
    lost = {w.task.task_id for w in wanted} - found.keys()
    if not lost:
        return
    failures = [row["failure"] for row in store.rows if row["task_id"] in lost]
    raise ClusterError(
        f"{len(lost)} of {len(wanted)} judgments were lost; the last failure: "
        f"{failures[-1] if failures else _NOT_ASKED}",
        "a judgment of each answer, or a refusal of the request itself",
        "run the same command again once the judge answers: what was judged is stored, and only "
        "what is missing is asked",
    )


def _wanted(judge: str, plan: GradingPlan) -> list[_Wanted]:
    by_model = {
        name: {answer.question_id: answer.turns for answer in answers}
        for name, answers in plan.answers.items()
    }
    groups: list[tuple[Kind, tuple[str, ...]]] = [("single", (name,)) for name in by_model]
    for name in by_model:
        if plan.baseline is not None and name != plan.baseline:
            groups += [("pair", (name, plan.baseline)), ("pair", (plan.baseline, name))]
    return [
        _want(judge, plan, kind, _Case(question, turn, repeat, models), by_model)
        for kind, models in groups
        for repeat in range(plan.repeats)
        for turn in TURNS
        for question in plan.questions
    ]


@dataclass(frozen=True)
class _Case:
    question: Question
    turn: int
    repeat: int
    models: tuple[str, ...]


def _want(
    judge: str,
    plan: GradingPlan,
    kind: Kind,
    case: _Case,
    answers: Mapping[str, Mapping[int, Turns]],
) -> _Wanted:
    question = case.question
    has_reference = question.category in plan.reference_categories and bool(question.reference)
    prompt = plan.prompts.select(kind, case.turn, has_reference)
    shown = [answers[name][question.question_id] for name in case.models]
    messages = judge_messages(prompt, kind, case.turn, question, shown)
    identity = [judge, prompt.name, [[m.role, m.content] for m in messages], case.repeat]
    # The same text by two models is still two judgments.
    identity += [list(case.models), question.question_id, case.turn]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    seed = plan.seed + 1000 * case.repeat
    return _Wanted(
        JudgeTask(digest[:32], kind, messages, seed),
        question.question_id,
        case.models,
        case.turn,
        case.repeat,
        prompt.name,
    )


def _row(wanted: _Wanted, judge: str, outcome: JudgeOutcome) -> dict[str, Any]:
    return {
        "task_id": wanted.task.task_id,
        "question_id": wanted.question_id,
        "models": list(wanted.models),
        "turn": wanted.turn,
        "repeat": wanted.repeat,
        "judge": [judge, wanted.prompt_name],
        "text": outcome.text,
        "failure": outcome.failure,
        "is_lost": outcome.is_lost,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "tstamp": time.time(),
    }


def _score(wanted: _Wanted, judge: str, row: Mapping[str, Any]) -> Score:
    value = parse_rating(row["text"]) if row and not row["failure"] else None
    return Score(
        question_id=wanted.question_id,
        model_id=wanted.models[0],
        turn=wanted.turn,
        score=value,
        judge=(judge, wanted.prompt_name),
        judgment=row.get("text", ""),
        tstamp=row.get("tstamp", 0.0),
        repeat=wanted.repeat,
        failure="" if value is not None else row.get("failure") or _NOT_ASKED,
    )


def _pairs(
    wanted: Sequence[_Wanted], judge: str, rows: Mapping[str, Mapping[str, Any]]
) -> list[PairJudgment]:
    """Join the two orders of each comparison; the first order met has model_1 in place A."""
    first: dict[tuple[int, frozenset[str], int, int], PairJudgment] = {}
    joined = []
    for w in wanted:
        row = rows[w.task.task_id]
        key = (w.question_id, frozenset(w.models), w.turn, w.repeat)
        verdict: Verdict | None = None
        if row and not row["failure"]:
            verdict = parse_verdict(row["text"])
        text, tstamp = row.get("text", ""), row.get("tstamp", 0.0)
        if key not in first:
            first[key] = PairJudgment(
                w.question_id,
                w.models[0],
                w.models[1],
                w.turn,
                verdict,
                None,
                (judge, w.prompt_name),
                (text, ""),
                tstamp,
                w.repeat,
            )
            continue
        game = first.pop(key)
        texts = (game.texts[0], text)
        tstamp = max(tstamp, game.tstamp)
        joined.append(replace(game, swapped=verdict, texts=texts, tstamp=tstamp))
    return joined


# A local language model as judge, with transformers.


@dataclass(frozen=True)
class LocalModel:
    """A model directory, and what one judgment may take.

    Args:
        name: how judgments name it.
        max_prompt_tokens: a longer prompt is a failed judgment: half an answer is not judged.
        batch_size: judgments made together.
    """

    name: str
    directory: Path
    max_prompt_tokens: int
    batch_size: int


class LocalJudge:
    """A model directory as judge."""

    def __init__(self, model: LocalModel, sampling: Sampling, runtime: RuntimeConfig) -> None:
        self.model = model
        self.sampling = sampling
        self.runtime = runtime
        self._renderer = Renderer.load(
            model.directory,
            RenderingConfig(
                max_prompt_tokens=model.max_prompt_tokens,
                max_response_tokens=sampling.max_new_tokens,
            ),
        )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Judge in batches; what has no rating is asked again with another seed."""
        speaker = Speaker(self.model.directory, self._renderer, self.runtime)
        for start in range(0, len(tasks), self.model.batch_size):
            batch = tasks[start : start + self.model.batch_size]
            for task, outcome in zip(batch, self._batch(speaker, batch), strict=True):
                done(task, outcome)

    def _batch(self, speaker: Speaker, tasks: Sequence[JudgeTask]) -> list[JudgeOutcome]:
        prompts = [self._prompt(task.messages) for task in tasks]
        outcomes = {
            index: JudgeOutcome("", f"the prompt exceeds {self.model.max_prompt_tokens} tokens")
            for index, prompt in enumerate(prompts)
            if prompt is None
        }
        waiting = {index: prompt for index, prompt in enumerate(prompts) if prompt is not None}
        for attempt in range(self.sampling.rating_attempts):
            if not waiting:
                break
            found = self._ask(speaker, list(waiting.values()), tasks[0].seed + attempt)
            for index, (text, tokens) in zip(list(waiting), found, strict=True):
                earlier = outcomes.get(index, JudgeOutcome(""))
                is_decided = tasks[index].is_decided(text)
                outcomes[index] = JudgeOutcome(
                    text,
                    "" if is_decided else tasks[index].no_decision,
                    requests=earlier.requests + 1,
                    tokens=earlier.tokens + tokens,
                )
                if is_decided:
                    del waiting[index]
            if self.sampling.temperature == 0:
                # Greedy: asked again it would say the same.
                break
        return [outcomes[index] for index in range(len(tasks))]

    def _ask(self, speaker: Speaker, prompts: Sequence[Prompt], seed: int) -> list[tuple[str, int]]:
        cfg = GenerationConfig(
            temperature=self.sampling.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            batch_size=self.model.batch_size,
        )
        replies = speaker.reply(prompts, cfg, seed)
        return [(r.text, len(r.row)) for r in replies]

    def _prompt(self, messages: Prompt) -> Prompt | None:
        """Return a prompt that the template takes and that fits, or None."""
        try:
            _, shortened = self._renderer.prompt_ids(messages)
        except DataError:
            # Templates without a system turn refuse one.
            messages = (Message("user", "\n\n".join(m.content for m in messages)),)
            _, shortened = self._renderer.prompt_ids(messages)
        return None if shortened else messages
