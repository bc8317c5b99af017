"""The MLflow run of a stage: opened, linked to its upstreams and its result, always ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from flows.environment import is_temporary
from flows.monitor import StageOutcome
from flows.options import RunOptions
from flows.prepare import Prepared
from flows.reporting import publish_link
from tasks.artifacts import (
    MANIFEST_NAME,
    Artifact,
    Draft,
    EvalReport,
    PreferenceDataset,
    StudentAdapter,
    read_manifest,
)
from tasks.config import Stage, StageConfig
from tasks.context import StageContext
from tasks.errors import MissingInputError, RlhfError
from tasks.lineage import upstream_tags
from tasks.model_registry import Registry
from tasks.progress import ProgressDisplay
from tasks.provenance import (
    git_commit,
    is_process_alive,
    machine,
    package_versions,
    process_name,
    workspace_name,
)
from tasks.run_log import StageLog, run_logger
from tasks.system_metrics import machine_watched
from tasks.tracking import TRIAL, MetricPoint, Status, Tracker, member_tag
from tasks.tracking_values import clean_name
from tasks.workspace import Workspace

# Files of an artefact that people look at in MLflow.
_PAGES = ("card.md", "report.md", "report.json", "report.html", "scores.png", "radar.png")


@contextmanager
def refusal_recorded(
    tracker: Tracker, stage: Stage, cfg: StageConfig, options: RunOptions
) -> Iterator[None]:
    """Leave a FAILED run behind when a stage is refused before it starts."""
    try:
        yield
    except Exception as error:
        tags = {"stage": stage, **_common_tags(options)}
        run_id = tracker.start_run(stage, tags, cfg.model_dump(mode="json"))
        tracker.finish(run_id, "FAILED", failure=describe(error))
        raise


def describe(error: BaseException) -> str:
    """Return the text of the ``failure`` tag."""
    text = str(error)
    name = type(error).__name__
    return text if isinstance(error, RlhfError) and text else f"{name}: {text}" if text else name


def _common_tags(options: RunOptions) -> dict[str, str | None]:
    return {
        "mlflow.parentRunId": options.pipeline_run_id,
        "pipeline.run_id": options.pipeline_run_id,
        "git.commit": git_commit(),
        TRIAL: "true" if options.is_trial else None,
        **prefect_tags(),
    }


def prefect_tags() -> dict[str, str | None]:
    """Return the tags that lead from an MLflow run to its Prefect run.

    The page of a temporary server is gone with it, so only a lasting one is linked; MLflow shows
    the note as the run's description.
    """
    tags: dict[str, str | None] = {"prefect.flow_run_id": flow_run.id}
    url = None
    if flow_run.id is not None and not is_temporary():
        url = url_for("flow-run", obj_id=flow_run.id)
    if url is not None:
        name = f"Prefect run {flow_run.name}"
        tags |= {"prefect.flow_run_url": url, "mlflow.note.content": f"[{name}]({url})"}
    return tags


@contextmanager
def tracked(
    tracker: Tracker, workspace: Workspace, prepared: Prepared, options: RunOptions
) -> Iterator[StageContext]:
    """Open the MLflow run, and end it as FINISHED, FAILED or KILLED."""
    run_id = _open_run(tracker, workspace, prepared, options)
    log = StageLog(tracker, run_id, prepared.stage, ProgressDisplay(prepared.stage))
    context = _context(workspace, prepared, run_id, log)
    try:
        publish_link(tracker, prepared.stage, run_id)
        with machine_watched(log, options.tracking.system_metrics_seconds):
            yield context
        log.close()
    except Exception as error:
        _end(log, "FAILED", error)
        raise
    except BaseException as error:
        _end(log, "KILLED", error)
        raise
    tracker.finish(run_id, "FINISHED")
    # Only now: until the run is finished a repeat must be able to continue.
    _remove(context.checkpoint_dir, prepared.stage)


def _remove(directory: Path, stage: str) -> None:
    try:
        if directory.exists():
            shutil.rmtree(directory)
    except OSError as error:
        run_logger(stage).warning("%s was not removed: %s", directory, error)


def _end(log: StageLog, status: Status, error: BaseException) -> None:
    """End a run that went wrong; what MLflow says meanwhile must not hide why it went wrong."""
    for step in (log.close, lambda: log.tracker.finish(log.run_id, status, describe(error))):
        try:
            step()
        except RlhfError as second:
            run_logger(log.stage).warning("MLflow run %s was not ended: %s", log.run_id, second)


def _open_run(
    tracker: Tracker, workspace: Workspace, prepared: Prepared, options: RunOptions
) -> str:
    tags = {
        "stage": prepared.stage,
        "fingerprint": prepared.fingerprint,
        **place_tags(workspace),
        **machine(),
        **_common_tags(options),
        **upstream_tags(prepared.parents),
    }
    config = prepared.cfg.model_dump(mode="json")
    run_id = tracker.start_run(prepared.stage, tags, config)
    end_dead_runs(tracker, workspace, prepared.fingerprint, run_id)
    _log_inputs(tracker, run_id, prepared)
    return run_id


def place_tags(workspace: Workspace) -> dict[str, str]:
    """Return the tags that say which workspace and process a run belongs to."""
    return {"workspace": workspace_name(workspace.root), "process": process_name()}


def end_dead_runs(
    tracker: Tracker, workspace: Workspace, resumed_fingerprint: str = "", resumed_by: str = ""
) -> None:
    """End as KILLED what MLflow shows as RUNNING in this workspace though its process is gone."""
    place = {"workspace": workspace_name(workspace.root)}
    for run in tracker.find_runs(place, status="RUNNING"):
        if is_process_alive(run.tags.get("process", "")):
            continue
        reason = "its process ended without a word"
        if resumed_fingerprint and run.tags.get("fingerprint") == resumed_fingerprint:
            reason += f"; run {resumed_by} continues from its checkpoint"
        tracker.finish(run.run_id, "KILLED", failure=reason)


def _log_inputs(tracker: Tracker, run_id: str, prepared: Prepared) -> None:
    for name, source in prepared.sources.items():
        if source.kind in ("file", "files", "hub"):
            tracker.log_dataset(run_id, source.path, name, source.fingerprint, "source")
    for name, artifact in prepared.inputs.items():
        if isinstance(artifact, PreferenceDataset):
            tracker.log_dataset(run_id, artifact.path, name, artifact.fingerprint, "training")
            continue
        model_id = _model_id(tracker, artifact)
        if model_id is not None:
            tracker.log_model_input(run_id, model_id)


def _model_id(tracker: Tracker, artifact: Artifact) -> str | None:
    """Return the MLflow model of an artefact; None when its run is in another MLflow."""
    run_id = artifact.manifest.mlflow_run_id
    try:
        return tracker.read_run(run_id).tags.get("model.id") if run_id else None
    except MissingInputError:
        return None


def _context(workspace: Workspace, prepared: Prepared, run_id: str, log: StageLog) -> StageContext:
    stage = prepared.stage
    draft = Draft(
        kind=prepared.spec.kind.KIND,
        stage=stage,
        fingerprint=prepared.fingerprint,
        config=prepared.cfg.model_dump(mode="json"),
        parents=prepared.parents,
        package_versions=package_versions(),
        git_commit=git_commit(),
        mlflow_run_id=run_id,
        prefect_flow_run_id=flow_run.id,
    )
    return StageContext(
        stage=stage,
        fingerprint=prepared.fingerprint,
        workspace=workspace,
        checkpoint_dir=workspace.checkpoint_dir(stage, prepared.fingerprint),
        artifacts_dir=workspace.artifacts_dir(stage),
        draft=draft,
        log=log,
        inputs=prepared.inputs,
        sources=prepared.sources,
    )


def link_result(tracker: Tracker, artifact: Artifact) -> None:
    """Record on an artefact's run its path, counts and metrics, and the dataset or model itself."""
    manifest = artifact.manifest
    run_id = manifest.mlflow_run_id
    assert run_id is not None, "an artefact of a flow names its run"
    counts = {name: float(count) for name, count in manifest.counts.items()}
    tracker.log_points(run_id, _points(manifest.metrics, "summary/") + _points(counts, "count/"))
    for name in (MANIFEST_NAME, *_PAGES):
        if (artifact.path / name).is_file():
            tracker.log_file(run_id, artifact.path / name)
    tracker.set_tags(run_id, {"artifact.path": str(artifact.path), "artifact.kind": manifest.kind})
    if isinstance(artifact, PreferenceDataset):
        tracker.log_dataset(run_id, artifact.path, "preferences", artifact.fingerprint, "output")
    elif not isinstance(artifact, EvalReport):
        model_id = tracker.log_model_output(run_id, artifact, manifest.stage.replace("_", "-"))
        if isinstance(artifact, StudentAdapter):
            _register(tracker, artifact, model_id)


def _register(tracker: Tracker, student: StudentAdapter, model_id: str) -> None:
    """Make a student the candidate, unless it is a repeat, a trial, or registered already."""
    run_id = str(student.manifest.mlflow_run_id)
    if not tracker.is_for_reproductions and TRIAL not in tracker.read_run(run_id).tags:
        _register_once(tracker, student, model_id)


def _register_once(tracker: Tracker, student: StudentAdapter, model_id: str) -> None:
    registry = Registry(tracker)
    if registry.of_run(str(student.manifest.mlflow_run_id)) is None:
        registry.register(model_id, student)


def settle(tracker: Tracker, artifact: Artifact, *, is_trial: bool) -> bool:
    """Bring the run of a reused artefact up to date; False when it is not in this MLflow.

    It is ended if its process was killed after it had published the artefact. What an ablation
    made and a chain uses is a trial no longer.
    """
    run_id = artifact.manifest.mlflow_run_id
    if run_id is None:
        return False
    try:
        run = tracker.read_run(run_id)
    except MissingInputError:
        return False
    if run.status == "RUNNING":
        link_result(tracker, artifact)
        tracker.finish(run_id, "FINISHED")
    if TRIAL in run.tags and not is_trial:
        _adopt(tracker, artifact, run_id)
    return True


def _adopt(tracker: Tracker, artifact: Artifact, run_id: str) -> None:
    """Make a trial a run like others."""
    if isinstance(artifact, StudentAdapter) and not tracker.is_for_reproductions:
        _register_once(tracker, artifact, tracker.read_run(run_id).tags["model.id"])
    # Last, so that whoever is stopped before does all of it again.
    tracker.drop_tag(run_id, TRIAL)


def record_outcome(tracker: Tracker, run_id: str, stage: Stage, outcome: StageOutcome) -> None:
    """Note a stage's outcome on the run of its chain, where a retry of the chain finds it.

    The chain's run gets the stage's figures, too, so that chains are compared like runs; one tag
    marks all runs of the chain, those that were reused included.
    """
    membership = member_tag(run_id)
    tracker.set_tags(run_id, {f"outcome.{stage}": outcome.model_dump_json(), membership: "chain"})
    manifest = read_manifest(Path(outcome.artifact))
    tracker.log_points(run_id, _points(manifest.metrics, f"{stage}/"))
    if outcome.mlflow_run_id is None:
        return
    try:
        tracker.read_run(outcome.mlflow_run_id)
    except MissingInputError:
        return  # A reused artefact whose run is in another MLflow.
    tracker.set_tags(outcome.mlflow_run_id, {membership: "reused" if outcome.reused else "ran"})


def _points(values: Mapping[str, float], prefix: str) -> list[MetricPoint]:
    now_ms = time.time_ns() // 1_000_000
    return [
        MetricPoint(clean_name(f"{prefix}{name}"), value, 0, now_ms)
        for name, value in values.items()
    ]
