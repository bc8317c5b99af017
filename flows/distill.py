"""Flow `distill`: the aligned policy teaches a LoRA student."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.stage_run import stage_run
from tasks.config import DistillConfig

DEFAULTS = DistillConfig()


@flow(name="distill", persist_result=True, **HOOKS)
def distill(
    cfg: DistillConfig = DEFAULTS,
    preferences: str = "latest",
    policy: str = "latest",
    base: str = "latest",
    reward_model: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
) -> str:
    """Train the student's adapter, register it as the candidate, and return its path."""
    with stage_run(
        "distill",
        cfg,
        options,
        preferences=preferences,
        policy=policy,
        base=base,
        reward_model=reward_model,
    ) as run:
        if run.is_needed:
            from tasks.distill import train_student

            run.publish(
                train_student(
                    run.context, cfg, run.preferences, run.policy, run.base, run.reward_model
                )
            )
    return run.path
