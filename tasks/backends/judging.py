"""Judges: what they are asked, what they answer, and the two that are language models."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tasks.algorithms.ratings import parse_rating, parse_verdict
from tasks.backends.chat_endpoint import ChatEndpoint, ChatReply, ChatRequest
from tasks.data.hh import Message
from tasks.data.judge_prompts import Kind

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
