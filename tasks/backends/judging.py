"""Judges: what they are asked, what they answer, and the two that are language models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tasks.algorithms.ratings import parse_rating, parse_verdict
from tasks.backends.chat_endpoint import ChatEndpoint, ChatReply, ChatRequest
from tasks.data.hh import Message
from tasks.data.judge_prompts import Kind

R = TypeVar("R")


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


T = TypeVar("T")


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
    lock = asyncio.Lock()
    answered: list[tuple[T, R]] = []

    async def hand_over() -> None:
        """Hand over all that has come in while the last batch was on its way to the disk."""
        async with lock:
            batch = answered.copy()
            answered.clear()
            if batch:
                await asyncio.to_thread(_hand_all, done, batch)

    async def work() -> None:
        for item in waiting:
            if endpoint.stopped is not None:
                return
            answered.append((item, await ask(item)))
            await hand_over()

    async with endpoint.open():
        workers = [asyncio.create_task(work()) for _ in range(endpoint.cfg.max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
    if endpoint.stopped is not None:
        raise endpoint.stopped


def _hand_all(done: Callable[[T, R], None], batch: Sequence[tuple[T, R]]) -> None:
    for item, answer in batch:
        done(item, answer)


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
