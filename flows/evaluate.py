"""Flow `evaluate`: two-turn questions and held-out prompts, scored by the reward model."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.evaluate.config import EvaluateConfig

DEFAULTS = EvaluateConfig()


@flow(name="evaluate", persist_result=True, **HOOKS)
def evaluate(
    cfg: Annotated[EvaluateConfig, AS_GIVEN] = DEFAULTS,
    preferences: str = "latest",
    student: str = "latest",
    policy: str = "latest",
    base: str = "latest",
    reward_model: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Compare base, policy and student, and return the path of the report.

    Args:
        cfg: Settings; what is left out comes from the preset.
        preferences: Dataset: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        student: Student: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        policy: Aligned policy: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        base: Base model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        reward_model: Reward model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    refs = {
        "preferences": preferences,
        "student": student,
        "policy": policy,
        "base": base,
        "reward_model": reward_model,
    }
    with stage_run("evaluate", cfg, options, preset, **refs) as run:
        if run.is_needed:
            from tasks.evaluate.stage import Models, evaluate_models

            pairs, judge = run.inputs["preferences"], run.inputs["reward_model"]
            models = Models(run.inputs["base"], run.inputs["policy"], run.inputs["student"])
            run.artifact = evaluate_models(run.context, run.cfg, pairs, models, judge)
    return run.path
