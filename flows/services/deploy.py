"""Deployments: the work pool, the flows of ``deployments/prefect.yaml``, the automations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from flows.services.records import POOL, api_client, api_failure, python_path
from tasks.config.loading import PACKAGED_CONFIGS, PROJECT_ROOT, find_config, load_config
from tasks.config.shared import STAGES, TrackingConfig
from tasks.errors import ClusterError, MissingInputError
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import Workspace

DEPLOYMENTS = PROJECT_ROOT / "deployments" / "prefect.yaml"
AUTOMATIONS = PROJECT_ROOT / "deployments" / "automations.yaml"
_DEPLOY_SECONDS = 180
_REQUEST_SECONDS = 20


def deploy(config: str, api_url: str, workspace: Workspace) -> list[str]:
    """Create or update everything on a Prefect server; schedules that were paused stay paused.

    Args:
        config: path or packaged name of what the deployments run by default.
        api_url: of the server.

    Returns:
        The names of the deployments, each with its flow's.

    Raises:
        MissingInputError: no such config, or the project's directory lacks its deployments.
        ClusterError: the server does not answer or refuses.
    """
    definition = rendered(config)
    try:
        with api_client(api_url, _REQUEST_SECONDS) as client:
            _ensure_pool(client)
            _deploy_flows(definition, api_url, workspace)
            _ensure_automations(client)
            return _deployed(client, [one["name"] for one in definition["deployments"]])
    except httpx.HTTPError as error:
        raise api_failure(api_url, error) from error


def rendered(config: str) -> dict[str, Any]:
    """Return ``prefect.yaml`` with the parameters of a config."""
    path = find_config(config)
    cfg = load_config(path)
    definition: dict[str, Any] = yaml.safe_load(_text(DEPLOYMENTS))
    # A worker may stand in another directory than this command.
    preset = path.stem if path.parent == PACKAGED_CONFIGS else str(path.resolve())
    for deployment in definition["deployments"]:
        given = deployment.get("parameters", {})
        deployment["parameters"] = {
            **{name: _for_experiment(value, cfg.tracking) for name, value in given.items()},
            **_parameters(deployment["entrypoint"], cfg),
            "preset": preset,
        }
    return definition


def _text(path: Path) -> str:
    if not path.is_file():
        raise MissingInputError(
            f"{path} is not there", "the project's source tree", "install it with `pip install -e`"
        )
    return path.read_text(encoding="utf-8")


def _parameters(entrypoint: str, cfg: PipelineConfig) -> dict[str, Any]:
    stem = Path(entrypoint.partition(":")[0]).stem
    if stem in STAGES:
        options = {"tracking": cfg.tracking.model_dump(mode="json")}
        return {"cfg": getattr(cfg, stem).model_dump(mode="json"), "options": options}
    return {"cfg": cfg.model_dump(mode="json")}


def _for_experiment(value: object, tracking: TrackingConfig) -> object:
    """Name the students of this config's experiment."""
    default = f"models:/{TrackingConfig().experiment}-student@"
    named = f"models:/{tracking.experiment}-student@"
    return value.replace(default, named) if isinstance(value, str) else value


def _ensure_pool(client: httpx.Client) -> None:
    """Create the work pool; one run at a time owns the GPUs. An existing one keeps its limit."""
    found = client.get(f"/work_pools/{POOL}")
    if found.status_code != httpx.codes.NOT_FOUND:
        found.raise_for_status()
        return
    pool = {
        "name": POOL,
        "type": "process",
        "concurrency_limit": 1,
        "description": "One process per run, one run at a time: it owns the GPUs.",
    }
    client.post("/work_pools/", json=pool).raise_for_status()


def _deploy_flows(definition: Mapping[str, Any], api_url: str, workspace: Workspace) -> None:
    path = workspace.root / "services" / "prefect.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(workspace.prefect_home),
        "RLHF_PROJECT": str(PROJECT_ROOT),
        "PYTHONPATH": python_path(),
    }
    done = _finished([*command, "--prefect-file", str(path)], environment, _DEPLOY_SECONDS)
    if done.returncode:
        tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise ClusterError(f"`prefect deploy` failed: {tail}", "", f"correct {DEPLOYMENTS}")


def _finished(
    command: list[str], environment: dict[str, str], timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=environment,
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"`prefect deploy` took longer than {timeout_seconds:g} s",
            "a server that answers",
            "look at the server's log, and try again",
        ) from error


def _ensure_automations(client: httpx.Client) -> None:
    for automation in yaml.safe_load(_text(AUTOMATIONS))["automations"]:
        named = {"automations": {"name": {"any_": [automation["name"]]}}}
        found = client.post("/automations/filter", json=named).raise_for_status().json()
        if found:
            client.put(f"/automations/{found[0]['id']}", json=automation).raise_for_status()
        else:
            client.post("/automations/", json=automation).raise_for_status()


def _deployed(client: httpx.Client, wanted: list[str]) -> list[str]:
    found = client.post("/deployments/filter", json={}).raise_for_status().json()
    flows = client.post("/flows/filter", json={}).raise_for_status().json()
    names = {flow["id"]: flow["name"] for flow in flows}
    return sorted(
        f"{names[one['flow_id']]}/{one['name']}" for one in found if one["name"] in wanted
    )
