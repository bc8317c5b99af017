"""Processes that outlive the command that started them, and that a later command can stop.

Each is written down with its process id and start time, so a number that the kernel gave to
somebody else in the meantime is never taken for it. All its descendants carry a mark in their
environment, by which they are found even when their parent was killed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from tasks.errors import ClusterError, ConfigError
from tasks.whole_file import write_whole

HOST = "127.0.0.1"
MARK = "RLHF_SERVICE"
# Start times are computed from the boot time, which drifts a little.
_START_ERROR_SECONDS = 2.0
_TERM_SECONDS = 10.0
_POLL_SECONDS = 0.2


class ServiceRecord(BaseModel):
    """What is written down about a started process.

    ``started_at`` is in seconds since 1970, as the kernel has it; ``environment`` is what was
    added to it.
    """

    name: str
    pid: int
    started_at: float
    port: int | None
    log_path: str
    environment: dict[str, str] = {}


@dataclass(frozen=True)
class Service:
    """A process to run.

    Args:
        name: what it is called.
        command: how it is started.
        environment: added to this process's own.
        directory: where its record and its log go.
        port: on loopback, or None.
        cwd: its working directory.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    port: int | None
    cwd: Path

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.directory / f"{self.name}.log"

    @property
    def mark(self) -> str:
        """Value of `MARK` in the environment of the process and all below it."""
        return mark_of(self.directory, self.name)


def mark_of(directory: Path, name: str) -> str:
    """Return the mark of a service's processes; no other workspace has the same."""
    return f"{directory}:{name}"


def record_path(directory: Path, name: str) -> Path:
    """Return where a service is written down."""
    return directory / f"{name}.json"


def torn_record(directory: Path, name: str) -> Path | None:
    """Return the file about a service if it is there and cannot be read."""
    path = record_path(directory, name)
    return path if path.is_file() and read_record(directory, name) is None else None


def read_record(directory: Path, name: str) -> ServiceRecord | None:
    """Return what is written down about a service; None when there is nothing, or it is torn."""
    try:
        return ServiceRecord.model_validate_json(record_path(directory, name).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def living(record: ServiceRecord | None) -> psutil.Process | None:
    """Return the process of a record, unless it has ended, its number reused or not."""
    if record is None:
        return None
    try:
        process = psutil.Process(record.pid)
        is_same = abs(process.create_time() - record.started_at) <= _START_ERROR_SECONDS
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def start(service: Service) -> ServiceRecord:
    """Start a process in a session of its own and write it down.

    Raises:
        ClusterError: its port is taken; the message says by whom where that can be known.
    """
    service.directory.mkdir(parents=True, exist_ok=True)
    if service.port is not None:
        check_port(service.name, service.port)
    with service.log_path.open("ab") as log:
        process = subprocess.Popen(
            list(service.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **service.environment, MARK: service.mark},
            cwd=service.cwd,
            # The terminal's signals are not for it.
            start_new_session=True,
        )
    record = ServiceRecord(
        name=service.name,
        pid=process.pid,
        started_at=psutil.Process(process.pid).create_time(),
        port=service.port,
        log_path=str(service.log_path),
        environment=dict(service.environment),
    )
    content = json.dumps(record.model_dump(), indent=2) + "\n"
    write_whole(record_path(service.directory, service.name), content)
    return record


def check_port(name: str, port: int) -> None:
    """Refuse a port that something listens on.

    Raises:
        ClusterError: it does.
        ConfigError: it is no port.
    """
    if not 0 < port < 2**16:
        raise ConfigError(f"{name}: {port} is no port", "1 to 65535", "choose another")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ClusterError(
                f"Port {port} for {name} cannot be used: {_holder(port) or error.strerror}",
                "a free port",
                f"end that process, or choose another port with --{name}-port",
            ) from error


def _holder(port: int) -> str | None:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        is_listener = connection.status == psutil.CONN_LISTEN and connection.pid is not None
        if is_listener and connection.laddr and connection.laddr.port == port:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.Error:
                return None
            return f"process {connection.pid} ({name}) listens on it"
    return None


def family(directory: Path, name: str) -> list[psutil.Process]:
    """Return the living processes that a service started, itself included."""
    mark = mark_of(directory, name)
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            # Somebody else's process, or one that has just ended.
            continue
    return found


def stop(directory: Path, name: str, grace_seconds: float) -> int:
    """End a service and everything it started, and forget it.

    Its children are asked first, then the process itself, so that they can end what they do;
    whatever is left after ``grace_seconds`` is told to end, and killed 10 s later.

    Returns:
        How many processes had to end.
    """
    leader = living(read_record(directory, name))
    members = family(directory, name)
    # A worker that ends kills its flows, so these are asked first and awaited. Children of a
    # leader that was killed have nobody who would ask them.
    deadline = time.monotonic() + grace_seconds
    for asked in (_children(leader), [leader]) if leader is not None else (members,):
        _each(asked, "terminate")
        psutil.wait_procs(asked, timeout=max(0.0, deadline - time.monotonic()))
    _, left = psutil.wait_procs(members, timeout=max(0.0, deadline - time.monotonic()))
    left = [*left, *(process for process in family(directory, name) if process not in left)]
    _each(left, "terminate")
    _, left = psutil.wait_procs(left, timeout=_TERM_SECONDS if left else 0)
    _each(left, "kill")
    psutil.wait_procs(left, timeout=_TERM_SECONDS if left else 0)
    record_path(directory, name).unlink(missing_ok=True)
    return len(members)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.Error:
        return []


def _each(processes: Sequence[psutil.Process], action: str) -> None:
    for process in processes:
        try:
            # psutil compares the start time first, so that nobody else's process is hit.
            getattr(process, action)()
        except psutil.NoSuchProcess:
            continue


def wait_until(
    condition: Callable[[], bool], record: ServiceRecord, timeout_seconds: float
) -> bool:
    """Wait until the condition holds; False when the process ended or time is up."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if living(record) is None:
            return False
        time.sleep(_POLL_SECONDS)
    return False
