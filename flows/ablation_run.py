"""The frame around an ablation: its MLflow run, the models of each seed, progress, the result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

from flows.ablation_plan import (
    ABLATION,
    Clock,
    Compared,
    Job,
    check_ablation,
    report_metrics,
    result_dir,
    section_of,
    seeded,
    settings_of,
)
from flows.chain import cluster_closed, open_command_run
from flows.ingest import ingest
from flows.mlflow_run import describe
from flows.monitor import RunMonitor, monitored
from flows.offline_ppo import train_offline_ppo
from flows.options import RunOptions
from flows.reporting import publish_link
from flows.reward_model import train_reward_model
from flows.sft import sft
from tasks.artifacts import Artifact
from tasks.config import AblationConfig, PipelineConfig
from tasks.config_ablation import label_of
from tasks.data.ablation_page import render_page, result_rows, write_ablation
from tasks.data.ablation_report import AblationReport, AblationRun
from tasks.errors import MissingInputError, RlhfError
from tasks.progress import ProgressDisplay
from tasks.run_log import StageLog, run_logger
from tasks.tracking import MetricPoint, Status, connect
from tasks.tracking_values import clean_name
from tasks.workspace import Workspace


@dataclass(frozen=True)
class SeedModels:
    """Paths of what the runs of one seed share; students share a policy, their teacher."""

    preferences: str
    base: str
    reward_model: str
    policy: str | None = None


@dataclass
class Ablation:
    """One run of an ablation.

    Args:
        run_id: its MLflow run.
        settings: config of each method and setting.
    """

    cfg: PipelineConfig
    section: AblationConfig
    workspace: Workspace
    log: StageLog
    monitor: RunMonitor
    settings: dict[tuple[str, int], Compared]
    clock: Clock
    models: dict[int, SeedModels] = field(default_factory=dict)
    policies: dict[tuple[str, int, int], str] = field(default_factory=dict)

    @property
    def options(self) -> RunOptions:
        """How stages are run."""
        return RunOptions(
            reuse=self.cfg.reuse,
            tracking=self.cfg.tracking,
            pipeline_run_id=self.log.run_id,
            is_trial=True,
        )

    @property
    def measurements_dir(self) -> Path:
        """Where measurements are kept from run to run."""
        return self.workspace.cache_dir / ABLATION

    def config_of(self, job: Job) -> Compared:
        """Return the config of the stage for a job."""
        return seeded(self.settings[job.method, job.setting], job.seed)

    def models_of(self, seed: int) -> SeedModels:
        """Run the stages before the compared one with a seed, once."""
        if seed not in self.models:
            started_at = time.monotonic()
            self.log.display.note(f"the models of seed {seed} come first")
            cfg, options = self.cfg, self.options
            preferences = ingest(seeded(cfg.ingest, seed), options)
            base = sft(seeded(cfg.sft, seed), preferences, options)
            reward_cfg = seeded(cfg.reward_model, seed)
            reward_model = train_reward_model(reward_cfg, preferences, base, options)
            policy = None
            if self.section.stage == "distill":
                policy_cfg = seeded(cfg.offline_ppo, seed)
                policy = train_offline_ppo(policy_cfg, preferences, reward_model, base, options)
            self.models[seed] = SeedModels(preferences, base, reward_model, policy)
            self.clock.seed_done(time.monotonic() - started_at)
        return self.models[seed]

    def announce(self, job: Job) -> None:
        """Show which run comes next, and how long the rest may take."""
        left = self.clock.seconds_left
        rest = "" if left is None else f"; at most {math.ceil(left / 60)} min left"
        what = f"{job.method}, {self._label(job)}, seed {job.seed}, {job.split}{rest}"
        self.log.progress(self.clock.jobs_done, self.clock.n_jobs, what)

    def _label(self, job: Job) -> str:
        return label_of(self.section.methods[job.method].grid[job.setting])

    def tag(self, policy: Artifact, job: Job) -> None:
        """Make the MLflow run of a policy or student findable by what it was run for."""
        tracker = self.log.tracker
        try:
            run = tracker.read_run(policy.manifest.mlflow_run_id or "")
        except MissingInputError:
            self.log.event("untagged", f"the MLflow run of {policy.path} is not in this server")
            return
        tags = {
            "ablation.run_id": self.log.run_id,
            "ablation.method": job.method,
            "ablation.setting": self._label(job),
            "ablation.seed": str(job.seed),
        }
        # A run of an earlier attempt moves over; one of a chain stays where it is.
        parent = run.tags.get("mlflow.parentRunId")
        if parent is not None and parent == run.tags.get("ablation.run_id"):
            tags["mlflow.parentRunId"] = self.log.run_id
        tracker.set_tags(run.run_id, tags)

    def log_figures(self, run: AblationRun) -> None:
        """Record a new measurement on the policy's own MLflow run."""
        if run.mlflow_run_id is not None:
            named = {f"ablation/{run.split}_{n}": value for n, value in run.figures.items()}
            self.log.tracker.log_points(run.mlflow_run_id, _points(named))

    def publish(self, report: AblationReport) -> str:
        """Write the result, show it in MLflow and Prefect, and return the path of its JSON."""
        files = write_ablation(report, result_dir(self.workspace))
        for file in files:
            self.log.tracker.log_file(self.log.run_id, file)
        self.log.tracker.log_points(self.log.run_id, _points(report_metrics(report)))
        if FlowRunContext.get() is not None:
            create_table_artifact(table=result_rows(report), key="ablation-result")
            create_markdown_artifact(render_page(report), key="ablation-page")
        return str(files[0])


def _points(values: dict[str, float]) -> list[MetricPoint]:
    now_ms = time.time_ns() // 1_000_000
    return [MetricPoint(clean_name(name), value, 0, now_ms) for name, value in values.items()]


class _Lines(ProgressDisplay):
    """Progress as lines that stay: below them each stage draws its own bar."""

    def update(self, done: float, total: float, message: str = "") -> None:
        self.note(f"run {min(done + 1, total):.0f} of {total:.0f}: {message}")


@contextmanager
def ablation_run(cfg: PipelineConfig) -> Iterator[Ablation]:
    """Yield the ablation; afterwards end its MLflow run.

    Raises:
        RlhfError: an input that cannot be used, before any work; or what a stage raised.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    section = section_of(cfg)
    tracker = connect(cfg.tracking, workspace)
    with monitored() as monitor, cluster_closed():
        run_id = open_command_run(tracker, workspace, cfg, ABLATION)
        log = StageLog(tracker, run_id, ABLATION, _Lines(ABLATION))
        with _ended(log):
            publish_link(tracker, ABLATION, run_id)
            if not monitor.inputs_checked:
                check_ablation(cfg)
            settings = settings_of(cfg)
            yield Ablation(cfg, section, workspace, log, monitor, settings, Clock(section))


@contextmanager
def _ended(log: StageLog) -> Iterator[None]:
    """End the MLflow run as FINISHED, FAILED or KILLED."""
    try:
        yield
        log.close()
    except Exception as error:
        _end(log, "FAILED", error)
        raise
    except BaseException as error:
        _end(log, "KILLED", error)
        raise
    log.tracker.finish(log.run_id, "FINISHED")


def _end(log: StageLog, status: Status, error: BaseException) -> None:
    try:
        log.close()
        log.tracker.finish(log.run_id, status, describe(error))
    except RlhfError as second:
        # What MLflow says now must not hide why the ablation stopped.
        run_logger(ABLATION).warning("MLflow run %s was not ended: %s", log.run_id, second)
