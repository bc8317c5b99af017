"""Flow `evaluate`: two-turn questions and held-out prompts, scored by the reward model."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.stage_run import stage_run
from tasks.config import EvaluateConfig

DEFAULTS = EvaluateConfig()


@flow(name="evaluate", persist_result=True, **HOOKS)
def evaluate(  # noqa: PLR0913 - one field of the form per upstream
    cfg: EvaluateConfig = DEFAULTS,
    preferences: str = "latest",
    student: str = "latest",
    policy: str = "latest",
    base: str = "latest",
    reward_model: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
) -> str:
    """Compare base, policy and student, and return the path of the report."""
    with stage_run(
        "evaluate",
        cfg,
        options,
        preferences=preferences,
        student=student,
        policy=policy,
        base=base,
        reward_model=reward_model,
    ) as run:
        if run.is_needed:
            from tasks.evaluate import evaluate_models

            run.publish(
                evaluate_models(
                    run.context,
                    cfg,
                    run.preferences,
                    run.student,
                    run.policy,
                    run.base,
                    run.reward_model,
                )
            )
    return run.path
