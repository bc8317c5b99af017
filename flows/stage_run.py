"""Runs one stage: its inputs, a finished artefact or an MLflow run, and the links between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from prefect.utilities.timeout import timeout

from flows.mlflow_run import link_result, record_outcome, refusal_recorded, settle, tracked
from flows.monitor import StageOutcome, current_monitor
from flows.options import RunOptions
from flows.prepare import Prepared, finished_artifact, prepare
from flows.promote import Verdict, apply_verdict
from flows.reporting import publish_result
from flows.stage_lock import exclusive
from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.config import EvaluateConfig, Stage, StageConfig
from tasks.context import StageContext
from tasks.errors import MissingInputError, StageTimeoutError
from tasks.run_log import run_logger
from tasks.tracking import Tracker, connect
from tasks.workspace import Workspace

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
