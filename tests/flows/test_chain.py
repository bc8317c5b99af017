"""The frame of the chain: one MLflow run, reuse, the summary, retries."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry

from flows.outcomes import StageOutcome, monitored
from tasks.config.shared import STAGES, TrackingConfig
from tasks.context import StageContext
from tasks.errors import MissingInputError, StageTimeoutError
from tasks.ingest.config import IngestConfig
from tasks.tracking.lineage import lineage_tree, locate
from tasks.tracking.mlflow import PIPELINE, RunRecord, Tracker
from tasks.workspace import Workspace

pytestmark = pytest.mark.slow

Run = Callable[..., str]


def _dawdle(ctx: StageContext) -> None:
    """Take 20 s in small pieces: beside pytest's own timer a sleep is not interrupted."""
    for _ in range(200):
        time.sleep(0.1)


def _pipeline(tracker: Tracker) -> RunRecord:
    return tracker.find_runs({"stage": PIPELINE})[0]


def _outcomes(tracker: Tracker) -> dict[str, StageOutcome]:
    tags = _pipeline(tracker).tags
    return {
        stage: StageOutcome.model_validate_json(tags[f"outcome.{stage}"])
        for stage in STAGES
        if f"outcome.{stage}" in tags
    }


def test_summary_has_the_promised_form(run_chain: Run, workspace: Workspace) -> None:
    report = run_chain()
    summary = json.loads(workspace.summary_path.read_text())
    assert set(summary) == {"stages", "wall_seconds", "peak_rss_bytes", "demo"}
    assert list(summary["stages"]) == list(STAGES)
    for stage in summary["stages"].values():
        assert set(stage) == {"artifact", "fingerprint", "mlflow_run_id", "seconds", "metrics"}
        assert stage["metrics"] == {"accuracy": 0.75}
        assert stage["seconds"] > 0
    assert summary["stages"]["evaluate"]["artifact"] == report
    assert summary["demo"] == {
        "oracle_good_rate": {"base": None, "policy": None, "student": None},
        "reward_accuracy_clean": 0.9,
    }
    # This process alone has more than 50 MB with Prefect and MLflow loaded.
    assert summary["peak_rss_bytes"] > 50e6
    assert summary["wall_seconds"] >= sum(s["seconds"] for s in summary["stages"].values())
    assert list(workspace.root.glob(".summary*")) == []


def test_stages_are_nested_and_traceable(run_chain: Run, tracker: Tracker) -> None:
    report = run_chain()
    pipeline = _pipeline(tracker)
    assert pipeline.status == "FINISHED"
    children = tracker.find_runs({"mlflow.parentRunId": pipeline.run_id}, "FINISHED")
    assert sorted(str(run.stage) for run in children) == sorted(STAGES)
    assert all(run.tags["pipeline.run_id"] == pipeline.run_id for run in children)
    tree = lineage_tree(tracker, report)
    assert tree.broken == []
    assert {node.stage for node in tree.walk()} == {*STAGES, None}
    assert [node.status for node in tree.walk() if node.kind == "file"] == ["verified"]
    for stage in STAGES:
        assert str(locate(tracker, f"runs:/{pipeline.run_id}", stage)) == (
            _outcomes(tracker)[stage].artifact
        )


def test_reuse_is_all_or_from_a_stage_or_off(run_chain: Run, tracker: Tracker) -> None:
    first = run_chain()
    with monitored() as monitor:
        assert run_chain() == first
    assert all(outcome.reused for outcome in monitor.outcomes.values())
    assert list(monitor.outcomes) == list(STAGES)
    assert all(len(tracker.find_runs({"stage": stage})) == 1 for stage in STAGES)

    run_chain("offline_ppo")
    states = {stage: outcome.reused for stage, outcome in _outcomes(tracker).items()}
    assert states == {
        "ingest": True,
        "sft": True,
        "reward_model": True,
        "offline_ppo": False,
        "distill": False,
        "evaluate": False,
    }

    run_chain(reuse=False)
    assert not any(outcome.reused for outcome in _outcomes(tracker).values())


def test_failure_stops_the_chain_and_marks_it(
    run_chain: Run, tracker: Tracker, workspace: Workspace, before_publishing: Any
) -> None:
    def fail(ctx: StageContext) -> None:
        raise RuntimeError("broken")

    before_publishing("reward_model", fail)
    with pytest.raises(RuntimeError, match="broken"):
        run_chain()
    pipeline = _pipeline(tracker)
    assert (pipeline.status, pipeline.tags["failure"]) == ("FAILED", "RuntimeError: broken")
    statuses = {stage: [r.status for r in tracker.find_runs({"stage": stage})] for stage in STAGES}
    assert statuses == {
        "ingest": ["FINISHED"],
        "sft": ["FINISHED"],
        "reward_model": ["FAILED"],
        "offline_ppo": [],
        "distill": [],
        "evaluate": [],
    }
    assert not workspace.summary_path.exists()


def test_bad_input_is_refused_before_any_stage(run_chain: Run, tracker: Tracker) -> None:
    with pytest.raises(MissingInputError, match="/nowhere"):
        run_chain(ingest=IngestConfig(source="/nowhere/pairs.jsonl"))
    assert _pipeline(tracker).status == "FAILED"
    assert tracker.find_runs({"stage": "ingest"}) == []


def test_retry_of_a_failed_chain_skips_what_is_done(
    run_chain: Run, chain_flow: Any, tracker: Tracker, workspace: Workspace, before_publishing: Any
) -> None:
    attempts: list[str] = []

    def fail_once(ctx: StageContext) -> None:
        attempts.append(ctx.stage)
        if len(attempts) == 1:
            raise RuntimeError("once")

    before_publishing("distill", fail_once)
    with pytest.raises(RuntimeError, match="once"):
        run_chain()
    failed = _pipeline(tracker)
    with get_client(sync_client=True) as client:
        # What the UI's retry button does: the same flow run, put back into a state to run from.
        named = FlowFilter(name=FlowFilterName(any_=["mini-chain"]))
        runs = client.read_flow_runs(flow_filter=named)
        mine = next(r for r in runs if str(r.id) == failed.tags["prefect.flow_run_id"])
        client.set_flow_run_state(mine.id, AwaitingRetry(), force=True)
        run_flow(chain_flow, flow_run=client.read_flow_run(mine.id))
    pipeline = _pipeline(tracker)
    assert (pipeline.run_id, pipeline.status) == (failed.run_id, "FINISHED")
    assert pipeline.tags["earlier_failure"] == "RuntimeError: once"
    assert "failure" not in pipeline.tags
    assert attempts == ["distill", "distill"]
    statuses = {stage: [r.status for r in tracker.find_runs({"stage": stage})] for stage in STAGES}
    assert statuses["offline_ppo"] == ["FINISHED"]
    assert sorted(statuses["distill"]) == ["FAILED", "FINISHED"]
    assert list(json.loads(workspace.summary_path.read_text())["stages"]) == list(STAGES)


def test_artefact_that_was_edited_is_not_reused(run_chain: Run, tracker: Tracker) -> None:
    run_chain()
    base = Path(_outcomes(tracker)["sft"].artifact)
    (base / "payload.bin").write_bytes(b"xxx")
    with pytest.raises(Exception, match=r"payload\.bin has SHA-256"):
        run_chain()
    assert _pipeline(tracker).status == "FAILED"


def test_orchestration_costs_at_most_three_seconds_a_stage(
    run_chain: Run, mlflow_server: str
) -> None:
    """Stages that do nothing, on running servers: all of the time is orchestration."""
    tracking = TrackingConfig(tracking_uri=mlflow_server, experiment="cost")
    started = time.monotonic()
    run_chain(tracking=tracking)
    seconds = (time.monotonic() - started) / len(STAGES)
    print(f"{seconds:.2f} s a stage")
    assert seconds < 3.0


def test_artefact_deleted_under_a_cached_stage_is_made_again(
    run_chain: Run, tracker: Tracker
) -> None:
    run_chain()
    before = _outcomes(tracker)
    shutil.rmtree(before["sft"].artifact)
    run_chain()
    after = _outcomes(tracker)
    ran = [stage for stage, outcome in after.items() if not outcome.reused]
    # The same config, inputs and code give the same fingerprint, so that what stands on it stays.
    assert ran == ["sft"]
    assert after["sft"].fingerprint == before["sft"].fingerprint


def test_timeout_of_a_stage_ends_the_chain(
    run_chain: Run, tracker: Tracker, before_publishing: Any
) -> None:
    before_publishing("sft", _dawdle)
    with pytest.raises(StageTimeoutError, match="Stage sft"):
        run_chain(stage_timeout_seconds=1)
    assert _pipeline(tracker).status == "FAILED"
    assert [run.status for run in tracker.find_runs({"stage": "sft"})] == ["FAILED"]
