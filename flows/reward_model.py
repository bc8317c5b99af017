"""Flow `reward-model`: a Bradley-Terry reward model on the base model's backbone."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.reward_model.config import RewardModelConfig

DEFAULTS = RewardModelConfig()


@flow(name="reward-model", persist_result=True, **HOOKS)
def train_reward_model(
    cfg: Annotated[RewardModelConfig, AS_GIVEN] = DEFAULTS,
    preferences: str = "latest",
    base: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Train the reward model and return its path.

    Args:
        cfg: Settings; what is left out comes from the preset.
        preferences: Dataset: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        base: Base model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    refs = {"preferences": preferences, "base": base}
    with stage_run("reward_model", cfg, options, preset, **refs) as run:
        if run.is_needed:
            from tasks.reward_model import stage

            run.artifact = stage.train_reward_model(run.context, run.cfg, **run.inputs)
    return run.path
