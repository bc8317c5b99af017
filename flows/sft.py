"""Flow `sft`: behaviour cloning, the base model of everything after it."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.sft.config import SftConfig

DEFAULTS = SftConfig()


@flow(name="sft", persist_result=True, **HOOKS)
def sft(
    cfg: Annotated[SftConfig, AS_GIVEN] = DEFAULTS,
    preferences: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Fit the base model on the stored responses, or publish it unchanged; return its path.

    Args:
        cfg: Settings; what is left out comes from the preset.
        preferences: Dataset: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    with stage_run("sft", cfg, options, preset, preferences=preferences) as run:
        if run.is_needed:
            from tasks.sft.stage import train_base

            run.artifact = train_base(run.context, run.cfg, **run.inputs)
    return run.path
