"""Flow `rlhf-ablation`: methods of a stage, tuned with an equal budget and compared."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.chain import cluster_closed, command_run
from flows.outcomes import RunMonitor, monitored
from flows.rlhf_pipeline import STAGE_FLOWS
from flows.stage_run import HOOKS, metric_points
from flows.stages import STAGE_SPECS, RunOptions, check_inputs
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
from tasks.config.shared import STAGES, Stage, StageConfig
from tasks.distill.config import DistillConfig
from tasks.errors import ConfigError, MissingInputError, RewardError, TrainingError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.mlflow import connect
from tasks.tracking.run_log import ProgressDisplay, StageLog
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.ablation.stage import Measured

ABLATION = "ablation"
Compared = OfflinePPOConfig | DistillConfig
Trained = PolicyCheckpoint | StudentAdapter
S = TypeVar("S", bound=StageConfig)


@flow(name="rlhf-ablation", persist_result=True, **HOOKS)
def rlhf_ablation(cfg: PipelineConfig) -> str:
    """Tune every method on validation prompts, compare the best setting of each on test prompts,
    and return the path of the result.

    They are runs of the stage that the config names, offline_ppo or distill; finished ones are
    reused, unless ``cfg.reuse`` is off.
    The same weights are never measured twice on the same prompts.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    section = section_of(cfg)
    tracker = connect(cfg.tracking, workspace)
    with (
        monitored() as monitor,
        cluster_closed(),
        command_run(tracker, workspace, cfg, _Lines(ABLATION)) as log,
    ):
        if not monitor.inputs_checked:
            check_ablation(cfg)
        ablation = Ablation(cfg, workspace, log, monitor)
        tuned = [ablation.run(job) for job in tuning_jobs(section)]
        chosen = choose_settings(section, tuned, headline_of(tuned))
        final = [ablation.run(job) for job in final_jobs(section, chosen)]
        base = [ablation.reference(seed, BASE) for seed in section.seeds]
        teacher = []
        if section.stage == "distill":
            teacher = [ablation.reference(seed, TEACHER) for seed in section.seeds]
        return ablation.publish(report_of(cfg.name, section, tuned, final, base, teacher))


# What an ablation runs, what it needs for that, and how long the rest may take.


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
        RlhfError: as `flows.stages.check_inputs`.
    """
    section = section_of(cfg)
    check_inputs(cfg, upstream_stages(section))
    for (name, _), stage_cfg in settings_of(cfg).items():
        if name in section.compared:
            check_inputs(cfg.model_copy(update={section.stage: stage_cfg}), (section.stage,))


def upstream_stages(section: AblationConfig) -> tuple[Stage, ...]:
    """Return the stages before the one whose methods are compared."""
    return STAGES[: STAGES.index(section.stage)]


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


# One run of an ablation.


class Ablation:
    """What the runs of each seed share, and what is trained already.

    Args:
        log: of its MLflow run.
    """

    def __init__(
        self, cfg: PipelineConfig, workspace: Workspace, log: StageLog, monitor: RunMonitor
    ) -> None:
        self.cfg = cfg
        self.section = section_of(cfg)
        self.workspace = workspace
        self.log = log
        self.monitor = monitor
        self.settings = settings_of(cfg)
        self.clock = Clock(self.section)
        self._shared: dict[int, dict[str, str]] = {}
        self._policies: dict[tuple[str, int, int], str] = {}

    def run(self, job: Job) -> AblationRun:
        """Train and measure one policy or student; training that went wrong is a result, too."""
        self._shared_of(job.seed)
        self._announce(job)
        started_at = time.monotonic()
        run = AblationRun(method=job.method, setting=job.setting, seed=job.seed, split=job.split)
        try:
            policy, is_trained = self._train(job)
            self._tag(policy, job)
            run = run.model_copy(update=self._measure(policy, job))
        except (TrainingError, RewardError) as error:
            self.log.event("failed_run", f"{job.method}, seed {job.seed}: {error}")
            run, is_trained = run.model_copy(update={"failure": str(error)}), True
        self.clock.job_done(time.monotonic() - started_at, is_new=is_trained)
        return run

    def reference(self, seed: int, name: str) -> AblationRun:
        """Measure the model that all methods start from, or the students' teacher."""
        stage = "sft" if name == BASE else "offline_ppo"
        model = load_artifact(Path(self._shared_of(seed)[stage]), PolicyCheckpoint)
        ((figures, measured),) = self._measured(self.cfg.offline_ppo, [model], seed, "test")
        return AblationRun(
            method=name,
            setting=0,
            seed=seed,
            split="test",
            figures=figures,
            policy=str(model.path),
            measurement=str(measured.path),
            mlflow_run_id=model.manifest.mlflow_run_id,
        )

    def publish(self, report: AblationReport) -> str:
        """Write the result, show it in MLflow and Prefect, and return the path of its JSON."""
        files = write_ablation(report, result_dir(self.workspace))
        for file in files:
            self.log.file(file)
        self.log.tracker.log_points(self.log.run_id, metric_points(report_metrics(report)))
        create_table_artifact(table=result_rows(report), key="ablation-result")
        create_markdown_artifact(render_page(report), key="ablation-page")
        return str(files[0])

    def _shared_of(self, seed: int) -> dict[str, str]:
        """Run the stages before the compared one with a seed, once; return what each made."""
        if seed not in self._shared:
            started_at = time.monotonic()
            self.log.display.note(f"the models of seed {seed} come first")
            paths: dict[str, str] = {}
            for stage in upstream_stages(self.section):
                paths[stage] = self._run_stage(seeded(getattr(self.cfg, stage), seed), stage, paths)
            self._shared[seed] = paths
            self.clock.seed_done(time.monotonic() - started_at)
        return self._shared[seed]

    def _run_stage(self, cfg: StageConfig, stage: Stage, paths: Mapping[str, str]) -> str:
        options = RunOptions(
            reuse=self.cfg.reuse,
            tracking=self.cfg.tracking,
            pipeline_run_id=self.log.run_id,
            is_trial=True,
        )
        return STAGE_FLOWS[stage](cfg, **STAGE_SPECS[stage].refs(paths), options=options)

    def _announce(self, job: Job) -> None:
        """Show which run comes next, and how long the rest may take."""
        left = self.clock.seconds_left
        rest = "" if left is None else f"; at most {math.ceil(left / 60)} min left"
        what = f"{job.method}, {self._label(job)}, seed {job.seed}, {job.split}{rest}"
        self.log.progress(self.clock.jobs_done, self.clock.n_jobs, what)

    def _label(self, job: Job) -> str:
        return label_of(self.section.methods[job.method].grid[job.setting])

    def _config_of(self, job: Job) -> Compared:
        return seeded(self.settings[job.method, job.setting], job.seed)

    def _train(self, job: Job) -> tuple[Trained, bool]:
        """Return a job's policy or student and whether it was trained just now."""
        key, stage = (job.method, job.setting, job.seed), self.section.stage
        is_trained = key not in self._policies
        if is_trained:
            paths = self._shared_of(job.seed)
            self._policies[key] = self._run_stage(self._config_of(job), stage, paths)
            is_trained = not self.monitor.outcomes[stage].reused
        path = Path(self._policies[key])
        if stage == "distill":
            return load_artifact(path, StudentAdapter), is_trained
        return load_artifact(path, PolicyCheckpoint), is_trained

    def _tag(self, policy: Artifact, job: Job) -> None:
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

    def _measure(self, policy: Trained, job: Job) -> dict[str, object]:
        """Return a job's figures and where they come from; new ones go to the policy's own run."""
        models = [policy]
        if self.section.stage == "distill":
            path = Path(self._shared_of(job.seed)["offline_ppo"])
            models.append(load_artifact(path, PolicyCheckpoint))
        (figures, measured), *teacher = self._measured(
            self._config_of(job), models, job.seed, job.split
        )
        for others, _ in teacher:
            figures |= share_of(figures, others)
        run_id = policy.manifest.mlflow_run_id
        if measured.is_new and run_id is not None:
            points = metric_points(figures, f"ablation/{job.split}_")
            self.log.tracker.log_points(run_id, points)
        return {
            "figures": figures,
            "policy": str(policy.path),
            "measurement": str(measured.path),
            "mlflow_run_id": run_id,
        }

    def _measured(
        self, cfg: Compared, models: Sequence[Trained], seed: int, split: Split
    ) -> list[tuple[dict[str, float], Measured]]:
        """Return each model's figures beside the base model's, and its measurement."""
        from tasks.ablation.stage import Asked, Upstream, measure_policy

        section, paths = self.section, self._shared_of(seed)
        upstream = Upstream(
            load_artifact(Path(paths["ingest"]), PreferenceDataset),
            load_artifact(Path(paths["sft"]), PolicyCheckpoint),
            load_artifact(Path(paths["reward_model"]), RewardModelCheckpoint),
        )
        prompts = section.tuning_prompts if split == "validation" else section.test_prompts
        asked = Asked(split, prompts, section.max_new_tokens, seed)
        directory = self.workspace.cache_dir / ABLATION
        base, *others = (
            measure_policy(directory, cfg.rendering, cfg.runtime, upstream, model, asked)
            for model in (upstream.base, *models)
        )
        return [(other.measurement.figures(base.measurement), other) for other in others]


class _Lines(ProgressDisplay):
    """Progress as lines that stay: below them each stage draws its own bar."""

    def update(self, done: float, total: float, message: str = "") -> None:
        self.note(f"run {min(done + 1, total):.0f} of {total:.0f}: {message}")
