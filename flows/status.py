"""What `rlhf status` tells: services, flow runs, and artefacts that are not up to date."""

from __future__ import annotations

import httpx
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flows.prefect_api import api_client, api_failure
from flows.services import running_addresses
from flows.staleness import StaleArtifact, stale_artifacts
from flows.up import ServiceState, states
from tasks.config import TrackingConfig
from tasks.errors import RlhfError
from tasks.workspace import Workspace

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
    from tasks.tracking import connect

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
