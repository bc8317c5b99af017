"""Flow `offline-ppo`: the policy, trained on stored responses alone."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.offline_ppo.config import OfflinePPOConfig

DEFAULTS = OfflinePPOConfig()


@flow(name="offline-ppo", persist_result=True, **HOOKS)
def train_offline_ppo(
    cfg: Annotated[OfflinePPOConfig, AS_GIVEN] = DEFAULTS,
    preferences: str = "latest",
    reward_model: str = "latest",
    base: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Align the base model by offline PPO and return the policy's path.

    Args:
        cfg: Settings; what is left out comes from the preset.
        preferences: Dataset: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        reward_model: Reward model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        base: Base model: latest, runs:/ID, models:/NAME@ALIAS, upstream:REF or a path.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    refs = {"preferences": preferences, "reward_model": reward_model, "base": base}
    with stage_run("offline_ppo", cfg, options, preset, **refs) as run:
        if run.is_needed:
            from tasks.offline_ppo.stage import train_policy

            run.artifact = train_policy(run.context, run.cfg, **run.inputs)
    return run.path
