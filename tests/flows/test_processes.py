"""Services: started once, found again, stopped exactly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows.services.records import (
    MARK,
    Service,
    ServiceRecord,
    check_port,
    family,
    living,
    read_record,
    start,
    stop,
    wait_until,
)
from tasks.errors import ClusterError, ConfigError

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
# Ends at once when asked, but leaves a child in a session of its own, as Ray does.
PARENT = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)
STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)

Make = Callable[[str], ServiceRecord]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "services"
    yield made
    stop(made, "one", 0.0)


@pytest.fixture
def make(directory: Path) -> Make:
    def run(code: str) -> ServiceRecord:
        command = [sys.executable, "-c", code]
        record = start(Service("one", command, {}, directory, None))
        log = directory / "one.log"
        assert wait_until(lambda: "up" in log.read_text(), record, 20)
        return record

    return run


def _other() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL)


def test_what_was_started_is_found_by_a_later_command(directory: Path, make: Make) -> None:
    record = make(SLEEPER)
    found = read_record(directory, "one")
    assert found == record
    process = living(found)
    assert process is not None and process.pid == record.pid
    assert os.getsid(record.pid) == record.pid != os.getsid(0)  # Control-C is not for it
    assert process.environ()[MARK] == f"{directory}:one"


def test_number_that_was_given_to_somebody_else_is_not_touched(directory: Path, make: Make) -> None:
    make(SLEEPER)
    stop(directory, "one", 5.0)
    other = _other()
    try:
        # The record of a process that ended long ago, with the number of one that runs now.
        stale = ServiceRecord(name="one", pid=other.pid, started_at=1.0, port=None, log_path="x")
        (directory / "one.json").write_text(stale.model_dump_json())
        assert living(read_record(directory, "one")) is None
        assert stop(directory, "one", 1.0) == 0
        assert other.poll() is None
        assert read_record(directory, "one") is None
    finally:
        other.kill()
        other.wait()


def test_stop_ends_all_that_was_started_and_nothing_else(directory: Path, make: Make) -> None:
    other = _other()
    try:
        make(PARENT)
        members = family(directory, "one")
        assert len(members) == 2
        assert stop(directory, "one", 5.0) == 2
        assert not any(process.is_running() for process in members)
        assert other.poll() is None
        assert stop(directory, "one", 5.0) == 0  # twice is once
    finally:
        other.kill()
        other.wait()


def test_children_of_a_killed_process_are_found(directory: Path, make: Make) -> None:
    record = make(PARENT)
    os.kill(record.pid, signal.SIGKILL)
    os.waitpid(record.pid, 0)
    assert living(record) is None
    (orphan,) = family(directory, "one")
    assert stop(directory, "one", 0.5) == 1
    assert not psutil.pid_exists(orphan.pid) or not orphan.is_running()


def test_process_that_does_not_listen_is_killed(
    directory: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.services.records._TERM_SECONDS", 0.5)
    record = make(STUBBORN)
    started = time.monotonic()
    assert stop(directory, "one", 0.5) == 1
    assert time.monotonic() - started < 5
    assert living(record) is None


def test_taken_port_names_who_has_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"{port}.*process {os.getpid()} .*--mlflow-port"):
            check_port("mlflow", port)
    check_port("mlflow", port)
    with pytest.raises(ConfigError, match="70000 is no port"):
        check_port("mlflow", 70000)


def test_wait_ends_with_the_process(directory: Path) -> None:
    command = [sys.executable, "-c", "pass"]
    record = start(Service("one", command, {}, directory, None))
    started = time.monotonic()
    assert not wait_until(lambda: False, record, 60)
    assert time.monotonic() - started < 20


def test_torn_record_counts_as_none(directory: Path) -> None:
    directory.mkdir()
    (directory / "one.json").write_text('{"name": "one", "pid"')
    assert read_record(directory, "one") is None
