"""What a chain leaves in MLflow: one query for its runs, figures to compare, the machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.stages import RunOptions
from tasks.artifacts import read_manifest
from tasks.config.shared import STAGES, TrackingConfig
from tasks.context import StageContext
from tasks.tracking.mlflow import PIPELINE, RunRecord, Tracker, member_tag
from tasks.tracking.registry import CANDIDATE, Registry
from tasks.tracking.run_log import ProgressDisplay, StageLog, machine_watched

Run = Callable[..., str]


def _chains(tracker: Tracker) -> list[str]:
    """Return the ids of the chains, the newest first."""
    return [run.run_id for run in tracker.find_runs({"stage": PIPELINE})]


def _members(tracker: Tracker, chain: str) -> list[RunRecord]:
    """Return the run of a chain and those of its stages."""
    words = ("chain", "ran", "reused")
    return [run for word in words for run in tracker.find_runs({member_tag(chain): word})]


@pytest.mark.slow
def test_a_tag_finds_the_runs_of_a_chain_reused_ones_too(run_chain: Run, tracker: Tracker) -> None:
    run_chain()
    (first,) = _chains(tracker)
    _check_layout(tracker, first)
    run_chain(rerun_from="distill")
    second = _chains(tracker)[0]
    stages = [run.stage for run in _members(tracker, first)]
    assert sorted(map(str, stages)) == sorted([PIPELINE, *STAGES])
    parts = {str(run.stage): run.tags[member_tag(second)] for run in _members(tracker, second)}
    assert parts == {
        PIPELINE: "chain",
        "ingest": "reused",
        "sft": "reused",
        "reward_model": "reused",
        "offline_ppo": "reused",
        "distill": "ran",
        "evaluate": "ran",
    }
    # The figures of all stages are on the chain's own run, so that chains are compared like runs.
    metrics = tracker.read_run(second).metrics
    assert {f"{stage}/accuracy": 0.75 for stage in STAGES}.items() <= metrics.items()


def _check_layout(tracker: Tracker, chain: str) -> None:
    """Check names, nesting, parameters, files, datasets, models and the registered version."""
    client = MlflowClient(tracker.tracking_uri)
    runs = {str(run.stage): run for run in _members(tracker, chain)}
    for stage in STAGES:
        run = runs[stage]
        assert run.name == stage
        assert run.tags["mlflow.parentRunId"] == chain
        assert run.tags["machine.cpu"] and run.tags["machine.platform"]
        assert {"system/cpu_utilization_percentage", "system/system_memory_usage_percentage"} <= (
            set(run.metrics)
        )
        config = json.loads(str(tracker.read_text(run.run_id, "config.json")))
        assert run.params["seed"] == str(config["seed"]) == "0"
        assert max(map(len, run.params.values())) <= 500
        assert tracker.read_text(run.run_id, "artifact.json") is not None
    inputs = client.get_run(runs["distill"].run_id).inputs
    assert [entry.dataset.name for entry in inputs.dataset_inputs] == ["preferences"]
    assert len(inputs.model_inputs) == 3  # The policy, the base and the reward model.
    (model,) = client.get_run(runs["distill"].run_id).outputs.model_outputs
    version = Registry(tracker).aliased(CANDIDATE)
    assert version.run_id == runs["distill"].run_id
    found = client.get_model_version(version.name, str(version.version))
    assert found.source == f"models:/{model.model_id}"
    for stage in ("evaluate", PIPELINE):
        assert "no gate is set" in runs[stage].tags["promotion"]


@pytest.mark.slow
def test_artefact_that_was_deleted_under_a_cached_stage_is_made_again(
    run_chain: Run, tracker: Tracker
) -> None:
    report = run_chain()
    base = read_manifest(Path(report)).parents["base"]
    shutil.rmtree(base.path)
    # As if the process had been killed after it had published the student.
    student = tracker.latest_finished("distill")
    assert student is not None
    tracker.reopen(student.run_id)
    assert run_chain() == report
    second = _chains(tracker)[0]
    ran = [run.stage for run in _members(tracker, second) if run.tags[member_tag(second)] == "ran"]
    assert ran == ["sft"]
    latest = tracker.latest_finished("sft")
    assert latest is not None and latest.tags["fingerprint"] == base.fingerprint
    # The run that was settled has one model and one version, as before.
    assert tracker.read_run(student.run_id).status == "FINISHED"
    assert [version.version for version in Registry(tracker).versions()] == [1]
    outputs = MlflowClient(tracker.tracking_uri).get_run(student.run_id).outputs
    assert len(outputs.model_outputs) == 1


def test_machine_is_sampled_and_once_more_at_the_end(tracker: Tracker) -> None:
    run_id = tracker.start_run("sft", {}, {})
    log = StageLog(tracker, run_id, "sft", ProgressDisplay("sft"))
    with machine_watched(log, 0.05):
        time.sleep(0.2)
    log.close()
    history = tracker.metric_history(run_id, "system/system_memory_usage_megabytes")
    assert [step for step, _ in history] == list(range(len(history)))
    assert len(history) >= 3
    assert all(value > 1 for _, value in history)


def test_sampling_can_be_off(tracker: Tracker) -> None:
    run_id = tracker.start_run("sft", {}, {})
    log = StageLog(tracker, run_id, "sft", ProgressDisplay("sft"))
    with machine_watched(log, None):
        pass
    log.close()
    assert tracker.read_run(run_id).metrics == {}


@pytest.mark.slow
def test_stage_without_samples(run_stage: Run, tracker: Tracker, before_publishing: Any) -> None:
    seen: list[str] = []
    before_publishing("ingest", lambda ctx: seen.append(_stage_of(ctx)))
    tracking = TrackingConfig(system_metrics_seconds=None)
    run_stage("ingest", RunOptions(tracking=tracking))
    assert seen == ["ingest"]
    (run,) = tracker.find_runs({"stage": "ingest"})
    assert not [name for name in run.metrics if name.startswith("system/")]


def _stage_of(ctx: StageContext) -> str:
    return ctx.stage
