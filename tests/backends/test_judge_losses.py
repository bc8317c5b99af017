"""What was paid for is kept, and what was lost is no finished evaluation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_server import Act, ChatServer, chat_server
from judge_runs import endpoint_of, plan_of, run

from tasks.backends.chat_endpoint import ChatEndpoint, ChatRequest
from tasks.backends.judging import ask_all
from tasks.data.hh import Message
from tasks.errors import ClusterError, WorkspaceError


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")


def test_server_that_breaks_down_is_no_finished_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    n_answered = 10

    def script(content: str, nth: int) -> Act:
        return Act() if len(server.seen) <= n_answered else Act(status=503, body="overloaded")

    with chat_server(script) as server:
        cfg = endpoint_of(server, max_concurrency=1, attempts=1)
        with pytest.raises(ClusterError, match=r"30 of 40 .* lost; .*: HTTP 503.*same command"):
            run(cfg, plan_of(20), path)
        n_answered = 1000
        server.seen.clear()
        graded = run(cfg, plan_of(20), path)
        assert len(server.seen) == 30
    assert [score.score for score in graded.scores] == [7.0] * 40


async def _paid_and_handed_over(
    server: ChatServer, done: Callable[[int, int], None], n_paid: int
) -> list[int]:
    """Ask until ``n_paid`` requests are answered, then cancel; return what was answered."""
    endpoint = ChatEndpoint(endpoint_of(server, max_concurrency=3))
    paid: list[int] = []

    async def ask(item: int) -> int:
        if len(paid) >= n_paid:
            await asyncio.sleep(60)
        await endpoint.ask(ChatRequest((Message("user", f"ask {item}."),), 0.0, 8))
        paid.append(item)
        return item

    asking = asyncio.create_task(ask_all(endpoint, range(60), ask, done))
    while len(paid) < n_paid and not asking.done():
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises((asyncio.CancelledError, WorkspaceError)):
        await asking
    return paid


def test_cancelled_work_hands_over_all_that_was_paid_for() -> None:
    handed: list[int] = []

    def slow(item: int, reply: int) -> None:
        time.sleep(0.2)
        handed.append(item)

    with chat_server() as server:
        paid = asyncio.run(_paid_and_handed_over(server, slow, 9))
    assert len(paid) >= 9 and sorted(handed) == sorted(paid)


def test_error_of_one_hand_over_loses_no_other_reply() -> None:
    handed: list[int] = []

    def failing(item: int, reply: int) -> None:
        handed.append(item)
        time.sleep(0.1)
        if len(handed) == 2:
            raise WorkspaceError("The disk is full", "space", "free some")

    with chat_server() as server:
        paid = asyncio.run(_paid_and_handed_over(server, failing, 60))
    # The one that failed, the one before it, and one that waited behind it.
    assert 3 <= len(paid) < 60 and sorted(handed) == sorted(paid)
