"""Flow `distill`: the aligned policy teaches a LoRA student."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.distill.config import DistillConfig

DEFAULTS = DistillConfig()


@flow(name="distill", persist_result=True, **HOOKS)
def distill(
    cfg: Annotated[DistillConfig, AS_GIVEN] = DEFAULTS,
    preferences: str = "latest",
    policy: str = "latest",
    base: str = "latest",
    reward_model: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Train the student's adapter, register it as the candidate, and return its path.

    Args:
        cfg: Settings; what is left out comes from the preset.
        preferences: Dataset: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        policy: Aligned policy: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        base: Base model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        reward_model: Judge: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    refs = {
        "preferences": preferences,
        "policy": policy,
        "base": base,
        "reward_model": reward_model,
    }
    with stage_run("distill", cfg, options, preset, **refs) as run:
        if run.is_needed:
            from tasks.distill.stage import train_student

            run.artifact = train_student(run.context, run.cfg, **run.inputs)
    return run.path
