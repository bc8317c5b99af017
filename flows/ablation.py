"""Flow `rlhf-ablation`: methods of a stage, tuned with an equal budget and compared."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

from flows.chain import cluster_closed, open_command_run
from flows.distill import distill
from flows.ingest import ingest
from flows.inputs import check_inputs
from flows.offline_ppo import train_offline_ppo
from flows.outcomes import RunMonitor, monitored, publish_link
from flows.reward_model import train_reward_model
from flows.sft import sft
from flows.stage_run import HOOKS, describe
from flows.stages import RunOptions
from tasks.ablation.config import BASE, TEACHER, AblationConfig, label_of
from tasks.ablation.report import (
    AblationReport,
    AblationRun,
    Split,
    choose_settings,
    headline_of,
    render_page,
    report_of,
    result_rows,
    share_of,
    write_ablation,
)
from tasks.artifacts import (
    Artifact,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
    load_artifact,
)
from tasks.config.shared import Stage, StageConfig
from tasks.context import run_logger
from tasks.distill.config import DistillConfig
from tasks.errors import ConfigError, MissingInputError, RewardError, RlhfError, TrainingError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.mlflow import MetricPoint, Status, clean_name, connect
from tasks.tracking.run_log import ProgressDisplay, StageLog
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.ablation.stage import Asked, Upstream


# What an ablation runs, what it needs for that, and how long the rest may take.

ABLATION = "ablation"
UPSTREAM_STAGES: tuple[Stage, ...] = ("ingest", "sft", "reward_model")
Compared = OfflinePPOConfig | DistillConfig
S = TypeVar("S", bound=StageConfig)


@dataclass(frozen=True)
class Job:
    """One policy or student to train and measure; ``setting`` is an index in the method's grid."""

    method: str
    setting: int
    seed: int
    split: Split


def tuning_jobs(cfg: AblationConfig) -> list[Job]:
    """Return every setting of every method on every tuning seed."""
    return [
        Job(method, setting, seed, "validation")
        for seed in cfg.tuning_seeds
        for method in cfg.compared
        for setting in range(cfg.n_settings)
    ]


def final_jobs(cfg: AblationConfig, chosen: Mapping[str, int | None]) -> list[Job]:
    """Return the chosen setting of every method on every seed."""
    return [
        Job(method, setting, seed, "test")
        for seed in cfg.seeds
        for method, setting in chosen.items()
        if setting is not None
    ]


def seeded(section: S, seed: int) -> S:
    """Return a stage's config with another seed."""
    return section.model_copy(update={"seed": seed})


def result_dir(workspace: Workspace) -> Path:
    """Return where the latest ablation's result lies."""
    return workspace.root / ABLATION


def section_of(cfg: PipelineConfig) -> AblationConfig:
    """Return the section of the ablation.

    Raises:
        ConfigError: there is none.
    """
    if cfg.ablation is None:
        raise ConfigError(
            "The config has no section `ablation`", "methods to compare", "see demo_ablation.yaml"
        )
    return cfg.ablation


def check_ablation(cfg: PipelineConfig) -> None:
    """Check all that the methods will read, before any work.

    Raises:
        RlhfError: as `flows.inputs.check_inputs`.
    """
    section = section_of(cfg)
    check_inputs(cfg, upstream_stages(section))
    for (name, _), stage_cfg in settings_of(cfg).items():
        if name in section.compared:
            check_inputs(cfg.model_copy(update={section.stage: stage_cfg}), (section.stage,))


def upstream_stages(section: AblationConfig) -> tuple[Stage, ...]:
    """Return the stages before the one whose methods are compared."""
    return UPSTREAM_STAGES if section.stage == "offline_ppo" else (*UPSTREAM_STAGES, "offline_ppo")


def settings_of(cfg: PipelineConfig) -> dict[tuple[str, int], Compared]:
    """Return the config of each method and setting."""
    section = section_of(cfg)
    if section.stage == "distill":
        return {**section.resolve(cfg.distill)}
    return {**section.resolve(cfg.offline_ppo)}


class Clock:
    """Counts jobs, and guesses how long the rest takes from those whose result was not there."""

    def __init__(self, cfg: AblationConfig) -> None:
        per_seed = len(cfg.compared)
        self.n_jobs = per_seed * (cfg.n_settings * len(cfg.tuning_seeds) + len(cfg.seeds))
        self.n_seeds = len({*cfg.tuning_seeds, *cfg.seeds})
        self.jobs_done = 0
        self._job_seconds: list[float] = []
        self._seed_seconds: list[float] = []

    def job_done(self, seconds: float, *, is_new: bool) -> None:
        """Count a job."""
        self.jobs_done += 1
        if is_new:
            self._job_seconds.append(seconds)

    def seed_done(self, seconds: float) -> None:
        """Count the models of a seed."""
        self._seed_seconds.append(seconds)

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the rest if none of it is there already; None while nothing is known."""
        if not self._job_seconds or not self._seed_seconds:
            return None
        left = _mean(self._job_seconds) * (self.n_jobs - self.jobs_done)
        return left + _mean(self._seed_seconds) * (self.n_seeds - len(self._seed_seconds))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def report_metrics(report: AblationReport) -> dict[str, float]:
    """Return the means and standard errors of all methods by name."""
    figures = {
        f"{name}/{method.name}": figure
        for method in report.methods
        for name, figure in (*method.figures.items(), ("difference", method.difference))
    }
    figures |= {f"{name}/base": figure for name, figure in report.base.items()}
    figures |= {f"{name}/teacher": figure for name, figure in report.teacher.items()}
    found: dict[str, float] = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        found[name] = figure.mean
        if figure.standard_error is not None:
            kind, _, method_name = name.partition("/")
            found[f"{kind}_se/{method_name}"] = figure.standard_error
    return found


# The frame around an ablation: its MLflow run, the models of each seed, progress, the result.


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


Trained = PolicyCheckpoint | StudentAdapter


@flow(name="rlhf-ablation", persist_result=True, **HOOKS)
def rlhf_ablation(cfg: PipelineConfig) -> str:
    """Tune every method on validation prompts, compare the best setting of each on test prompts,
    and return the path of the result.

    They are runs of the stage that the config names, offline_ppo or distill; finished ones are
    reused, unless ``cfg.reuse`` is off.
    The same weights are never measured twice on the same prompts.
    """
    with ablation_run(cfg) as ablation:
        section = ablation.section
        tuned = [carry_out(ablation, job) for job in tuning_jobs(section)]
        chosen = choose_settings(section, tuned, headline_of(tuned))
        final = [carry_out(ablation, job) for job in final_jobs(section, chosen)]
        base = [_reference_run(ablation, seed, BASE) for seed in section.seeds]
        teacher = []
        if section.stage == "distill":
            teacher = [_reference_run(ablation, seed, TEACHER) for seed in section.seeds]
        return ablation.publish(report_of(cfg.name, section, tuned, final, base, teacher))


def carry_out(ablation: Ablation, job: Job) -> AblationRun:
    """Train and measure one policy or student; training that went wrong is a result, too."""
    ablation.models_of(job.seed)
    ablation.announce(job)
    started_at = time.monotonic()
    run = AblationRun(method=job.method, setting=job.setting, seed=job.seed, split=job.split)
    try:
        policy, is_trained = _train(ablation, job)
        ablation.tag(policy, job)
        found, is_measured = _measured(ablation, policy, job)
    except (TrainingError, RewardError) as error:
        ablation.log.event("failed_run", f"{job.method}, seed {job.seed}: {error}")
        ablation.clock.job_done(time.monotonic() - started_at, is_new=True)
        return run.model_copy(update={"failure": str(error)})
    run = run.model_copy(update=found | {"mlflow_run_id": policy.manifest.mlflow_run_id})
    if is_measured:
        ablation.log_figures(run)
    ablation.clock.job_done(time.monotonic() - started_at, is_new=is_trained)
    return run


def _train(ablation: Ablation, job: Job) -> tuple[Trained, bool]:
    """Return a job's policy or student and whether it was trained just now."""
    key = (job.method, job.setting, job.seed)
    is_trained = False
    if key not in ablation.policies:
        ablation.policies[key] = _run_stage(ablation, job)
        is_trained = not ablation.monitor.outcomes[ablation.section.stage].reused
    path = Path(ablation.policies[key])
    if ablation.section.stage == "distill":
        return load_artifact(path, StudentAdapter), is_trained
    return load_artifact(path, PolicyCheckpoint), is_trained


def _run_stage(ablation: Ablation, job: Job) -> str:
    models, cfg, options = ablation.models_of(job.seed), ablation.config_of(job), ablation.options
    if isinstance(cfg, DistillConfig):
        assert models.policy is not None, "students have a teacher"
        return distill(
            cfg, models.preferences, models.policy, models.base, models.reward_model, options
        )
    return train_offline_ppo(cfg, models.preferences, models.reward_model, models.base, options)


def _measured(ablation: Ablation, policy: Trained, job: Job) -> tuple[dict[str, object], bool]:
    """Return figures and where they come from, and whether they were measured just now."""
    from tasks.ablation.stage import measure_policy

    cfg, directory = ablation.config_of(job), ablation.measurements_dir
    upstream, asked = _upstream(ablation, job.seed), _asked(ablation, job.seed, job.split)
    base = measure_policy(directory, cfg.rendering, cfg.runtime, upstream, upstream.base, asked)
    found = measure_policy(directory, cfg.rendering, cfg.runtime, upstream, policy, asked)
    figures = found.measurement.figures(base.measurement)
    if ablation.section.stage == "distill":
        teacher = _teacher_of(ablation, job.seed)
        heard = measure_policy(directory, cfg.rendering, cfg.runtime, upstream, teacher, asked)
        figures |= share_of(figures, heard.measurement.figures(base.measurement))
    fields: dict[str, object] = {
        "figures": figures,
        "policy": str(policy.path),
        "measurement": str(found.path),
    }
    return fields, found.is_new


def _teacher_of(ablation: Ablation, seed: int) -> PolicyCheckpoint:
    return load_artifact(Path(str(ablation.models_of(seed).policy)), PolicyCheckpoint)


def _reference_run(ablation: Ablation, seed: int, name: str) -> AblationRun:
    """Measure the model that all methods start from, or the students' teacher."""
    from tasks.ablation.stage import measure_policy

    upstream, asked = _upstream(ablation, seed), _asked(ablation, seed, "test")
    cfg, directory = ablation.cfg.offline_ppo, ablation.measurements_dir
    base = measure_policy(directory, cfg.rendering, cfg.runtime, upstream, upstream.base, asked)
    model = upstream.base if name == BASE else _teacher_of(ablation, seed)
    found = measure_policy(directory, cfg.rendering, cfg.runtime, upstream, model, asked)
    return AblationRun(
        method=name,
        setting=0,
        seed=seed,
        split="test",
        figures=found.measurement.figures(base.measurement),
        policy=str(model.path),
        measurement=str(found.path),
        mlflow_run_id=model.manifest.mlflow_run_id,
    )


def _upstream(ablation: Ablation, seed: int) -> Upstream:
    from tasks.ablation.stage import Upstream

    models = ablation.models_of(seed)
    return Upstream(
        load_artifact(Path(models.preferences), PreferenceDataset),
        load_artifact(Path(models.base), PolicyCheckpoint),
        load_artifact(Path(models.reward_model), RewardModelCheckpoint),
    )


def _asked(ablation: Ablation, seed: int, split: Split) -> Asked:
    from tasks.ablation.stage import Asked

    section = ablation.section
    prompts = section.tuning_prompts if split == "validation" else section.test_prompts
    return Asked(split, prompts, section.max_new_tokens, seed)
