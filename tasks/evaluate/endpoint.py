"""A client of servers that speak OpenAI's chat completions, which survives what servers do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.errors import ClusterError, ConfigError, RlhfError
from tasks.evaluate.config import EndpointConfig

R = TypeVar("R")
T = TypeVar("T")


def read_key(variable: str | None) -> str:
    """Return the key in an environment variable; empty where no variable is named.

    A key comes from the environment; it is in no config, message, log or file.

    Raises:
        ConfigError: the variable holds none, or one that no header can carry.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"The environment variable {variable} holds no key",
            "the key of the endpoint",
            f"export {variable}=..., or set api_key_env to null for a server that asks for none",
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"The key in {variable} has characters that no header can carry",
            "printable ASCII",
            f"export {variable} again",
        )
    return key


_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_MAX_REPLY_BYTES: Final = 8 * 2**20
_LONGEST_BACKOFF_SECONDS: Final = 30.0
_RETRIED: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
_KEY_REFUSED: Final = (401, 403)
_NO_CREDIT: Final = ("insufficient_quota", "billing_hard_limit_reached")
_UNKNOWN: Final = (
    "model_not_found",
    "does not exist",
    "not found",
    "unknown model",
    "invalid model",
)
_ABOUT_LENGTH: Final = ("context", "length", "too long", "token")
_SHOWN_CHARACTERS: Final = 300
# Characters of a token, where a server does not count.
_CHARACTERS_PER_TOKEN: Final = 4
# A server that has answered nothing is given up after this many requests, all their attempts spent.
_GIVEN_UP_AFTER: Final = 8


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat.

    Args:
        seed: passed on to servers that know it; None sends none.
    """

    messages: Sequence[Message]
    temperature: float
    max_tokens: int
    seed: int | None = None
    top_p: float = 1.0


def request_body(model: str, request: ChatRequest) -> dict[str, Any]:
    """Return what is sent to the server."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_tokens,
    }
    return body if request.seed is None else body | {"seed": request.seed}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What came of a request.

    Args:
        text: what the model said; empty when the request failed.
        failure: why there is no text, empty where there is one.
        is_final: a failure that asking again would not change: the request itself was refused, or
            the model has nothing to say.
        truncated: whether the text ended at the length limit.
        attempts: requests that were sent.
        tokens: prompt and completion; estimated where the server does not count.
    """

    text: str = ""
    failure: str = ""
    is_final: bool = False
    truncated: bool = False
    attempts: int = 0
    tokens: int = 0


@dataclass
class Usage:
    """What was spent.

    Args:
        requests: attempts that were sent.
        tokens: of all replies.
    """

    requests: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, *stores: LineStore) -> Usage:
        """Return what the rows of stores cost: a budget is one over all runs."""
        rows = [row for store in stores for row in store.rows]
        return cls(*(sum(int(row.get(key, 0)) for row in rows) for key in ("requests", "tokens")))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Outcome of one request: a reply, or whether and when to try again.

    Args:
        failure: why it is no reply.
        wait_seconds: what the server asks for before the next attempt.
    """

    kind: Literal["reply", "empty", "retry", "refused", "fatal"]
    text: str = ""
    failure: str = ""
    truncated: bool = False
    tokens: int = 0
    wait_seconds: float | None = None


class ChatEndpoint:
    """One model on one server, used within one event loop: ``async with endpoint.open():``.

    Args:
        used: what earlier runs spent of the budget.
        failure: says why the server is gone for good, None while it is not.

    Raises:
        ConfigError: the environment has no key, or one that no header can carry.
    """

    def __init__(
        self,
        cfg: EndpointConfig,
        used: Usage | None = None,
        failure: Callable[[], RlhfError | None] = lambda: None,
    ) -> None:
        self.cfg = cfg
        self._failure = failure
        self.usage = used or Usage()
        self.stopped: RlhfError | None = None
        self._key = read_key(cfg.api_key_env)
        self._client: httpx.AsyncClient | None = None
        self._resume_at = 0.0
        self._has_answered = False
        self._unanswered = 0
        self._jitter = random.Random()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold connections open for the block."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(
            max_connections=self.cfg.max_concurrency,
            max_keepalive_connections=self.cfg.max_concurrency,
        )
        # The deadline of a whole attempt is `_attempt`'s: one of httpx would start anew with every
        # byte of a slow stream.
        # Without TLS, its certificates need not be read, which takes a tenth of a second.
        verify = self.cfg.base_url.startswith("https:")
        # No proxy leads to this machine.
        is_here = urlsplit(self.cfg.base_url).hostname in _LOOPBACK
        async with httpx.AsyncClient(
            headers=headers, limits=limits, timeout=None, verify=verify, trust_env=not is_here
        ) as client:
            self._client = client
            yield
            self._client = None

    async def ask(self, request: ChatRequest) -> ChatReply:
        """Return the reply, after as many attempts as allowed.

        Never raises for what a server does: ``stopped`` holds what makes all further requests
        pointless (a refused key, an unknown model, a spent budget), and they return at once.
        """
        reply, kind = ChatReply(failure="not asked"), "retry"
        while reply.attempts < self.cfg.attempts:
            await self._wait_for_turn()
            if not self._may_spend():
                return replace(reply, is_final=False)
            attempt = await self._attempt(request)
            kind = attempt.kind
            self.usage.tokens += attempt.tokens
            reply = ChatReply(
                attempt.text,
                attempt.failure,
                kind in ("empty", "refused"),
                attempt.truncated,
                reply.attempts + 1,
                reply.tokens + attempt.tokens,
            )
            if kind in ("reply", "refused", "fatal"):
                break
            if not await self._back_off(attempt, reply.attempts):
                break
        if kind == "retry":
            self._note_unanswered(reply.failure)
        elif kind != "fatal":
            self._has_answered = True
        return reply

    def _may_spend(self) -> bool:
        """Count one request, or say that the budget or the server allows none."""
        if self.stopped is not None:
            return False
        cfg, usage = self.cfg, self.usage
        for name, spent, limit in (
            ("requests", usage.requests, cfg.max_requests),
            ("tokens", usage.tokens, cfg.max_tokens),
        ):
            if limit is not None and spent >= limit:
                self.stopped = ClusterError(
                    f"The budget of {limit} {name} for {cfg.model} at {cfg.base_url} is spent "
                    f"({spent} {name})",
                    "a budget for all judgments or answers",
                    f"raise max_{name} of the endpoint and run again: what is there is not asked "
                    "again",
                )
                return False
        usage.requests += 1
        return True

    async def _wait_for_turn(self) -> None:
        """Wait while the server asked for a pause: it counts for all requests."""
        while self.stopped is None and (left := self._resume_at - time.monotonic()) > 0:
            # In short naps: a spent budget ends the wait.
            await asyncio.sleep(min(left, 1.0) + self._jitter.uniform(0.0, 0.02))

    async def _back_off(self, attempt: _Attempt, attempts: int) -> bool:
        """Wait before the next attempt; False when the server asks for too long a wait."""
        if attempt.wait_seconds is not None:
            if attempt.wait_seconds > self.cfg.max_wait_seconds:
                return False
            self._resume_at = max(self._resume_at, time.monotonic() + attempt.wait_seconds)
            return True
        if attempts >= self.cfg.attempts:
            return False
        longest = min(self.cfg.backoff_seconds * 2 ** (attempts - 1), _LONGEST_BACKOFF_SECONDS)
        await asyncio.sleep(longest * self._jitter.uniform(0.5, 1.0))
        return True

    def _note_unanswered(self, reason: str) -> None:
        self._unanswered += 1
        if self._has_answered or self._unanswered < _GIVEN_UP_AFTER or self.stopped is not None:
            return
        self.stopped = ClusterError(
            f"{self.cfg.base_url} has answered none of {self._unanswered} requests with "
            f"{self.cfg.attempts} attempts each; the last: {reason}",
            "a server that speaks OpenAI's chat completions",
            "start it, or correct base_url of the endpoint",
        )

    async def _attempt(self, request: ChatRequest) -> _Attempt:
        try:
            async with asyncio.timeout(self.cfg.timeout_seconds):
                status, headers, body = await self._send(request)
        except TimeoutError:
            return _Attempt("retry", failure=f"no whole reply in {self.cfg.timeout_seconds:g} s")
        except httpx.RequestError as error:
            self.stopped = self.stopped or self._failure()
            # Its text may hold the address, never the headers.
            return _Attempt("retry", failure=f"{type(error).__name__} {error}".strip())
        if status == httpx.codes.OK:
            return self._read(request, body)
        return self._judge_status(status, headers, body)

    async def _send(self, request: ChatRequest) -> tuple[int, httpx.Headers, bytes]:
        assert self._client is not None, "used outside of `open`"
        body = bytearray()
        async with self._client.stream(
            "POST",
            f"{self.cfg.base_url}/chat/completions",
            json=request_body(self.cfg.model, request),
        ) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MAX_REPLY_BYTES:
                    raise httpx.DecodingError(f"a reply of over {_MAX_REPLY_BYTES} bytes")
            return response.status_code, response.headers, bytes(body)

    def _read(self, request: ChatRequest, body: bytes) -> _Attempt:
        try:
            row = json.loads(body)
            choice = row["choices"][0]
            message = choice["message"]
            text = message.get("content") or message.get("refusal") or ""
            is_text = isinstance(text, str)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return _Attempt("retry", failure=f"no chat completion: {self._shown(body)}")
        if not is_text:
            return _Attempt("retry", failure=f"no text: {self._shown(body)}")
        tokens = _tokens(row.get("usage"), request, text)
        is_cut = choice.get("finish_reason") == "length"
        if not text.strip():
            cut = ", which ends at the length limit" if is_cut else ""
            return _Attempt("empty", tokens=tokens, failure=f"an empty reply{cut}")
        # A lone surrogate is valid JSON and cannot be stored.
        clean = text.encode("utf-8", "replace").decode()
        return _Attempt("reply", clean, truncated=is_cut, tokens=tokens)

    def _judge_status(self, status: int, headers: httpx.Headers, body: bytes) -> _Attempt:
        said = f"HTTP {status}: {self._shown(body)}"
        error = self._fatal(status, body, said)
        if error is not None:
            self.stopped = self.stopped or error
            return _Attempt("fatal", failure=said)
        if status in _RETRIED:
            wait = retry_after_seconds(headers.get("retry-after"), datetime.now(UTC))
            return _Attempt("retry", failure=said, wait_seconds=wait)
        return _Attempt("refused", failure=said)

    def _fatal(self, status: int, body: bytes, said: str) -> RlhfError | None:
        """Return the error of an answer that all further requests would get, too."""
        cfg = self.cfg
        if status in _KEY_REFUSED:
            whose = f"the key in {cfg.api_key_env}" if cfg.api_key_env else "a request without key"
            return ConfigError(
                f"{cfg.base_url} refuses {whose}: {said}", "a valid key", "correct api_key_env"
            )
        if status == httpx.codes.PAYMENT_REQUIRED or (
            status == httpx.codes.TOO_MANY_REQUESTS and any(w.encode() in body for w in _NO_CREDIT)
        ):
            return ClusterError(f"The account at {cfg.base_url} has no credit: {said}", "credit")
        is_redirect = httpx.codes.MULTIPLE_CHOICES <= status < httpx.codes.BAD_REQUEST
        if (
            status == httpx.codes.NOT_FOUND
            or is_redirect
            or _refuses_model(status, body, cfg.model)
        ):
            return ConfigError(
                f"{cfg.base_url} does not serve the model {cfg.model!r}: {said}",
                "a model of this server",
                f"correct base_url or model of the endpoint; {cfg.base_url}/models lists them",
            )
        return None

    def _shown(self, body: bytes) -> str:
        """Return the start of a body, without the key, which some servers repeat."""
        text = " ".join(body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").split())
        text = text.replace(self._key, "***") if self._key else text
        return text[:_SHOWN_CHARACTERS] or "nothing"


def retry_after_seconds(value: str | None, now: datetime) -> float | None:
    """Return the wait of a Retry-After header, in seconds or as a date; None without a valid
    one."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds()
    # False for NaN.
    return max(seconds, 0.0) if abs(seconds) < float("inf") else None


def _refuses_model(status: int, body: bytes, model: str) -> bool:
    """Tell whether a refusal is about the model rather than about the request."""
    if status not in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
        return False
    text = body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").lower()
    if any(word in text for word in _ABOUT_LENGTH):
        return False
    is_unknown = "model" in text and any(sign in text for sign in _UNKNOWN)
    return is_unknown or model.lower() in text


def _tokens(usage: Any, request: ChatRequest, text: str) -> int:
    counted = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    if isinstance(counted, int) and not isinstance(counted, bool) and counted >= 0:
        return counted
    characters = len(text) + sum(len(message.content) for message in request.messages)
    return -(-characters // _CHARACTERS_PER_TOKEN)


# Many requests at a time.


async def ask_all(
    endpoint: ChatEndpoint,
    items: Sequence[T],
    ask: Callable[[T], Coroutine[Any, Any, R]],
    done: Callable[[T, R], None],
) -> None:
    """Ask for all items concurrently; ``done`` runs in a thread, one call at a time.

    Raises:
        RlhfError: what stopped the endpoint, once everything under way has ended; or what ``done``
            raised first, once it was called for the other replies, too.
    """
    waiting = iter(items)
    replies: deque[tuple[T, R]] = deque()
    # One thread at a time: those that wait find all that has come in meanwhile handed over.
    turn, lock = asyncio.Lock(), threading.Lock()

    def hand_over() -> None:
        errors: list[Exception] = []
        with lock:
            while replies:
                try:
                    done(*replies.popleft())
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    async def work() -> None:
        for item in waiting:
            if endpoint.stopped is not None:
                return
            replies.append((item, await ask(item)))
            async with turn:
                await asyncio.to_thread(hand_over)

    async with endpoint.open():
        workers = [asyncio.create_task(work()) for _ in range(endpoint.cfg.max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            # What was answered is paid for, whatever ended the work.
            hand_over()
    if endpoint.stopped is not None:
        raise endpoint.stopped


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end, whether or not this thread has an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
