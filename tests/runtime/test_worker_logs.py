"""Lines of Ray workers in the log of the run."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from flows.stages import RunOptions
from tasks.runtime.session import LineForwarder


def _batch(*lines: str, pid: Any = 7, localhost: bool = True) -> dict[str, Any]:
    return {"lines": list(lines), "pid": pid, "ip": "10.0.0.2", "localhost": localhost}


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def forwarder(clock: list[float]) -> LineForwarder:
    made = LineForwarder(clock=lambda: clock[0])
    made.logger = logging.getLogger("worker-lines")
    return made


def test_lines_name_their_worker(forwarder: LineForwarder, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    forwarder(_batch("\x1b[1mone\x1b[0m ", "", "Loading weights: 100%|####| 11/11 [00:00<00:00]"))
    forwarder(_batch("two", localhost=False))
    forwarder(_batch("status", pid="autoscaler"))
    assert caplog.messages == ["worker 7: one", "worker 7 on 10.0.0.2: two"]


def test_flood_is_cut_and_counted(
    forwarder: LineForwarder, clock: list[float], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    forwarder(_batch(*(f"line {i}" for i in range(600))))
    assert len(caplog.messages) == 500
    clock[0] = 60.0
    forwarder(_batch("next"))
    assert caplog.messages[500:] == ["100 lines of workers were left out", "worker 7: next"]


def test_nothing_is_kept_without_a_run(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    LineForwarder()(_batch("one"))
    assert caplog.messages == []


@pytest.mark.slow
def test_workers_lines_reach_the_log_of_the_task(preferences: str) -> None:
    from conftest import SMALL_CHAIN

    from flows.sft import sft
    from tasks.config.loading import load_config

    # Prefect's logger of a task run, which sends to the server what this handler sees.
    handler = _Kept()
    logger = logging.getLogger("prefect.task_runs")
    logger.addHandler(handler)
    try:
        cfg = load_config(SMALL_CHAIN).sft.model_copy(update={"max_steps": 2})
        sft(cfg, preferences, RunOptions())
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not handler.found("rank 0 of 1: role actor is"):
            time.sleep(0.1)
    finally:
        logger.removeHandler(handler)
    (line,) = handler.found("rank 0 of 1: role actor is")
    assert line.getMessage().startswith("worker ")
    assert line.__dict__["flow_run_id"]
    assert handler.found("autoscaler") == []


class _Kept(logging.Handler):
    """Keeps the records it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def found(self, part: str) -> list[logging.LogRecord]:
        return [record for record in self.records if part in record.getMessage()]
