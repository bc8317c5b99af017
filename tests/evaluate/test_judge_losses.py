"""What was paid for is kept, and what was lost is no finished evaluation."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_server import Act, ChatServer, chat_server
from judge_runs import endpoint_of, plan_of, run

from tasks.data.hh import Message
from tasks.errors import ClusterError, WorkspaceError
from tasks.evaluate.endpoint import ChatEndpoint, ChatRequest
from tasks.evaluate.judges import ask_all
from tasks.evaluate.judgments import score_model


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


def _act(content: str, silent: dict[int, Act]) -> Act:
    """Return what is said about the question of a prompt."""
    return silent.get(int(re.findall(r"ask (\d+)\.", content)[0]), Act())


def test_empty_replies_are_failed_judgments_with_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    silent = {0: Act(text=""), 1: Act(text=" \n"), 2: Act(text="", finish_reason="length")}
    with chat_server(lambda content, nth: _act(content, silent)) as server:
        cfg = endpoint_of(server, attempts=3, timeout_seconds=60.0)
        graded = run(cfg, plan_of(4), path)
        # Each of the three questions has two turns, of which each is asked three times.
        assert sorted(server.asked.values()) == [1, 1, *[3] * 6]
        assert len(server.seen) == graded.requests == 20
        assert run(cfg, plan_of(4), path).scores == graded.scores and len(server.seen) == 20
    failures = {score.question_id: (score.score, score.failure) for score in graded.scores}
    assert failures == {
        0: (None, "an empty reply"),
        1: (None, "an empty reply"),
        2: (None, "an empty reply, which ends at the length limit"),
        3: (7.0, ""),
    }
    summary = score_model(graded.scores)
    assert (summary.valid, summary.failed) == (2, 6)
    assert summary.mean is not None and summary.mean.value == 7.0


def test_judge_that_says_nothing_at_all_gives_coverage_0(tmp_path: Path) -> None:
    with chat_server(lambda content, nth: Act(text="")) as server:
        cfg = endpoint_of(server, attempts=2, timeout_seconds=60.0)
        graded = run(cfg, plan_of(12), tmp_path / "j.jsonl")
    summary = score_model(graded.scores)
    assert (summary.mean, summary.coverage) == (None, 0.0)


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
