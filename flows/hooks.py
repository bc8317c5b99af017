"""Prefect hooks: a flow that ends without telling MLflow does not leave a run RUNNING."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from pydantic import BaseModel

from flows.presets import lay_over, tracking_of
from tasks.config import TrackingConfig
from tasks.tracking import Status, connect
from tasks.workspace import Workspace


def mark_failed(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the flow's MLflow run as FAILED. Prefect demands these argument names."""
    _end_runs(flow_run, "FAILED", state)


def mark_killed(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the flow's MLflow run as KILLED, after a cancellation or the death of its process."""
    _end_runs(flow_run, "KILLED", state)


def _end_runs(flow_run: FlowRun, status: Status, state: State[Any]) -> None:
    tracker = connect(_tracking_of(flow_run.parameters), Workspace.from_environment())
    reason = f"Prefect: {state.message or state.name or status}"
    for run in tracker.find_runs({"prefect.flow_run_id": str(flow_run.id)}):
        # A chain's stages are flow runs of their own, which died with its process.
        for member in tracker.find_runs({"pipeline.run_id": run.run_id}, "RUNNING"):
            tracker.finish(member.run_id, status, failure=reason)
        if run.status == "RUNNING":
            tracker.finish(run.run_id, status, failure=reason)


def _tracking_of(parameters: Mapping[str, Any]) -> TrackingConfig:
    """Return where the flow recorded its run, completed from the preset as the flow does it."""
    preset = parameters.get("preset")
    options = _mapping(parameters.get("options"))
    if options.get("tracking") is not None:
        return TrackingConfig.model_validate(options["tracking"])
    start = TrackingConfig() if preset is None else tracking_of(preset)
    given = _mapping(_mapping(parameters.get("cfg")).get("tracking"))
    return TrackingConfig.model_validate(lay_over(start, given))


def _mapping(section: object) -> Mapping[str, Any]:
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json", exclude_unset=True)
    return section if isinstance(section, Mapping) else {}


HOOKS: dict[str, Any] = {
    "on_failure": [mark_failed],
    "on_cancellation": [mark_killed],
    "on_crashed": [mark_killed],
}
