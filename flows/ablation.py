"""Flow `rlhf-ablation`: methods of a stage, tuned with an equal budget and compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import flow

from flows.ablation_plan import Job, final_jobs, tuning_jobs
from flows.ablation_run import Ablation, ablation_run
from flows.distill import distill
from flows.hooks import HOOKS
from flows.offline_ppo import train_offline_ppo
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
    load_artifact,
)
from tasks.config import DistillConfig, PipelineConfig
from tasks.config_ablation import BASE, TEACHER
from tasks.data.ablation_report import (
    AblationRun,
    Split,
    choose_settings,
    headline_of,
    report_of,
    share_of,
)
from tasks.errors import RewardError, TrainingError

if TYPE_CHECKING:
    from tasks.ablation import Asked, Upstream

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
    from tasks.ablation import measure_policy

    cfg, directory = ablation.config_of(job), ablation.measurements_dir
    upstream, asked = _upstream(ablation, job.seed), _asked(ablation, job.seed, job.split)
    base = measure_policy(directory, cfg, upstream, upstream.base, asked)
    found = measure_policy(directory, cfg, upstream, policy, asked)
    figures = found.measurement.figures(base.measurement)
    if ablation.section.stage == "distill":
        teacher = _teacher_of(ablation, job.seed)
        heard = measure_policy(directory, cfg, upstream, teacher, asked)
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
    from tasks.ablation import measure_policy

    upstream, asked = _upstream(ablation, seed), _asked(ablation, seed, "test")
    cfg, directory = ablation.cfg.offline_ppo, ablation.measurements_dir
    base = measure_policy(directory, cfg, upstream, upstream.base, asked)
    model = upstream.base if name == BASE else _teacher_of(ablation, seed)
    found = measure_policy(directory, cfg, upstream, model, asked)
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
    from tasks.ablation import Upstream

    models = ablation.models_of(seed)
    return Upstream(
        load_artifact(Path(models.preferences), PreferenceDataset),
        load_artifact(Path(models.base), PolicyCheckpoint),
        load_artifact(Path(models.reward_model), RewardModelCheckpoint),
    )


def _asked(ablation: Ablation, seed: int, split: Split) -> Asked:
    from tasks.ablation import Asked

    section = ablation.section
    prompts = section.tuning_prompts if split == "validation" else section.test_prompts
    return Asked(split, prompts, section.max_new_tokens, seed)
