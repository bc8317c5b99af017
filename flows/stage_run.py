"""The frame of one stage: its inputs, then a finished artefact or an MLflow run around its task."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, TextIO, TypeVar, cast

import psutil
from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.utilities.timeout import timeout
from prefect.utilities.urls import url_for
from pydantic import BaseModel

from flows.outcomes import StageOutcome, current_monitor, publish_link, publish_result
from flows.promote import apply_verdict
from flows.services.prefect_server import is_temporary
from flows.stages import (
    STAGE_SPECS,
    RunOptions,
    StageSpec,
    completed,
    completed_options,
    lay_over,
    raw_sources,
    result_fields,
    tracking_of,
)
from tasks.artifacts import (
    MANIFEST_NAME,
    Artifact,
    Draft,
    EvalReport,
    ParentRef,
    PreferenceDataset,
    StudentAdapter,
    fingerprint,
    newest_artifact,
    read_manifest,
)
from tasks.config.shared import Stage, StageConfig, TrackingConfig
from tasks.context import StageContext, run_logger
from tasks.errors import MissingInputError, RlhfError, StageTimeoutError, WorkspaceError
from tasks.evaluate.config import EvaluateConfig
from tasks.tracking.lineage import LATEST, resolve_reference, upstream_tags
from tasks.tracking.mlflow import (
    TRIAL,
    MetricPoint,
    Status,
    Tracker,
    clean_name,
    connect,
    member_tag,
)
from tasks.tracking.registry import Registry
from tasks.tracking.run_log import ProgressDisplay, StageLog, machine_watched
from tasks.workspace import (
    Workspace,
    git_commit,
    is_process_alive,
    machine,
    package_versions,
    process_name,
    workspace_name,
)

C = TypeVar("C", bound=StageConfig)


@dataclass
class StageRun(Generic[C]):
    """One run of a stage, as its flow sees it.

    Args:
        cfg: complete.
        inputs: verified upstream artefacts by name, of the kinds that the stage's record says.
        sources: raw upstreams by name.

    Attributes:
        is_needed: whether the stage has to run; False when a finished artefact answers.
        context: what the stage's task gets, if it has to run.
        artifact: the result, which the flow sets if the stage has to run.
    """

    spec: StageSpec
    cfg: C
    options: RunOptions
    inputs: Mapping[str, Any]
    sources: Mapping[str, ParentRef]
    is_needed: bool = field(init=False, default=True)
    context: StageContext = field(init=False)
    artifact: Artifact = field(init=False)

    @property
    def parents(self) -> dict[str, ParentRef]:
        """All upstreams, as the manifest keeps them."""
        artifacts = {name: artifact.as_parent() for name, artifact in self.inputs.items()}
        return {**artifacts, **self.sources}

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the result."""
        hashes = {name: parent.fingerprint for name, parent in self.parents.items()}
        fields = result_fields(self.cfg)
        return fingerprint(self.spec.name, self.spec.code_version, fields, hashes)

    @property
    def path(self) -> str:
        """Path of the result: what the flow returns."""
        return str(self.artifact.path)


@contextmanager
def stage_run(
    stage: Stage, cfg: C, options: RunOptions, preset: str | None, **refs: str
) -> Iterator[StageRun[C]]:
    """Yield a stage that is ready to run, or done already; afterwards end its MLflow run.

    Args:
        stage: which one.
        cfg: its config, or the fields of it that were given.
        options: how it is run.
        preset: config file that completes both.
        refs: reference of each upstream artefact by name.

    Raises:
        RlhfError: an input that is missing or cannot be used; nothing was trained. Also whatever
            the stage raises; its MLflow run is then FAILED (KILLED when it was cancelled).
    """
    started_at = time.monotonic()
    spec = STAGE_SPECS[stage]
    cfg = cast(C, completed(spec.config, cfg, preset))
    options = completed_options(options, preset)
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(options.tracking, workspace)
    try:
        inputs = {
            name: resolve_reference(tracker, refs.get(name, LATEST), upstream.name, upstream.kind)
            for name, upstream in spec.inputs.items()
        }
        run = StageRun(spec, cfg, options, inputs, raw_sources(cfg, workspace))
        wanted, reused = run.fingerprint, None
        if options.reuse:
            reused = newest_artifact(workspace.artifacts_dir(stage), spec.kind, wanted)
    except Exception as error:
        # A stage that is refused before it starts is seen in MLflow, too.
        tags = {"stage": stage, **_common_tags(options)}
        run_id = tracker.start_run(stage, tags, cfg.model_dump(mode="json"))
        tracker.finish(run_id, "FAILED", failure=describe(error))
        raise
    if reused is not None:
        run.is_needed, run.artifact = False, reused
        run_logger(stage).info("Reusing %s", reused.path)
        if settle(tracker, reused, is_trial=options.is_trial):
            _promote(tracker, run)
        yield run
    else:
        with (
            exclusive(workspace, stage, wanted),
            _opened(tracker, workspace, run),
            workspace.space_watched(),
        ):
            idle = [f"{name} ({why})" for name, why in cfg.settings_without_effect().items()]
            if idle:
                run.context.log.event("settings_without_effect", ", ".join(idle))
            with time_limit(stage, options.timeout_seconds):
                yield run
            link_result(tracker, run.artifact)
            _promote(tracker, run)
    outcome = StageOutcome(
        artifact=run.path,
        fingerprint=wanted,
        mlflow_run_id=run.artifact.manifest.mlflow_run_id,
        seconds=time.monotonic() - started_at,
        reused=not run.is_needed,
    )
    monitor = current_monitor()
    if monitor is not None:
        monitor.outcomes[stage] = outcome
    if options.pipeline_run_id is not None:
        record_outcome(tracker, options.pipeline_run_id, stage, outcome)
    publish_result(run.artifact, outcome)


@contextmanager
def _opened(tracker: Tracker, workspace: Workspace, run: StageRun[C]) -> Iterator[None]:
    """Open the stage's MLflow run, linked to its upstreams; afterwards end it."""
    stage, config = run.spec.name, run.cfg.model_dump(mode="json")
    tags = {
        "stage": stage,
        "fingerprint": run.fingerprint,
        **place_tags(workspace),
        **machine(),
        **_common_tags(run.options),
        **upstream_tags(run.parents),
    }
    run_id = tracker.start_run(stage, tags, config)
    log = StageLog(tracker, run_id, stage, ProgressDisplay(stage))
    draft = Draft(
        kind=run.spec.kind.KIND,
        stage=stage,
        fingerprint=run.fingerprint,
        config=config,
        parents=run.parents,
        package_versions=package_versions(),
        git_commit=git_commit(),
        mlflow_run_id=run_id,
        prefect_flow_run_id=flow_run.id,
    )
    run.context = StageContext(
        stage=stage,
        fingerprint=run.fingerprint,
        workspace=workspace,
        checkpoint_dir=workspace.checkpoint_dir(stage, run.fingerprint),
        artifacts_dir=workspace.artifacts_dir(stage),
        draft=draft,
        log=log,
        inputs=run.inputs,
        sources=run.sources,
    )
    with ended(log):
        end_dead_runs(tracker, workspace, run.fingerprint, run_id)
        _log_inputs(tracker, run_id, run)
        publish_link(tracker, stage, run_id)
        with machine_watched(log, run.options.tracking.system_metrics_seconds):
            yield
    # Only now: until the run is finished a repeat must be able to continue.
    checkpoints = run.context.checkpoint_dir
    try:
        if checkpoints.exists():
            shutil.rmtree(checkpoints)
    except OSError as error:
        run_logger(stage).warning("%s was not removed: %s", checkpoints, error)


@contextmanager
def ended(log: StageLog) -> Iterator[None]:
    """End an MLflow run after the block, as FINISHED, FAILED or KILLED."""
    try:
        yield
        log.close()
    except BaseException as error:
        status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
        failure = describe(error)
        for step in (log.close, lambda: log.tracker.finish(log.run_id, status, failure)):
            try:
                step()
            except RlhfError as second:
                # What MLflow says now must not hide why the run went wrong.
                run_logger(log.stage).warning("MLflow run %s was not ended: %s", log.run_id, second)
        raise
    log.tracker.finish(log.run_id, "FINISHED")


def describe(error: BaseException) -> str:
    """Return the text of the ``failure`` tag."""
    text = str(error)
    name = type(error).__name__
    return text if isinstance(error, RlhfError) and text else f"{name}: {text}" if text else name


class _TimeUp(TimeoutError):
    """Told apart from whatever else times out in a stage."""


@contextmanager
def time_limit(stage: Stage, seconds: int | None) -> Iterator[None]:
    """End the block after some time.

    Raises:
        StageTimeoutError: it took longer.
    """
    started_at = time.monotonic()
    try:
        with timeout(seconds, timeout_exc_type=_TimeUp):
            yield
    except Exception as error:
        # Compiled code that is interrupted may turn what interrupts it into an error of its own.
        is_late = seconds is not None and time.monotonic() - started_at >= seconds
        if not isinstance(error, _TimeUp) and not is_late:
            raise
        raise StageTimeoutError(
            f"Stage {stage} took longer than its timeout of {seconds} s",
            "",
            "start it again, which continues from the last checkpoint, or raise the timeout",
        ) from error


# What a run's tags say of where it belongs.


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


# The links between a run, its upstreams and its result.


def _log_inputs(tracker: Tracker, run_id: str, run: StageRun[C]) -> None:
    for name, source in run.sources.items():
        if source.kind in ("file", "files", "hub"):
            tracker.log_dataset(run_id, source.path, name, source.fingerprint, "source")
    for name, artifact in run.inputs.items():
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


def link_result(tracker: Tracker, artifact: Artifact) -> None:
    """Record on an artefact's run its path, counts and metrics, and the dataset or model itself."""
    manifest = artifact.manifest
    run_id = manifest.mlflow_run_id
    assert run_id is not None, "an artefact of a flow names its run"
    points = metric_points(manifest.metrics, "summary/") + metric_points(manifest.counts, "count/")
    tracker.log_points(run_id, points)
    for name in (MANIFEST_NAME, *STAGE_SPECS[manifest.stage].pages):
        if (artifact.path / name).is_file():
            tracker.log_file(run_id, artifact.path / name)
    tracker.set_tags(run_id, {"artifact.path": str(artifact.path), "artifact.kind": manifest.kind})
    if isinstance(artifact, PreferenceDataset):
        tracker.log_dataset(run_id, artifact.path, "preferences", artifact.fingerprint, "output")
    elif not isinstance(artifact, EvalReport):
        model_id = tracker.log_model_output(run_id, artifact, manifest.stage.replace("_", "-"))
        if isinstance(artifact, StudentAdapter) and TRIAL not in tracker.read_run(run_id).tags:
            _register(tracker, artifact, run_id, model_id)


def _register(tracker: Tracker, student: StudentAdapter, run_id: str, model_id: str) -> None:
    """Make a student the candidate, unless it is a repeat, or registered already."""
    registry = Registry(tracker)
    if not tracker.is_for_reproductions and registry.of_run(run_id) is None:
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
        if isinstance(artifact, StudentAdapter):
            _register(tracker, artifact, run_id, tracker.read_run(run_id).tags["model.id"])
        # Last, so that whoever is stopped before does all of it again.
        tracker.drop_tag(run_id, TRIAL)
    return True


def _promote(tracker: Tracker, run: StageRun[C]) -> None:
    """Let an evaluation decide about its student, a reused one by the limits of now."""
    report, cfg = run.artifact, run.cfg
    if isinstance(report, EvalReport) and not tracker.is_for_reproductions:
        assert isinstance(cfg, EvaluateConfig), "reports come from evaluate"
        apply_verdict(
            tracker, report, cfg.promotion, run.options.pipeline_run_id, is_reused=not run.is_needed
        )


def record_outcome(tracker: Tracker, run_id: str, stage: Stage, outcome: StageOutcome) -> None:
    """Note a stage's outcome on the run of its chain, where a retry of the chain finds it.

    The chain's run gets the stage's figures, too, so that chains are compared like runs; one tag
    marks all runs of the chain, those that were reused included.
    """
    membership = member_tag(run_id)
    tracker.set_tags(run_id, {f"outcome.{stage}": outcome.model_dump_json(), membership: "chain"})
    manifest = read_manifest(Path(outcome.artifact))
    tracker.log_points(run_id, metric_points(manifest.metrics, f"{stage}/"))
    if outcome.mlflow_run_id is None:
        return
    try:
        tracker.read_run(outcome.mlflow_run_id)
    except MissingInputError:
        return  # A reused artefact whose run is in another MLflow.
    tracker.set_tags(outcome.mlflow_run_id, {membership: "reused" if outcome.reused else "ran"})


def metric_points(values: Mapping[str, float], prefix: str = "") -> list[MetricPoint]:
    """Return values as metrics of a run's step 0."""
    now_ms = time.time_ns() // 1_000_000
    return [
        MetricPoint(clean_name(f"{prefix}{name}"), float(value), 0, now_ms)
        for name, value in values.items()
    ]


#
# One run at a time of a stage with one fingerprint: two would share a checkpoint directory.
#
# The kernel frees the lock with the process, on a shared file system too, so a killed run does not
# block the next one. Where such locks are kept to one host the record in the file counts, too.

# Mount options, of NFS and Lustre, by which a host keeps flock to itself.
_LOCKS_OF_ONE_HOST: Final = frozenset(
    ("nolock", "local_lock=flock", "local_lock=all", "localflock")
)
# Of seconds since 1970; anything longer is no time.
_SECONDS: Final = re.compile(r"[0-9]{1,11}")


@contextmanager
def exclusive(workspace: Workspace, stage: Stage, fingerprint: str) -> Iterator[None]:
    """Hold a stage's lock for the block.

    Raises:
        WorkspaceError: another process has it, or had it on another host and did not end well; or
            the file system keeps no locks.
    """
    directory = workspace.cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{stage}-{fingerprint[:16]}"

    def held(holder: str, fix: str = "") -> WorkspaceError:
        return WorkspaceError(
            f"Stage {stage} with this config is running in {holder} ({file})",
            "one run at a time",
            "wait until it is done and start this run again, which reuses its result;"
            " or end that process" + fix,
        )

    with file.open("a+", encoding="utf-8", errors="replace") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise held(_holder(handle)[0]) from error
        except OSError as error:
            raise WorkspaceError(
                f"{file} cannot be locked: {error.strerror or error}",
                "a file system that keeps locks",
                "mount it with locks, or choose another RLHF_HOME",
            ) from error
        holder, host = _holder(handle)
        if host not in ("", socket.gethostname()) and _is_kept_to_one_host(file):
            raise held(holder, f"; if it no longer runs on {host}, remove {file}")
        try:
            handle.truncate(0)
            handle.write(f"{socket.gethostname()}:{process_name()}")
            handle.flush()
            # Other hosts are to see it now.
            os.fsync(handle.fileno())
            yield
        finally:
            handle.truncate(0)


def _holder(handle: TextIO) -> tuple[str, str]:
    """Return the process that a lock's record names, for a message, and its host.

    A record is ``host:process id:seconds since 1970``, of earlier versions the process id alone;
    the host is empty where there is none.
    """
    handle.seek(0)
    *before, process = handle.read().split(":", 1)
    host = "".join(before)
    pid, _, started = process.partition(":")
    name = f"process {pid}" if pid else "another process"
    if host not in ("", socket.gethostname()):
        name += f" on host {host}"
        if _SECONDS.fullmatch(started):
            name += f", started {datetime.fromtimestamp(float(started), UTC):%Y-%m-%d %H:%M} UTC"
    return name, host


def _is_kept_to_one_host(file: Path) -> bool:
    """Tell whether a lock on this file says nothing about other hosts that see it."""
    path = file.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    # Of two at the same place the later one counts.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return bool(mounts) and not _LOCKS_OF_ONE_HOST.isdisjoint(mounts[-1].opts.split(","))


# Prefect hooks: a flow that ends without telling MLflow does not leave a run RUNNING.


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
