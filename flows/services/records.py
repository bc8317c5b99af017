"""What `rlhf up` starts: a Prefect server, an MLflow server and a worker, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import psutil
from pydantic import BaseModel, ValidationError

from tasks.artifacts import write_whole
from tasks.config.loading import PROJECT_ROOT
from tasks.errors import ClusterError, ConfigError
from tasks.workspace import HOME_VARIABLE, TRACKING_VARIABLE, Workspace

# Requests to a Prefect server that is not necessarily ours: it may ask for a login.

AUTH_VARIABLE = "PREFECT_API_AUTH_STRING"


def api_client(api_url: str, timeout_seconds: float) -> httpx.Client:
    """Return a client that logs in with what ``PREFECT_API_AUTH_STRING`` (user:password) says."""
    user, _, password = os.environ.get(AUTH_VARIABLE, "").partition(":")
    auth = httpx.BasicAuth(user, password) if user else None
    return httpx.Client(base_url=api_url, timeout=timeout_seconds, auth=auth)


def api_failure(api_url: str, error: httpx.HTTPError) -> ClusterError:
    """Return the project's error for a request that failed."""
    refused = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in refused:
        return ClusterError(
            f"The Prefect server at {api_url} refused the login: {error.response.status_code}",
            f"{AUTH_VARIABLE}=user:password, as the server has it",
            f"set or correct {AUTH_VARIABLE}",
        )
    return ClusterError(
        f"The Prefect server at {api_url} failed: {error}",
        "a server that answers",
        "look at its log, or start one with `rlhf up`",
    )


#
# Processes that outlive the command that started them, and that a later command can stop.
#
# Each is written down with its process id and start time, so a number that the kernel gave to
# somebody else in the meantime is never taken for it. All its descendants carry a mark in their
# environment, by which they are found even when their parent was killed.

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
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    port: int | None

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.directory / f"{self.name}.log"


def mark_of(directory: Path, name: str) -> str:
    """Return the value of `MARK` in the environment of a service's processes; no other workspace
    has the same."""
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
    mark = mark_of(service.directory, service.name)
    with service.log_path.open("ab") as log:
        process = subprocess.Popen(
            list(service.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **service.environment, MARK: mark},
            cwd=PROJECT_ROOT,
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


PREFECT = "prefect"
MLFLOW = "mlflow"
WORKER = "worker"
SERVICES = (PREFECT, MLFLOW, WORKER)
POOL = "rlhf"
WORKER_NAME = "rlhf-up"
DEFAULT_PORTS = {PREFECT: 4200, MLFLOW: 5000}
# A flow that sends no heartbeat three times is dead: deployments/automations.yaml.
HEARTBEAT_SECONDS = 30
NO_TELEMETRY = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
_PROBE_SECONDS = 3.0


def directory_of(workspace: Workspace) -> Path:
    """Return where records and logs of the workspace's services are."""
    return workspace.root / "services"


def base_url(port: int | None) -> str:
    """Return the address of a server here."""
    return f"http://{HOST}:{port}"


def prefect_server(workspace: Workspace, port: int) -> Service:
    """Return the Prefect server, with schedules and automations, history in the workspace."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST]
    environment = {
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_API_URL": f"{base_url(port)}/api",
        "PREFECT_UI_API_URL": f"{base_url(port)}/api",
        **NO_TELEMETRY,
    }
    command += ["--port", str(port)]
    return Service(PREFECT, command, environment, directory_of(workspace), port)


def mlflow_server(workspace: Workspace, port: int) -> Service:
    """Return the MLflow server on the workspace's database.

    Artifacts get the same place as without a server, so that both ways can read all runs.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", workspace.database_uri]
    command += ["--artifacts-destination", str(workspace.mlflow_artifacts_dir)]
    command += ["--default-artifact-root", workspace.mlflow_artifacts_dir.as_uri()]
    environment = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    return Service(MLFLOW, command, environment, directory_of(workspace), port)


def worker(workspace: Workspace, api_url: str, tracking_uri: str) -> Service:
    """Return the worker that runs flows of the work pool, each in a process of its own."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    command += ["--type", "process", "--name", WORKER_NAME]
    environment = {
        **client_environment(workspace, api_url, tracking_uri),
        "PREFECT_LOGGING_LEVEL": "INFO",
        # Whoever starts a run from the UI watches it.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "RLHF_PROJECT": str(PROJECT_ROOT),
        "PYTHONPATH": python_path(),
    }
    return Service(WORKER, command, environment, directory_of(workspace), None)


def client_environment(workspace: Workspace, api_url: str, tracking_uri: str) -> dict[str, str]:
    """Return what a program needs to use the servers."""
    return {
        HOME_VARIABLE: str(workspace.root),
        TRACKING_VARIABLE: tracking_uri,
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_API_URL": api_url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **NO_TELEMETRY,
    }


def python_path() -> str:
    """Return where flows are imported from, also where the project is not installed."""
    return os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))


def is_healthy(record: ServiceRecord, api_url: str) -> bool:
    """Tell whether a service does its work: a server answers, the worker sends heartbeats."""
    if record.name == WORKER:
        prefect = read_record(Path(record.log_path).parent, PREFECT)
        # The database may still have a heartbeat from before the server's start.
        since = max(record.started_at, prefect.started_at if prefect else 0.0)
        return _worker_is_online(api_url, since)
    path = "/api/health" if record.name == PREFECT else "/health"
    return answers(base_url(record.port) + path, _PROBE_SECONDS)


def answers(url: str, timeout_seconds: float) -> bool:
    """Tell whether a server answers at an address."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _worker_is_online(api_url: str, started_at: float) -> bool:
    try:
        with api_client(api_url, _PROBE_SECONDS) as client:
            answer = client.post(f"/work_pools/{POOL}/workers/filter", json={})
        answer.raise_for_status()
        found = [one for one in answer.json() if one["name"] == WORKER_NAME]
    except (httpx.HTTPError, ValueError):
        return False
    return any(
        one["status"] == "ONLINE"
        and datetime.fromisoformat(one["last_heartbeat_time"]).timestamp() > started_at
        for one in found
    )


def running_addresses(workspace: Workspace) -> tuple[str, str | None] | None:
    """Return the addresses of the Prefect API and of MLflow that `rlhf up` serves here.

    Returns:
        None when no Prefect server of this workspace answers; no MLflow where none was started.
    """
    prefect = read_record(directory_of(workspace), PREFECT)
    if living(prefect) is None or prefect is None or not is_healthy(prefect, ""):
        return None
    mlflow = read_record(directory_of(workspace), MLFLOW)
    has_mlflow = mlflow is not None and living(mlflow) is not None and is_healthy(mlflow, "")
    api_url = f"{base_url(prefect.port)}/api"
    return api_url, base_url(mlflow.port) if has_mlflow and mlflow is not None else None
