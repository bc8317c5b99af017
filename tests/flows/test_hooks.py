"""Hooks end the MLflow run of a flow that could not do so itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Crashed, Failed

from flows.stage_run import HOOKS, _tracking_of, mark_failed, mark_killed
from flows.stages import RunOptions
from tasks.config.shared import TrackingConfig
from tasks.tracking.mlflow import connect
from tasks.workspace import Workspace

_OPTIONS = RunOptions(tracking=TrackingConfig(experiment="of-the-options"))


@flow
def tracked_flow(options: RunOptions = _OPTIONS) -> str:
    """Return the id of its own run."""
    from prefect.runtime import flow_run

    return str(flow_run.id)


def test_hooks_have_the_argument_names_that_prefect_demands() -> None:
    for hook in {hook for hooks in HOOKS.values() for hook in hooks}:
        assert list(inspect.signature(hook).parameters) == ["flow", "flow_run", "state"]
    assert set(HOOKS) == {"on_failure", "on_cancellation", "on_crashed"}


def test_partial_tracking_is_completed_from_the_preset(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("tracking: {tracking_uri: 'http://127.0.0.1:9', experiment: of-the-preset}\n")
    chain = {"cfg": {"tracking": {"experiment": "given"}}, "preset": str(preset)}
    expected = TrackingConfig(tracking_uri="http://127.0.0.1:9", experiment="given")
    assert _tracking_of(chain) == expected
    # A stage has options, which the flow takes whole or, where they say nothing, from the preset.
    stage = {"cfg": {"seed": 1}, "options": {"reuse": True}, "preset": str(preset)}
    assert _tracking_of(stage).experiment == "of-the-preset"
    assert _tracking_of({**stage, "options": _OPTIONS}) == _OPTIONS.tracking
    assert _tracking_of({}) == TrackingConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "state", "status"),
    [
        (mark_failed, Failed(message="boom"), "FAILED"),
        (mark_killed, Cancelled(message="by hand"), "KILLED"),
        (mark_killed, Crashed(message="no heartbeat"), "KILLED"),
    ],
)
def test_running_run_of_the_flow_is_ended(
    prefect_server: None, workspace: Workspace, hook: Any, state: Any, status: str
) -> None:
    flow_run_id = tracked_flow(_OPTIONS)
    tracker = connect(_OPTIONS.tracking, workspace)
    mine = tracker.start_run("sft", {"prefect.flow_run_id": flow_run_id}, {})
    other = tracker.start_run("sft", {"prefect.flow_run_id": "another"}, {})
    stage = tracker.start_run("sft", {"pipeline.run_id": mine}, {})
    done = tracker.start_run("ingest", {"pipeline.run_id": mine}, {})
    tracker.finish(done, "FINISHED")
    with get_client(sync_client=True) as client:
        # The hook runs in another process, where parameters are what the server returns.
        flow_run = client.read_flow_run(flow_run_id)  # type: ignore[arg-type]
    hook(tracked_flow, flow_run, state)
    ended = tracker.read_run(mine)
    assert (ended.status, ended.tags["failure"]) == (status, f"Prefect: {state.message}")
    assert tracker.read_run(other).status == "RUNNING"
    # A stage of the chain died with it; one that was finished stays so.
    assert tracker.read_run(stage).status == status
    assert tracker.read_run(stage).tags["failure"] == f"Prefect: {state.message}"
    assert tracker.read_run(done).status == "FINISHED"
