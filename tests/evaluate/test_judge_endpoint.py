"""A judge behind a real local HTTP server that fails in every way a server can."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from chat_server import GOOD, Act, ChatServer, chat_server
from judge_runs import endpoint_of, plan_of, run

from tasks.data.hh import Message
from tasks.errors import ClusterError, ConfigError, WorkspaceError
from tasks.evaluate.endpoint import ChatEndpoint, ChatRequest, ask_all, retry_after_seconds
from tasks.evaluate.judgments import score_model, summarize_pairs
from tasks.evaluate.questions import ModelAnswer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "judge_runs.py"
KEY = "sk-very-secret-key"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chat_server(lambda content, nth: Act()) as server:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        graded = run(endpoint_of(server), plan_of(1), tmp_path / "judgments.jsonl")
    assert [score.score for score in graded.scores] == [7.0, 7.0]


def test_hundred_and_sixty_judgments_take_little_more_than_the_servers_time(tmp_path: Path) -> None:
    def answer(content: str, nth: int) -> Act:
        return Act(seconds=0.05)

    with chat_server(answer) as server, chat_server(answer) as other:
        run(endpoint_of(server), plan_of(1), tmp_path / "warm.jsonl")
        tries = []
        for n_try in range(3):
            # 160 / 16 * 0.05 = 0.5 s on an idle machine; on a busy one, what threads take now.
            ideal = _seconds_of_threads(other, 160)
            started = time.monotonic()
            graded = run(endpoint_of(server), plan_of(80), tmp_path / f"{n_try}.jsonl")
            tries.append((time.monotonic() - started) / ideal)
            assert [score.score for score in graded.scores] == [7.0] * 160
            if tries[-1] < 3.0:
                break
        # One request at a time would take 16 times as long.
        assert min(tries) < 3.0
        assert server.most_busy <= 16


def _seconds_of_threads(server: ChatServer, n_requests: int) -> float:
    """Return how long 16 threads take that do nothing but send the requests."""
    body = json.dumps({"messages": [{"role": "user", "content": "ideal"}]}).encode()

    def send(_: int) -> None:
        request = urllib.request.Request(f"{server.url}/chat/completions", body)
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()

    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(n_requests)))
    return time.monotonic() - started


# What the server does to the first attempts on a question; afterwards the reply is good.
FAILURES: dict[int, list[Act]] = {
    0: [Act(status=429, body="slow down", headers={"Retry-After": "1"})],
    1: [Act(status=500, body="oops"), Act(status=503, body="")],
    2: [Act(how="hang")],
    3: [Act(how="cut"), Act(how="cut")],
    4: [
        Act(body="<html>garbage</html>"),
        Act(body='{"choices": []}'),
        Act(body='{"choices": [{"message": null}]}'),
    ],
    5: [Act(text=""), Act(text="  \n")],
    6: [Act(text="Rating: [[11]]")],
    7: [Act(text="Rating: [7]")],
    8: [Act(how="slow_stream", seconds=20.0)],
    9: [Act(text="There are 5 reasons to give it a 9.")],
    10: [Act(status=502, body="?")],
    11: [Act(body='{"error": {"message": "overloaded"}}')],
}


def _question_of(content: str) -> int:
    found = re.findall(r"ask (\d+)\.", content)
    return int(found[0])


def _fail_at_first(content: str, nth: int) -> Act:
    failures = FAILURES.get(_question_of(content), [])
    return failures[nth] if nth < len(failures) else Act()


def test_every_failure_of_a_server_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with chat_server(_fail_at_first) as server:
        graded = run(endpoint_of(server, timeout_seconds=1.0), plan_of(14), path)
        assert [score.score for score in graded.scores] == [7.0] * 28
        for prompt, count in server.asked.items():
            # 7 is right at once: a single bracket that closes the text is a rating.
            question = _question_of(prompt)
            assert count == len(FAILURES.get(question, [])) + (question != 7)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == len({row["task_id"] for row in rows}) == 28
        # Whole counts: 100 tokens for each reply with a usage, empty and undecided ones too.
        assert graded.usage.requests == len(server.seen)
        n_asked = len(server.seen)
        again = run(endpoint_of(server), plan_of(14), path)
        assert again.scores == graded.scores
        assert len(server.seen) == n_asked


def test_pause_that_the_server_asks_for_holds_for_all_requests(tmp_path: Path) -> None:
    limited: list[float] = []

    def script(content: str, nth: int) -> Act:
        if _question_of(content) == 3 and nth == 0 and "again" not in content:
            limited.append(time.monotonic())
            return Act(status=429, body="", headers={"Retry-After": "1"})
        return Act(seconds=0.02)

    with chat_server(script) as server:
        cfg = endpoint_of(server, max_concurrency=2)
        run(cfg, plan_of(12), tmp_path / "j.jsonl")
        arrivals = [seen.at - limited[0] for seen in server.seen]
    # The other of the two may send one or two before the answer that asks for the pause has come
    # in; without a pause it would send 30 or so.
    assert sum(0.0 < arrival < 1.0 for arrival in arrivals) <= 2
    assert sum(arrival >= 1.0 for arrival in arrivals) > 10


def test_failures_that_last_are_reported_and_are_no_numbers(tmp_path: Path) -> None:
    lasting = {
        0: Act(status=500, body="oops"),
        1: Act(text="Rating: [[11]]"),
        2: Act(text="I refuse."),
        3: Act(status=400, body="judge-1 has a context length of 10 tokens"),
        4: Act(body="garbage"),
        5: Act(status=429, body="", headers={"Retry-After": "9999"}),
    }
    path = tmp_path / "j.jsonl"
    with chat_server(lambda content, nth: lasting.get(_question_of(content), Act())) as server:
        cfg = endpoint_of(server, attempts=3)
        with pytest.raises(ClusterError, match=r"6 of 16 judgments were lost; the last failure: "):
            run(cfg, plan_of(8), path)
        asked = {
            q: n for p, n in server.asked.items() if "again" not in p for q in [_question_of(p)]
        }
        # Three attempts where trying again may help, two where the text has no rating, one where
        # the request itself is refused or the server asks for too long a wait.
        assert asked == {0: 3, 1: 2, 2: 2, 3: 1, 4: 3, 5: 1, 6: 1, 7: 1}
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        stored = {row["question_id"]: row for row in rows if row["turn"] == 1}
        assert "HTTP 500" in stored[0]["failure"]
        assert "no chat completion: garbage" in stored[4]["failure"]
        assert {q for q, row in stored.items() if row["is_lost"]} == {0, 4, 5}
        # The next run asks again only for what the connection lost, not for what was answered.
        server.seen.clear()
        lasting.clear()
        graded = run(cfg, plan_of(8), path)
        assert {_question_of(p) for p in server.asked} == {0, 4, 5}
    by_question = {s.question_id: s for s in graded.scores if s.turn == 1}
    assert by_question[1].failure == "no rating from 1 to 10 in the judge's text"
    assert by_question[1].judgment == "Rating: [[11]]"
    # A request that is itself refused is a failed judgment, not a lost one.
    assert "context length" in by_question[3].failure
    summary = score_model(graded.scores)
    assert (summary.valid, summary.failed, summary.coverage) == (10, 6, 10 / 16)
    assert summary.mean is not None and summary.mean.value == 7.0


@pytest.mark.parametrize("text", ["I cannot judge this.", ""])
def test_judge_that_never_decides_gives_coverage_0_and_no_score(tmp_path: Path, text: str) -> None:
    with chat_server(lambda content, nth: Act(text=text)) as server:
        cfg = endpoint_of(server, attempts=2, timeout_seconds=60.0)
        summary = score_model(run(cfg, plan_of(12), tmp_path / "j.jsonl").scores)
    assert (summary.mean, dict(summary.turns), summary.coverage) == (None, {}, 0.0)


def _n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_and_rerun_ask_only_for_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with chat_server(lambda content, nth: Act(seconds=0.05)) as server:
        command = [sys.executable, str(SCRIPT), server.url, str(path)]
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 60
        while _n_lines(path) < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        n_stored = _n_lines(path)
        assert 9 <= n_stored < 40
        time.sleep(0.2)
        # As if the kill had come in the middle of a line.
        with path.open("ab") as file:
            file.write(b'{"task_id": "torn')
        n_before = len(server.seen)
        graded = run(endpoint_of(server), plan_of(20), path)
        assert len(server.seen) - n_before == 40 - n_stored
    assert [score.score for score in graded.scores] == [7.0] * 40
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["task_id"] for row in rows}) == len(rows) == 40
    summary = score_model(graded.scores)
    assert (summary.valid, summary.failed) == (40, 0)


def test_changed_answer_is_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with chat_server() as server:
        plan = plan_of(3)
        run(endpoint_of(server), plan, path)
        plan.answers["m"][0] = ModelAnswer(0, "m", ("other", "m 0 two"))
        run(endpoint_of(server), plan, path)
        # The first answer is in both turns' prompts.
        assert len(server.seen) == 6 + 2


def test_missing_key_is_an_error_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, found in (("", "holds no key"), ("  ", "holds no key"), ("a\u00e9", "no header")):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ConfigError, match=f"JUDGE_KEY.*{found}"):
            ChatEndpoint(endpoint_of("http://127.0.0.1:9/v1"))
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY holds no key"):
        ChatEndpoint(endpoint_of("http://127.0.0.1:9/v1"))
    ChatEndpoint(endpoint_of("http://127.0.0.1:9/v1", api_key_env=None))


def test_key_is_sent_and_is_nowhere_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "j.jsonl"
    refusal = Act(status=401, body=json.dumps({"error": f"Incorrect API key provided: {KEY}"}))
    echo = Act(status=400, body=f"bad request of {KEY}")
    with chat_server(lambda content, nth: echo) as server:
        graded = run(endpoint_of(server), plan_of(2), path)
        assert server.seen[0].key == f"Bearer {KEY}"
    with (
        chat_server(lambda content, nth: refusal) as server,
        pytest.raises(ConfigError, match="refuses the key in JUDGE_KEY") as caught,
    ):
        run(endpoint_of(server), plan_of(20), tmp_path / "k.jsonl")
    written = path.read_text() + (tmp_path / "k.jsonl").read_text()
    shown = f"{graded} {caught.value} {caught.value!r} {caplog.text} {written}"
    assert KEY not in shown and "***" in shown


@pytest.mark.parametrize(
    "act",
    [
        Act(status=404, body='{"detail": "Not Found"}'),
        Act(status=400, body='{"error": {"code": "model_not_found"}}'),
        Act(status=400, body="The model `judge-1` does not exist"),
        Act(status=400, body="{\"detail\": \"Server is pinned to 'x'; requested 'judge-1'.\"}"),
        Act(status=301, body="", headers={"Location": "http://127.0.0.1:9/"}),
    ],
)
def test_unknown_model_stops_at_once(tmp_path: Path, act: Act) -> None:
    with chat_server(lambda content, nth: act) as server:
        with pytest.raises(ConfigError, match="does not serve the model 'judge-1'"):
            run(endpoint_of(server, max_concurrency=4), plan_of(40), tmp_path / "j.jsonl")
        assert len(server.seen) <= 4


def test_account_without_credit_stops_at_once(tmp_path: Path) -> None:
    body = '{"error": {"code": "insufficient_quota"}}'
    with (
        chat_server(lambda content, nth: Act(status=429, body=body)) as server,
        pytest.raises(ClusterError, match="has no credit"),
    ):
        run(endpoint_of(server), plan_of(2), tmp_path / "j.jsonl")


def test_server_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    with chat_server() as server:
        url = server.url
    cfg = endpoint_of(url, attempts=2, max_concurrency=4)
    with pytest.raises(ClusterError, match=r"answered none of 8 requests with 2 attempts"):
        run(cfg, plan_of(40), tmp_path / "j.jsonl")


@pytest.mark.parametrize(
    ("budget", "n_asked"), [({"max_requests": 10}, 10), ({"max_tokens": 1000}, 10)]
)
def test_spent_budget_stops_and_a_larger_one_goes_on(
    tmp_path: Path, budget: dict[str, int], n_asked: int
) -> None:
    path = tmp_path / "j.jsonl"
    with chat_server() as server:
        # One at a time: a budget of tokens is known only after a reply.
        cfg = endpoint_of(server, max_concurrency=1, **budget)
        with pytest.raises(ClusterError, match=r"The budget of \d+ \w+ for judge-1 .* is spent"):
            run(cfg, plan_of(20), path)
        assert len(server.seen) == n_asked
        # What was spent counts in the next run, too: nothing more is asked.
        with pytest.raises(ClusterError, match="is spent"):
            run(cfg, plan_of(20), path)
        assert len(server.seen) == n_asked
        graded = run(endpoint_of(server), plan_of(20), path)
        assert len(server.seen) == 40
    assert (graded.usage.requests, graded.usage.tokens) == (40, 4000)


def test_request_holds_what_servers_expect(tmp_path: Path) -> None:
    with chat_server() as server:
        run(endpoint_of(server), plan_of(1), tmp_path / "j.jsonl")
        payload = server.seen[0].payload
    assert payload["model"] == "judge-1"
    assert (payload["temperature"], payload["max_tokens"]) == (0.0, 64)
    assert [message["role"] for message in payload["messages"]] == ["system", "user"]


def test_repeats_are_judged_apart_and_their_agreement_is_known(tmp_path: Path) -> None:
    # The third repeat of the first turn of question 1 gets 9 instead of 7.
    def script(content: str, nth: int) -> Act:
        is_other = nth == 2 and _question_of(content) == 1 and "again" not in content
        return Act(text="Rating: [[9]]") if is_other else Act()

    with chat_server(script) as server:
        cfg = endpoint_of(server, max_concurrency=1)
        graded = run(cfg, plan_of(2, repeats=3), tmp_path / "j.jsonl")
        assert len(server.seen) == 12
    summary = score_model(graded.scores)
    assert summary.valid == 12 and summary.agreement is not None
    # Of 4 * 3 pairs two differ, by 2 each.
    assert summary.agreement.equal == pytest.approx(10 / 12)
    assert summary.agreement.mean_difference == pytest.approx(4 / 12)
    # Each (question, turn) counts once: ((7 + 7 + 9) / 3 + 3 * 7) / 4.
    assert summary.mean is not None and summary.mean.value == pytest.approx((23 / 3 + 21) / 4)


def _pair_script(decide: Callable[[int, str], str]) -> Callable[[str, int], Act]:
    def script(content: str, nth: int) -> Act:
        if "<answer A>" not in content and "<conversation A>" not in content:
            return Act(text=GOOD)
        place_a = content.split("A>")[1]
        return Act(text=decide(_question_of(content), "ours" if "ours" in place_a else "base"))

    return script


def test_pairs_are_asked_in_both_orders(tmp_path: Path) -> None:
    def decide(question: int, place_a: str) -> str:
        # 0: ours is better; 1: place A always; 2: a tie; 3: no verdict in one order.
        ours = "[[A]]" if place_a == "ours" else "[[B]]"
        lost = "" if place_a == "base" else ours
        return {0: ours, 1: "[[A]]", 2: "[[C]]", 3: lost or "who knows"}[question]

    with chat_server(_pair_script(decide)) as server:
        plan = plan_of(4, ("ours", "base"), pairwise=True)
        graded = run(endpoint_of(server), plan, tmp_path / "j.jsonl")
    # 4 questions, 2 turns: 2 models alone, and one pair in 2 orders.
    assert (len(graded.scores), len(graded.pairs)) == (16, 8)
    summary = summarize_pairs(graded.pairs, "ours")
    assert summary.rate is not None
    assert (summary.rate.wins, summary.rate.ties, summary.rate.losses) == (2, 4, 0)
    assert summary.failed == 2
    assert summary.rate.adjusted == pytest.approx(4 / 6)


def test_retry_after_in_all_forms() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert retry_after_seconds("2", now) == 2.0
    assert retry_after_seconds("0.5", now) == 0.5
    assert retry_after_seconds("-3", now) == 0.0
    date = format_datetime(now + timedelta(seconds=30), usegmt=True)
    assert retry_after_seconds(date, now) == 30.0
    past = format_datetime(now - timedelta(seconds=30), usegmt=True)
    assert retry_after_seconds(past, now) == 0.0
    for broken in (None, "soon", "nan", "inf", ""):
        assert retry_after_seconds(broken, now) is None


# What was paid for is kept, and what was lost is no finished evaluation.


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


def test_empty_replies_are_failed_judgments_with_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    silent = {0: Act(text=""), 1: Act(text=" \n"), 2: Act(text="", finish_reason="length")}
    with chat_server(lambda content, nth: silent.get(_question_of(content), Act())) as server:
        cfg = endpoint_of(server, attempts=3, timeout_seconds=60.0)
        graded = run(cfg, plan_of(4), path)
        # Each of the three questions has two turns, of which each is asked three times.
        assert sorted(server.asked.values()) == [1, 1, *[3] * 6]
        assert len(server.seen) == graded.usage.requests == 20
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
