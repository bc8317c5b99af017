"""Flow `sft`: behaviour cloning, the base model of everything after it."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.stage_run import stage_run
from tasks.config import SftConfig

DEFAULTS = SftConfig()


@flow(name="sft", persist_result=True, **HOOKS)
def sft(
    cfg: SftConfig = DEFAULTS,
    preferences: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
) -> str:
    """Fit the base model on the stored responses, or publish it unchanged; return its path."""
    with stage_run("sft", cfg, options, preferences=preferences) as run:
        if run.is_needed:
            from tasks.sft import train_base

            run.publish(train_base(run.context, cfg, run.preferences))
    return run.path
