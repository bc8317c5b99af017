"""Runs one stage: its inputs, a finished artefact or an MLflow run, and the links between them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import psutil
from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.utilities.timeout import timeout
from prefect.utilities.urls import url_for
from pydantic import BaseModel

from flows.inputs import raw_sources, result_fields
from flows.outcomes import StageOutcome, current_monitor, publish_link, publish_result
from flows.promote import Verdict, apply_verdict
from flows.services.prefect_server import is_temporary
from flows.stages import STAGE_SPECS, RunOptions, StageSpec, lay_over, tracking_of
from tasks.artifacts import (
    MANIFEST_NAME,
    Artifact,
    Draft,
    EvalReport,
    ParentRef,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
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


# Before a stage runs: its inputs resolved and verified, its fingerprint.


@dataclass(frozen=True)
class Prepared:
    """A stage whose inputs are there and verified.

    Args:
        inputs: upstream artefacts by name.
        sources: raw upstreams by name.
        fingerprint: identity of the result.
    """

    stage: Stage
    spec: StageSpec
    cfg: StageConfig
    inputs: Mapping[str, Artifact]
    sources: Mapping[str, ParentRef]
    fingerprint: str

    @property
    def parents(self) -> dict[str, ParentRef]:
        """All upstreams, as the manifest keeps them."""
        artifacts = {name: artifact.as_parent() for name, artifact in self.inputs.items()}
        return {**artifacts, **self.sources}


def prepare(
    stage: Stage, cfg: StageConfig, refs: Mapping[str, str], tracker: Tracker, workspace: Workspace
) -> Prepared:
    """Resolve and verify all inputs of a stage and compute its fingerprint."""
    spec = STAGE_SPECS[stage]
    inputs = {
        name: resolve_reference(tracker, refs.get(name, LATEST), wanted.stage, wanted.kind)
        for name, wanted in spec.inputs.items()
    }
    sources = raw_sources(cfg, workspace)
    hashes = {name: artifact.fingerprint for name, artifact in inputs.items()}
    hashes |= {name: source.fingerprint for name, source in sources.items()}
    identity = fingerprint(stage, spec.code_version, result_fields(cfg), hashes)
    return Prepared(stage, spec, cfg, inputs, sources, identity)


def finished_artifact(prepared: Prepared, workspace: Workspace) -> Artifact | None:
    """Return the verified artefact that a run of this stage would make again, if there is one.

    Raises:
        ArtifactError: it is there, but torn or edited.
    """
    directory = workspace.artifacts_dir(prepared.stage)
    return newest_artifact(directory, prepared.spec.kind, prepared.fingerprint)


# The MLflow run of a stage: opened, linked to its upstreams and its result, always ended.

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


@dataclass(frozen=True)
class Holder:
    """The process that a lock's record names.

    Args:
        host: empty in a record of earlier versions, which has the process id only.
        started_at: in seconds since 1970; None in such a record.
    """

    host: str
    pid: str
    started_at: float | None

    @classmethod
    def read(cls, handle: TextIO) -> Holder | None:
        """Return what the record says; None when it is empty."""
        handle.seek(0)
        *host, pid = handle.read().split(":", 1)
        pid, _, created = pid.partition(":")
        if not pid:
            return None
        return cls("".join(host), pid, float(created) if _SECONDS.fullmatch(created) else None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is known to be on another host."""
        return self.host not in ("", socket.gethostname())

    def __str__(self) -> str:
        """Return its name for a message."""
        since = ""
        if self.started_at is not None:
            since = f", started {datetime.fromtimestamp(self.started_at, UTC):%Y-%m-%d %H:%M} UTC"
        return f"process {self.pid}" + (f" on host {self.host}{since}" if self.is_elsewhere else "")


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
    with file.open("a+", encoding="utf-8", errors="replace") as handle:
        _lock(stage, handle, file)
        holder = Holder.read(handle)
        if holder is not None and holder.is_elsewhere and _is_kept_to_one_host(file):
            fix = f"; if it no longer runs on {holder.host}, remove {file}"
            raise _held(stage, holder, file, fix)
        try:
            handle.truncate(0)
            handle.write(f"{socket.gethostname()}:{process_name()}")
            handle.flush()
            # Other hosts are to see it now.
            os.fsync(handle.fileno())
            yield
        finally:
            handle.truncate(0)


def _lock(stage: Stage, handle: TextIO, file: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(stage, Holder.read(handle), file) from error
    except OSError as error:
        raise WorkspaceError(
            f"{file} cannot be locked: {error.strerror or error}",
            "a file system that keeps locks",
            "mount it with locks, or choose another RLHF_HOME",
        ) from error


def _held(stage: Stage, holder: Holder | None, file: Path, fix: str = "") -> WorkspaceError:
    return WorkspaceError(
        f"Stage {stage} with this config is running in {holder or 'another process'} ({file})",
        "one run at a time",
        "wait until it is done and start this run again, which reuses its result;"
        " or end that process" + fix,
    )


def _is_kept_to_one_host(file: Path) -> bool:
    """Tell whether a lock on this file says nothing about other hosts that see it."""
    path = file.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    # Of two at the same place the later one counts.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return bool(mounts) and not _LOCKS_OF_ONE_HOST.isdisjoint(mounts[-1].opts.split(","))


A = TypeVar("A", bound=Artifact)


class StageRun:
    """One run of a stage, as its flow sees it."""

    def __init__(
        self, prepared: Prepared, context: StageContext | None, artifact: Artifact | None = None
    ) -> None:
        self.prepared = prepared
        self._context = context
        self._artifact = artifact

    @property
    def is_needed(self) -> bool:
        """Whether the stage has to run; False when a finished artefact answers."""
        return self._artifact is None

    @property
    def context(self) -> StageContext:
        """What the stage's task gets."""
        assert self._context is not None, "a reused stage has no context"
        return self._context

    @property
    def artifact(self) -> Artifact:
        """The result.

        Raises:
            MissingInputError: the stage ended without one.
        """
        if self._artifact is None:
            raise MissingInputError(
                f"Stage {self.prepared.stage} ended without an artefact",
                "one",
                "report this defect",
            )
        return self._artifact

    @property
    def path(self) -> str:
        """Path of the result: what the flow returns."""
        return str(self.artifact.path)

    def publish(self, artifact: Artifact) -> None:
        """Take the result of the stage's task."""
        self._artifact = artifact

    @property
    def preferences(self) -> PreferenceDataset:
        """The validated pairs."""
        return self._input("preferences", PreferenceDataset)

    @property
    def base(self) -> PolicyCheckpoint:
        """The base model."""
        return self._input("base", PolicyCheckpoint)

    @property
    def reward_model(self) -> RewardModelCheckpoint:
        """The reward model."""
        return self._input("reward_model", RewardModelCheckpoint)

    @property
    def policy(self) -> PolicyCheckpoint:
        """The aligned policy."""
        return self._input("policy", PolicyCheckpoint)

    @property
    def student(self) -> StudentAdapter:
        """The distilled student."""
        return self._input("student", StudentAdapter)

    def _input(self, name: str, kind: type[A]) -> A:
        artifact = self.prepared.inputs[name]
        assert isinstance(artifact, kind)
        return artifact

    def source_path(self, name: str) -> Path:
        """Return where a raw upstream lies."""
        return Path(self.prepared.sources[name].path)


@contextmanager
def stage_run(
    stage: Stage, cfg: StageConfig, options: RunOptions, **refs: str
) -> Iterator[StageRun]:
    """Yield a stage that is ready to run, or done already; afterwards end its MLflow run.

    Args:
        stage: which one.
        cfg: its config.
        options: how it is run.
        refs: reference of each upstream artefact by name.

    Raises:
        RlhfError: an input that is missing or cannot be used; nothing was trained. Also whatever
            the stage raises; its MLflow run is then FAILED (KILLED when it was cancelled).
    """
    started_at = time.monotonic()
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(options.tracking, workspace)
    with refusal_recorded(tracker, stage, cfg, options):
        prepared = prepare(stage, cfg, refs, tracker, workspace)
        reused = finished_artifact(prepared, workspace) if options.reuse else None
    if reused is not None:
        if settle(tracker, reused, is_trial=options.is_trial):
            _promote(tracker, cfg, options, reused, is_reused=True)
        run_logger(stage).info("Reusing %s", reused.path)
        run = StageRun(prepared, None, reused)
        yield run
    else:
        with (
            exclusive(workspace, prepared.stage, prepared.fingerprint),
            tracked(tracker, workspace, prepared, options) as context,
        ):
            run = StageRun(prepared, context)
            with workspace.space_watched():
                with time_limit(stage, options.timeout_seconds):
                    yield run
                link_result(tracker, run.artifact)
                _promote(tracker, cfg, options, run.artifact, is_reused=False)
    seconds = time.monotonic() - started_at
    _record(tracker, options, run, seconds, is_reused=reused is not None)


def _promote(
    tracker: Tracker, cfg: StageConfig, options: RunOptions, made: Artifact, *, is_reused: bool
) -> None:
    """Let an evaluation decide about its student, a reused one by the limits of now."""
    if isinstance(made, EvalReport) and not tracker.is_for_reproductions:
        assert isinstance(cfg, EvaluateConfig), "reports come from evaluate"
        verdict = Verdict(made, cfg.promotion, options.pipeline_run_id, is_reused)
        apply_verdict(tracker, verdict)


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


def _record(
    tracker: Tracker, options: RunOptions, run: StageRun, seconds: float, *, is_reused: bool
) -> None:
    manifest = run.artifact.manifest
    outcome = StageOutcome(
        artifact=run.path,
        fingerprint=manifest.fingerprint,
        mlflow_run_id=manifest.mlflow_run_id,
        seconds=seconds,
        reused=is_reused,
    )
    stage = run.prepared.stage
    monitor = current_monitor()
    if monitor is not None:
        monitor.record(stage, outcome)
    if options.pipeline_run_id is not None:
        record_outcome(tracker, options.pipeline_run_id, stage, outcome)
    publish_result(run.artifact, outcome)
