"""A local model as judge: what it cannot judge is counted, never made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.config.shared import RuntimeConfig
from tasks.data.hh import Message
from tasks.evaluate.config import JudgingConfig
from tasks.evaluate.judges import JudgeOutcome, JudgeTask, LocalJudge

RUNTIME = RuntimeConfig(device="cpu", cpu_threads=1)
ASK = (Message("system", "Judge."), Message("user", "How good is this?"))


def _task(
    task_id: str, models: tuple[str, ...] = ("m",), messages: tuple[Message, ...] = ASK
) -> JudgeTask:
    return JudgeTask(task_id, 1, models, 1, 0, "prompt", messages, 0)


def _judge(
    tiny_dir: Path, tasks: list[JudgeTask], temperature: float = 1.0, attempts: int = 3
) -> dict[str, JudgeOutcome]:
    cfg = JudgingConfig(
        temperature=temperature,
        rating_attempts=attempts,
        max_new_tokens=6,
        max_prompt_tokens=200,
        batch_size=2,
    )
    judge = LocalJudge("tiny", tiny_dir, cfg, RUNTIME)
    found: dict[str, JudgeOutcome] = {}
    judge.judge(tasks, lambda task, outcome: found.__setitem__(task.task_id, outcome))
    assert len(found) == len(tasks)
    return found


def test_text_without_a_rating_is_a_failed_judgment(tiny_dir: Path) -> None:
    tasks = [_task(str(n)) for n in range(3)]
    for outcome in _judge(tiny_dir, tasks).values():
        assert outcome.failure == "no rating from 1 to 10 in the judge's text"
        assert outcome.requests == 3 and outcome.tokens > 0 and not outcome.is_lost
    # Greedy says the same when asked again.
    assert all(o.requests == 1 for o in _judge(tiny_dir, tasks, temperature=0.0).values())


def test_prompt_that_does_not_fit_is_not_judged(tiny_dir: Path) -> None:
    long = (Message("user", "word " * 500),)
    found = _judge(tiny_dir, [_task("a", ("m", "n"), long), _task("b", ("m", "n"))])
    assert found["a"] == JudgeOutcome("", "the prompt exceeds 200 tokens")
    assert found["b"].failure == "no verdict in the judge's text"


def test_rating_is_taken_and_ends_the_asking(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model cannot rate; what counts as decided is another matter.
    monkeypatch.setattr(JudgeTask, "decision", lambda self, text: 7.0)
    (outcome,) = _judge(tiny_dir, [_task("a")]).values()
    assert (outcome.failure, outcome.requests) == ("", 1)
