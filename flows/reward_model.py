"""Flow `reward-model`: a Bradley-Terry reward model on the base model's backbone."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.stage_run import stage_run
from tasks.config import RewardModelConfig

DEFAULTS = RewardModelConfig()


@flow(name="reward-model", persist_result=True, **HOOKS)
def train_reward_model(
    cfg: RewardModelConfig = DEFAULTS,
    preferences: str = "latest",
    base: str = "latest",
    options: RunOptions = DEFAULT_OPTIONS,
) -> str:
    """Train the reward model and return its path."""
    with stage_run("reward_model", cfg, options, preferences=preferences, base=base) as run:
        if run.is_needed:
            from tasks import reward_model as stage

            run.publish(stage.train_reward_model(run.context, cfg, run.preferences, run.base))
    return run.path
