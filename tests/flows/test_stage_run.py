"""The stage runner on real Prefect and MLflow: statuses, reuse, locks, resumption."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from mlflow import MlflowClient
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import FlowRun

from flows.stages import RunOptions
from tasks.artifacts import PolicyCheckpoint, StudentAdapter, load_artifact, read_manifest
from tasks.context import StageContext
from tasks.errors import MissingInputError, StageTimeoutError, TrainingError, WorkspaceError
from tasks.tracking.lineage import registered_version, resolve_reference
from tasks.tracking.mlflow import RunRecord, Tracker
from tasks.tracking.registry import CANDIDATE, CHAMPION, Registry
from tasks.workspace import Workspace, process_name, workspace_name

pytestmark = pytest.mark.slow

Run = Callable[..., str]
SharedCases = Callable[[str], list[dict[str, Any]]]
REUSE = RunOptions(reuse=True)
TRIAL_OF_AN_ABLATION = RunOptions(is_trial=True)


def _runs(tracker: Tracker, stage: str) -> list[RunRecord]:
    return tracker.find_runs({"stage": stage})


def _only_run(tracker: Tracker, stage: str) -> RunRecord:
    (run,) = _runs(tracker, stage)
    return run


def _dawdle(ctx: StageContext) -> None:
    """Take 20 s in small pieces: beside pytest's own timer a sleep is not interrupted."""
    for _ in range(200):
        time.sleep(0.1)


def _checkpoints(workspace: Workspace, stage: str) -> list[Path]:
    return list((workspace.root / "checkpoints" / stage).glob("*/step-1"))


def _flow_runs(name: str) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=[name]))
        return client.read_flow_runs(flow_filter=named)


def test_finished_run_is_linked_to_its_result(
    run_stage: Run, tracker: Tracker, workspace: Workspace
) -> None:
    data = run_stage("ingest")
    base = load_artifact(Path(run_stage("sft", preferences=data)), PolicyCheckpoint)
    run = _only_run(tracker, "sft")
    assert run.status == "FINISHED"
    assert run.run_id == base.manifest.mlflow_run_id
    assert run.tags["artifact.path"] == str(base.path)
    assert run.tags["fingerprint"] == base.fingerprint
    assert run.tags["upstream.preferences.path"] == data
    assert run.tags["upstream.preferences.run_id"] == _only_run(tracker, "ingest").run_id
    assert run.tags["prefect.flow_run_id"] == base.manifest.prefect_flow_run_id
    metrics = MlflowClient(tracker.tracking_uri).get_run(run.run_id).data.metrics
    assert (metrics["loss"], metrics["summary/accuracy"], metrics["count/rows"]) == (0.5, 0.75, 3)
    assert _checkpoints(workspace, "sft") == []


def test_manifest_says_where_it_came_from(run_stage: Run) -> None:
    manifest = read_manifest(Path(run_stage("sft", preferences=run_stage("ingest"))))
    assert manifest.package_versions["torch"].startswith("2.")
    assert manifest.config["epochs"] == 1.0
    assert set(manifest.parents) == {"preferences"}
    assert manifest.metrics == {"accuracy": 0.75}


def test_prefect_shows_progress_result_and_the_mlflow_run(run_stage: Run, tracker: Tracker) -> None:
    run_stage("ingest")
    run = _only_run(tracker, "ingest")
    keys = ["ingest-progress", "ingest-result", "ingest-mlflow"]
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=keys))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=wanted)
    mine = [a for a in found if str(a.flow_run_id) == run.tags["prefect.flow_run_id"]]
    assert {artifact.key for artifact in mine} == set(keys)
    progress = next(artifact for artifact in mine if artifact.key == "ingest-progress")
    assert progress.data == 100.0


def test_single_stage_always_runs_and_the_chains_options_reuse(
    run_stage: Run, tracker: Tracker
) -> None:
    first = run_stage("ingest")
    assert run_stage("ingest", REUSE) == first
    assert len(_runs(tracker, "ingest")) == 1
    second = run_stage("ingest")
    assert second != first
    assert read_manifest(Path(second)).fingerprint == read_manifest(Path(first)).fingerprint
    assert run_stage("sft") != run_stage("sft")


def test_student_of_an_ablation_is_no_candidate_until_a_chain_uses_it(
    run_stage: Run, tracker: Tracker
) -> None:
    for stage in ("ingest", "sft", "reward_model", "offline_ppo"):
        run_stage(stage)
    chain, registry = run_stage("distill"), Registry(tracker)
    assert [version.version for version in registry.versions()] == [1]
    trial = run_stage("distill", TRIAL_OF_AN_ABLATION)
    run_id = str(read_manifest(Path(trial)).mlflow_run_id)
    # As if the process had been killed after it had published the student.
    tracker.reopen(run_id)
    assert run_stage("distill", REUSE.model_copy(update={"is_trial": True})) == trial
    assert tracker.read_run(run_id).status == "FINISHED"
    assert [version.version for version in registry.versions()] == [1]
    with pytest.raises(MissingInputError, match=r"trial of an ablation.*run a chain"):
        registered_version(tracker, f"runs:/{run_id}")
    said = read_manifest(Path(run_stage("evaluate", student=trial))).mlflow_run_id
    assert "is no version" in tracker.read_run(str(said)).tags["promotion"]
    assert resolve_reference(tracker, "latest", "distill", StudentAdapter).path == Path(chain)
    assert registry.aliased(CANDIDATE).version == 1
    assert run_stage("distill", REUSE) == trial
    assert registry.aliased(CANDIDATE).run_id == run_id
    assert resolve_reference(tracker, "latest", "distill", StudentAdapter).path == Path(trial)
    assert run_stage("distill", REUSE) == trial
    assert [version.version for version in registry.versions()] == [2, 1]


def test_reused_evaluation_decides_anew_and_tells_the_chain_of_now(
    run_stage: Run, tracker: Tracker, before_publishing: Any
) -> None:
    for stage in ("ingest", "sft", "reward_model", "offline_ppo", "distill"):
        run_stage(stage)
    before_publishing("evaluate", lambda ctx: {"gate": {"verdict": "passed", "checks": []}})
    first = run_stage("evaluate", changes={"promotion": {"enabled": False}})
    assert "promotion is off" in _only_run(tracker, "evaluate").tags["promotion"]
    chain = tracker.start_run("chain", {"stage": "pipeline"}, {})
    options = REUSE.model_copy(update={"pipeline_run_id": chain})
    assert run_stage("evaluate", options) == first
    assert Registry(tracker).aliased(CHAMPION).version == 1
    for run in (tracker.read_run(chain), _only_run(tracker, "evaluate")):
        assert run.tags["promotion"] == "version 1 of rlhf-flows-student is the champion"


def test_policy_of_an_ablation_is_not_the_latest(run_stage: Run, tracker: Tracker) -> None:
    trial = run_stage("ingest", TRIAL_OF_AN_ABLATION)
    run_id = read_manifest(Path(trial)).mlflow_run_id
    with pytest.raises(MissingInputError, match=rf"but trials of an ablation.*runs:/{run_id}"):
        run_stage("sft")
    own = run_stage("ingest")
    run_stage("ingest", TRIAL_OF_AN_ABLATION)
    assert read_manifest(Path(run_stage("sft"))).parents["preferences"].path == own


def test_exception_marks_the_run_failed_and_keeps_the_checkpoint(
    run_stage: Run, tracker: Tracker, workspace: Workspace, before_publishing: Any
) -> None:
    def fail(ctx: StageContext) -> None:
        raise TrainingError("loss is nan at step 3", "a number", "lower the learning rate")

    before_publishing("ingest", fail)
    with pytest.raises(TrainingError, match="step 3"):
        run_stage("ingest")
    run = _only_run(tracker, "ingest")
    assert run.status == "FAILED"
    assert run.tags["failure"] == (
        "loss is nan at step 3. Expected: a number. Fix: lower the learning rate."
    )
    assert len(_checkpoints(workspace, "ingest")) == 1
    assert not list(workspace.artifacts_dir("ingest").glob("*"))


def test_interruption_marks_the_run_killed(
    run_stage: Run, tracker: Tracker, before_publishing: Any
) -> None:
    def interrupt(ctx: StageContext) -> None:
        raise KeyboardInterrupt

    before_publishing("ingest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_stage("ingest")
    assert _only_run(tracker, "ingest").status == "KILLED"


def test_timeout_marks_the_run_failed_and_keeps_the_checkpoint(
    run_stage: Run, tracker: Tracker, workspace: Workspace, before_publishing: Any
) -> None:
    before_publishing("ingest", _dawdle)
    started = time.monotonic()
    with pytest.raises(StageTimeoutError, match="Stage ingest took longer than its timeout of 1 s"):
        run_stage("ingest", RunOptions(timeout_seconds=1))
    assert time.monotonic() - started < 15
    run = _only_run(tracker, "ingest")
    assert run.status == "FAILED"
    assert "continues from the last checkpoint" in run.tags["failure"]
    assert len(_checkpoints(workspace, "ingest")) == 1


def test_other_timeouts_of_a_stage_keep_their_name(run_stage: Run, before_publishing: Any) -> None:
    def fail(ctx: StageContext) -> None:
        raise TimeoutError("the store")

    before_publishing("ingest", fail)
    with pytest.raises(TimeoutError, match="the store"):
        run_stage("ingest", RunOptions(timeout_seconds=60))


def test_mlflow_leads_back_to_a_lasting_prefect_server(
    run_stage: Run, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage("ingest")
    tags = _only_run(tracker, "ingest").tags
    url = tags["prefect.flow_run_url"]
    assert url.endswith(f"/runs/flow-run/{tags['prefect.flow_run_id']}")
    assert tags["mlflow.note.content"].endswith(f"]({url})")
    # The page of a temporary server would be gone.
    monkeypatch.setenv("RLHF_TEMPORARY_PREFECT_API", "http://127.0.0.1:1/api")
    run_stage("sft")
    assert "prefect.flow_run_url" not in _only_run(tracker, "sft").tags


def test_missing_input_is_refused_before_the_task_and_recorded(
    run_stage: Run, tracker: Tracker, before_publishing: Any
) -> None:
    started: list[str] = []
    before_publishing("sft", lambda ctx: started.append(ctx.stage))
    with pytest.raises(MissingInputError, match="no finished ingest"):
        run_stage("sft")
    run = _only_run(tracker, "sft")
    assert (run.status, started) == ("FAILED", [])
    assert "no finished ingest" in run.tags["failure"]


def test_dead_run_is_ended_when_its_stage_resumes(
    run_stage: Run, tracker: Tracker, workspace: Workspace
) -> None:
    reference = read_manifest(Path(run_stage("ingest")))
    place = workspace_name(workspace.root)
    tags = {"stage": "ingest", "workspace": place, "fingerprint": reference.fingerprint}
    dead = tracker.start_run("ingest", {**tags, "process": "1:0"}, {})
    alive = tracker.start_run("other", {**tags, "stage": "x", "process": process_name()}, {})
    elsewhere = tracker.start_run(
        "other", {**tags, "stage": "y", "workspace": "other:/x", "process": "1:0"}, {}
    )
    resumed = read_manifest(Path(run_stage("ingest"))).mlflow_run_id
    ended = tracker.read_run(dead)
    assert ended.status == "KILLED"
    assert f"run {resumed} continues from its checkpoint" in ended.tags["failure"]
    assert tracker.read_run(alive).status == "RUNNING"
    assert tracker.read_run(elsewhere).status == "RUNNING"


def test_run_killed_after_publishing_is_settled_on_reuse(run_stage: Run, tracker: Tracker) -> None:
    path = run_stage("ingest")
    run_id = _only_run(tracker, "ingest").run_id
    tracker.reopen(run_id)
    assert run_stage("ingest", REUSE) == path
    assert tracker.read_run(run_id).status == "FINISHED"


def test_same_stage_twice_at_once_is_refused(run_stage: Run, workspace: Workspace) -> None:
    fingerprint = read_manifest(Path(run_stage("ingest"))).fingerprint
    lock = workspace.cache_dir / "locks" / f"ingest-{fingerprint[:16]}"
    with lock.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(WorkspaceError, match=r"is running in another process "):
            run_stage("ingest")
    run_stage("ingest")


def test_parameters_stay_small(run_stage: Run, shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("prefect") if case["id"] == "PF-04")
    run_stage("sft", preferences=run_stage("ingest"))
    sizes = [len(orjson.dumps(run.parameters)) for run in _flow_runs("mini-stage")]
    assert sizes
    assert max(sizes) < case["expected"]["limit"] / 100


def test_unhashable_inputs_run_the_task_each_time(
    prefect_server: None, shared_cases: SharedCases
) -> None:
    case = next(case for case in shared_cases("prefect") if case["id"] == "PF-01")
    calls: list[int] = []

    @task(cache_policy=NO_CACHE)
    def stage(ctx: object) -> None:
        calls.append(id(ctx))

    @flow(persist_result=True)
    def run() -> None:
        stage(threading.Lock())
        stage(threading.Lock())

    run()
    assert len(calls) == case["expected"]["task_runs"]


def test_fractional_retry_delay_works_at_the_first_retry(
    prefect_server: None, shared_cases: SharedCases
) -> None:
    case = next(case for case in shared_cases("prefect") if case["id"] == "PF-07")
    attempts: list[int] = []

    @flow(retries=1, retry_delay_seconds=case["input"]["retry_delay_seconds"])
    def flaky() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("first attempt")
        return len(attempts)

    assert flaky() == 2
