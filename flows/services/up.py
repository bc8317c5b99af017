"""`rlhf up`, `rlhf down` and `rlhf status`: everything that one machine needs, on loopback."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import httpx
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flows.promote import StaleArtifact, stale_artifacts
from flows.services.deploy import deploy
from flows.services.records import (
    DEFAULT_PORTS,
    MLFLOW,
    PREFECT,
    SERVICES,
    WORKER,
    Service,
    ServiceRecord,
    api_client,
    api_failure,
    base_url,
    check_port,
    directory_of,
    family,
    is_healthy,
    living,
    mlflow_server,
    prefect_server,
    read_record,
    running_addresses,
    start,
    stop,
    torn_record,
    wait_until,
    worker,
)
from tasks.config.loading import find_config, load_config
from tasks.config.shared import TrackingConfig
from tasks.errors import ClusterError, ConfigError, RlhfError, WorkspaceError
from tasks.workspace import TRACKING_VARIABLE, Workspace

_START_SECONDS = 120.0
_STOP_SECONDS = {WORKER: 45.0, MLFLOW: 15.0, PREFECT: 15.0}

State = Literal["running", "not answering", "died", "unknown", "stopped"]


class ServiceState(BaseModel):
    """One service as `rlhf status` tells it.

    ``died``: it was started, and nobody stopped it. ``unknown``: its record is torn, and ``note``
    says which file and what to do. ``url`` is None for the worker.
    """

    name: str
    state: State
    url: str | None
    pid: int | None
    processes: int
    log_path: str
    note: str = ""


def up(
    config: str, prefect_port: int | None, mlflow_port: int | None
) -> tuple[list[ServiceState], list[str]]:
    """Start what does not run yet, wait until all of it works, deploy.

    Args:
        config: what the deployments run by default.
        prefect_port: None for the one that runs already, or 4200.
        mlflow_port: None for the one that runs already, or 5000.

    Returns:
        The services, and the names of the deployments.

    Raises:
        ClusterError: a port is taken, or a service did not start; what this call started is
            stopped again.
        ConfigError: a service runs already on another port than the one asked for.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracking = load_config(find_config(config)).tracking
    wanted = {PREFECT: prefect_port, MLFLOW: mlflow_port}
    with _exclusive(workspace):
        started: list[str] = []
        try:
            api_url = _start_all(workspace, wanted, tracking, started)
            deployments = deploy(config, api_url, workspace)
            _start_worker(workspace, api_url, tracking, started)
        except BaseException:
            _stop(workspace, started)
            raise
    return states(workspace), deployments


def down(workspace: Workspace) -> tuple[dict[str, int], list[str]]:
    """End the services and all that they started.

    Returns:
        How many processes each had; and a line about each record that was torn.
    """
    directory = directory_of(workspace)
    with _exclusive(workspace):
        torn = {name: path for name in SERVICES if (path := torn_record(directory, name))}
        ended = _stop(workspace, list(SERVICES))
    return ended, [
        f"{path} was torn and is removed: {_way_to_start(name)}" for name, path in torn.items()
    ]


def _torn_note(workspace: Workspace, name: str) -> str:
    """Say which record is torn and what to do; nothing when none is."""
    path = torn_record(directory_of(workspace), name)
    if path is None:
        return ""
    return (
        f"{path} is torn, so it does not say what was started: `rlhf down` ends what is left of "
        f"{name} and removes the file; after that {_way_to_start(name)}"
    )


def _way_to_start(name: str) -> str:
    if name not in DEFAULT_PORTS:
        return f"`rlhf up` starts {name} again"
    port = f"its port, {DEFAULT_PORTS[name]} if it had none of its own"
    return f"`rlhf up --{name}-port PORT` starts it again; PORT is {port}"


def states(workspace: Workspace) -> list[ServiceState]:
    """Return how each service is."""
    directory = directory_of(workspace)
    prefect = read_record(directory, PREFECT)
    api_url = f"{base_url(prefect.port)}/api" if prefect else ""
    return [_state_of(workspace, name, api_url) for name in SERVICES]


def _state_of(workspace: Workspace, name: str, api_url: str) -> ServiceState:
    directory = directory_of(workspace)
    record = read_record(directory, name)
    note = _torn_note(workspace, name)
    state: State = "unknown" if note else "stopped"
    if record is not None:
        state = "died"
        if living(record) is not None:
            state = "running" if is_healthy(record, api_url) else "not answering"
    return ServiceState(
        name=name,
        state=state,
        url=base_url(record.port) if record and record.port else None,
        pid=record.pid if record else None,
        processes=len(family(directory, name)),
        log_path=str(directory / f"{name}.log"),
        note=note,
    )


@contextmanager
def _exclusive(workspace: Workspace) -> Iterator[None]:
    directory = directory_of(workspace)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorkspaceError(
                f"Another `rlhf up` or `rlhf down` is at work in {workspace.root}",
                "one at a time",
                "wait for it",
            ) from error
        yield


def _start_all(
    workspace: Workspace,
    wanted: Mapping[str, int | None],
    tracking: TrackingConfig,
    started: list[str],
) -> str:
    """Start the servers; return the address of Prefect's API."""
    ports = {PREFECT: _port(workspace, PREFECT, wanted[PREFECT])}
    services = [prefect_server(workspace, ports[PREFECT])]
    if tracking.tracking_uri is None:
        ports[MLFLOW] = _port(workspace, MLFLOW, wanted[MLFLOW])
        if ports[MLFLOW] == ports[PREFECT]:
            raise ConfigError(
                f"Port {ports[PREFECT]} is given to Prefect and to MLflow",
                "one port each",
                "change --prefect-port or --mlflow-port",
            )
        services.append(mlflow_server(workspace, ports[MLFLOW]))
    missing = [one for one in services if _running(workspace, one.name) is None]
    for service in missing:
        # A server that was killed may have left processes that hold its port.
        stop(service.directory, service.name, 0.0)
        assert service.port is not None
        check_port(service.name, service.port)
    if MLFLOW in [service.name for service in missing]:
        _make_database(workspace, tracking)
    records = {one.name: _started(workspace, one, started) for one in services}
    api_url = f"{base_url(ports[PREFECT])}/api"
    for record in records.values():
        _wait(record, api_url)
    return api_url


def _make_database(workspace: Workspace, tracking: TrackingConfig) -> None:
    """Create the tables and the experiment, so that the server and `rlhf run` agree on both."""
    from tasks.tracking.mlflow import connect

    uri = workspace.database_uri
    connect(tracking.model_copy(update={"tracking_uri": uri}), workspace)


def _start_worker(
    workspace: Workspace, api_url: str, tracking: TrackingConfig, started: list[str]
) -> None:
    mlflow = read_record(directory_of(workspace), MLFLOW)
    uri = tracking.tracking_uri or base_url(mlflow.port if mlflow else None)
    service = worker(workspace, api_url, uri)
    record = _running(workspace, WORKER)
    if record is not None and not _has_addresses(record, service):
        # It would go on asking servers that are elsewhere now.
        stop(service.directory, WORKER, _STOP_SECONDS[WORKER])
    _wait(_started(workspace, service, started), api_url)


def _has_addresses(record: ServiceRecord, service: Service) -> bool:
    names = ("PREFECT_API_URL", TRACKING_VARIABLE)
    return all(record.environment.get(name) == service.environment[name] for name in names)


def _port(workspace: Workspace, name: str, wanted: int | None) -> int:
    record = _running(workspace, name)
    running = record.port if record else None
    if running is not None and wanted not in (None, running):
        raise ConfigError(
            f"{name} runs already on port {running}",
            f"port {wanted}, as given",
            "leave the port out, or run `rlhf down` first",
        )
    if running is not None:
        return running
    if wanted is None and _torn_note(workspace, name):
        # The default may be another port than the one that clients and the worker know.
        raise ConfigError(
            f"The port of {name} is not known",
            "a record of it, or a port that is given",
            _torn_note(workspace, name),
        )
    # Clients and the worker keep the address of a server that crashed.
    crashed = read_record(directory_of(workspace), name)
    known = crashed.port if crashed is not None else None
    return wanted if wanted is not None else known or DEFAULT_PORTS[name]


def _running(workspace: Workspace, name: str) -> ServiceRecord | None:
    record = read_record(directory_of(workspace), name)
    return record if living(record) is not None else None


def _started(workspace: Workspace, service: Service, started: list[str]) -> ServiceRecord:
    record = _running(workspace, service.name)
    if record is None:
        started.append(service.name)
        record = start(service)
    return record


def _wait(record: ServiceRecord, api_url: str) -> None:
    if wait_until(lambda: is_healthy(record, api_url), record, _START_SECONDS):
        return
    with open(record.log_path, errors="replace") as log:
        lines = [line.strip() for line in log.readlines()[-40:] if line.strip()]
    raise ClusterError(
        f"{record.name} did not start: {' | '.join(lines[-3:]) or 'it said nothing'}",
        f"an answer within {_START_SECONDS:.0f} s",
        f"look at {record.log_path}",
    )


def _stop(workspace: Workspace, names: list[str]) -> dict[str, int]:
    """Stop services, the worker first: its flows need the servers to say how they ended."""
    directory = directory_of(workspace)
    order = [name for name in (WORKER, MLFLOW, PREFECT) if name in names]
    return {name: stop(directory, name, _STOP_SECONDS[name]) for name in order}


# What `rlhf status` tells: services, flow runs, and artefacts that are not up to date.

_REQUEST_SECONDS = 10
_RUNS = 10
_BROKEN = ("died", "not answering", "unknown")
_COLOURS = {"running": "green", "stopped": "cyan", **dict.fromkeys(_BROKEN, "red")}


class FlowRunState(BaseModel):
    """A flow run that works or waits."""

    name: str
    state: str
    since: str
    url: str


class Status(BaseModel):
    """Everything that `rlhf status` prints; ``problems`` says what could not be read."""

    workspace: str
    services: list[ServiceState]
    runs: list[FlowRunState]
    stale: list[StaleArtifact]
    problems: list[str] = []

    @property
    def is_broken(self) -> bool:
        """Whether something that was started does not work, or could not be asked."""
        return bool(self.problems) or any(one.state in _BROKEN for one in self.services)


def read_status(workspace: Workspace, tracking: TrackingConfig) -> Status:
    """Look at the workspace's services, the server's runs and the experiment's artefacts."""
    status = Status(workspace=str(workspace.root), services=states(workspace), runs=[], stale=[])
    # When a server fails, the table of services is what is needed most.
    try:
        status.runs = _runs(workspace)
    except RlhfError as error:
        status.problems.append(str(error))
    try:
        status.stale = _stale(workspace, tracking)
    except RlhfError as error:
        status.problems.append(str(error))
    return status


def _stale(workspace: Workspace, tracking: TrackingConfig) -> list[StaleArtifact]:
    is_local = tracking.tracking_uri is None and workspace.tracking_uri == workspace.database_uri
    if is_local and not (workspace.root / "mlflow.db").is_file():
        return []
    from tasks.tracking.mlflow import connect

    return stale_artifacts(connect(tracking, workspace))


def _runs(workspace: Workspace) -> list[FlowRunState]:
    """Return what runs, and the next few that are scheduled; nothing without a server."""
    running = running_addresses(workspace)
    if running is None:
        return []
    api_url = running[0]
    wanted = ["RUNNING", "PENDING", "CANCELLING", "PAUSED"]
    return [*_query(api_url, wanted), *_query(api_url, ["SCHEDULED"])[:3]]


def _query(api_url: str, types: list[str]) -> list[FlowRunState]:
    body = {
        "flow_runs": {"state": {"type": {"any_": types}}},
        "sort": "EXPECTED_START_TIME_ASC",
        "limit": _RUNS,
    }
    try:
        with api_client(api_url, _REQUEST_SECONDS) as client:
            found = client.post("/flow_runs/filter", json=body).raise_for_status().json()
    except httpx.HTTPError as error:
        raise api_failure(api_url, error) from error
    page = api_url.removesuffix("/api") + "/runs/flow-run"
    return [
        FlowRunState(
            name=run["name"],
            state=run["state_name"],
            since=run["start_time"] or run["expected_start_time"] or "",
            url=f"{page}/{run['id']}",
        )
        for run in found
    ]


def print_services(console: Console, services: list[ServiceState]) -> None:
    """Print a row per service."""
    table = Table("service", "state", "address", "pid", "log", title_justify="left")
    for one in services:
        state = f"[{_COLOURS[one.state]}]{one.state}[/]"
        is_up = one.state in ("running", "not answering")
        left = f"{one.processes} left" if one.processes else ""
        table.add_row(one.name, state, one.url, str(one.pid) if is_up else left, one.log_path)
    console.print(table)
    for one in services:
        if one.note:
            _say(console, one.note)


def print_status(console: Console, status: Status) -> None:
    """Print services, runs and what is not up to date."""
    print_services(console, status.services)
    for run in status.runs:
        _say(console, f"{run.state}: {run.name} since {run.since}  {run.url}")
    for problem in status.problems:
        _say(console, f"Could not be read: {problem}")
    if not status.stale and not status.problems:
        _say(console, "Every artefact stands on the newest version of its upstreams.")
    for artifact in status.stale:
        _say(console, f"Not up to date: {artifact.name}, run {artifact.run_id}, {artifact.path}")
        for reason in artifact.reasons:
            _say(console, f"  {reason}")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
