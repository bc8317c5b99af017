"""What `rlhf up` starts: a Prefect server, an MLflow server and a worker, on loopback."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

import httpx

from flows.prefect_api import api_client
from flows.processes import HOST, Service, ServiceRecord, living, read_record
from tasks.loading_config import PROJECT_ROOT
from tasks.workspace import HOME_VARIABLE, TRACKING_VARIABLE, Workspace

PREFECT = "prefect"
MLFLOW = "mlflow"
WORKER = "worker"
SERVICES = (PREFECT, MLFLOW, WORKER)
POOL = "rlhf"
WORKER_NAME = "rlhf-up"
DEFAULT_PORTS = {PREFECT: 4200, MLFLOW: 5000}
# A flow that sends no heartbeat three times is dead: deployments/automations.yaml.
HEARTBEAT_SECONDS = 30
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
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    return _service(workspace, PREFECT, [*command, "--port", str(port)], environment, port)


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
    return _service(workspace, MLFLOW, command, environment, port)


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
        "PYTHONPATH": _python_path(),
    }
    return _service(workspace, WORKER, command, environment, None)


def client_environment(workspace: Workspace, api_url: str, tracking_uri: str) -> dict[str, str]:
    """Return what a program needs to use the servers."""
    return {
        HOME_VARIABLE: str(workspace.root),
        TRACKING_VARIABLE: tracking_uri,
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_API_URL": api_url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _python_path() -> str:
    """Return where flows are imported from, also where the project is not installed."""
    return os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))


def _service(
    workspace: Workspace,
    name: str,
    command: list[str],
    environment: dict[str, str],
    port: int | None,
) -> Service:
    directory = directory_of(workspace)
    return Service(name, command, environment, directory, port, PROJECT_ROOT)


def is_healthy(record: ServiceRecord, api_url: str) -> bool:
    """Tell whether a service does its work: a server answers, the worker sends heartbeats."""
    if record.name == WORKER:
        prefect = read_record(Path(record.log_path).parent, PREFECT)
        # The database may still have a heartbeat from before the server's start.
        since = max(record.started_at, prefect.started_at if prefect else 0.0)
        return _worker_is_online(api_url, since)
    path = "/api/health" if record.name == PREFECT else "/health"
    try:
        with urllib.request.urlopen(base_url(record.port) + path, timeout=_PROBE_SECONDS):
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
