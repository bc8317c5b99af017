"""What an ablation runs, what it needs for that, and how long the rest may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flows.preflight import check_inputs
from tasks.config import (
    AblationConfig,
    DistillConfig,
    OfflinePPOConfig,
    PipelineConfig,
    Stage,
    StageConfig,
)
from tasks.data.ablation_report import AblationReport, Split
from tasks.errors import ConfigError
from tasks.workspace import Workspace

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
        RlhfError: as `flows.preflight.check_inputs`.
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
