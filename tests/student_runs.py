"""A small chain up to its student, for the tests of the evaluation."""

from __future__ import annotations

from typing import Any

from flows.distill import distill
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.pipeline_config import PipelineConfig

REUSE = RunOptions(reuse=True)


def evaluation_inputs(chain: PipelineConfig, preferences: str, base: str) -> dict[str, Any]:
    """Train a reward model, a policy and a student; return all inputs of stage evaluate."""
    reward_model = train_reward_model(chain.reward_model, preferences, base, REUSE)
    policy = train_offline_ppo(chain.offline_ppo, preferences, reward_model, base, REUSE)
    student = distill(chain.distill, preferences, policy, base, reward_model, REUSE)
    return {
        "preferences": preferences,
        "student": student,
        "policy": policy,
        "base": base,
        "reward_model": reward_model,
    }
