"""Flow `offline-ppo`: the policy, trained on stored responses alone."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.stage_run import stage_run
from tasks.config import OfflinePPOConfig

DEFAULTS = OfflinePPOConfig()


@flow(name="offline-ppo", persist_result=True, **HOOKS)
def train_offline_ppo(
    cfg: OfflinePPOConfig = DEFAULTS,
    preferences: str = "latest",
    reward_model: str = "latest",
    base: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
) -> str:
    """Align the base model by offline PPO and return the policy's path."""
    with stage_run(
        "offline_ppo",
        cfg,
        options,
        preferences=preferences,
        reward_model=reward_model,
        base=base,
    ) as run:
        if run.is_needed:
            from tasks.offline_ppo import train_policy

            run.publish(train_policy(run.context, cfg, run.preferences, run.reward_model, run.base))
    return run.path
