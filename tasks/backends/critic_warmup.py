"""The critic before PPO starts: fitted on returns while the policy stands still."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tasks.algorithms.advantages import explained_variance, generalized_advantage_estimate
from tasks.backends.policy_objectives import critic_batch
from tasks.backends.ppo_batches import CRITIC, BatchSource, Drawn
from tasks.backends.ppo_step import advantages_of, token_rewards_of
from tasks.backends.supervised import per_unit
from tasks.context import RunLog
from tasks.errors import TrainingError

_JUDGED_BATCHES = 4


def warm_up_critic(source: BatchSource, draw: Callable[[], Drawn], log: RunLog) -> float:
    """Fit the critic and return the share of the returns' variance that it then explains.

    Args:
        source: builds batches.
        draw: gives the rows of the next step.
        log: where to report.

    Raises:
        TrainingError: it explains nothing, and is not forced.
    """
    cfg = source.cfg
    steps = cfg.critic.warmup_steps
    for step in range(1, steps + 1):
        batch = source.window([draw()])[0]
        _, returns, _ = advantages_of(cfg.advantage, source.data, batch, cfg.reward.kl_coef)
        assert returns is not None
        metrics = source.session.train_step(
            CRITIC, critic_batch(batch, returns, source.n_trained(batch))
        )
        log.metrics({f"critic_warmup/{k}": v for k, v in per_unit(metrics).items()}, step)
        log.progress(step, steps, "critic warm-up")
    explained = _explained(source, draw)
    log.metrics({"critic_explained_variance": explained}, 0)
    if explained <= 0.0 and not cfg.critic.force:
        raise TrainingError(
            f"After {steps} steps the critic explains {explained:.3f} of the returns' variance",
            "more than 0",
            "raise critic.warmup_steps, use advantage.estimator: group, or set critic.force",
        )
    return explained


def _explained(source: BatchSource, draw: Callable[[], Drawn]) -> float:
    """Judge the critic by batches that it was not fitted on last."""
    cfg = source.cfg
    values, targets = [], []
    for batch in source.window([draw() for _ in range(_JUDGED_BATCHES)]):
        assert batch.values is not None
        rewards, _ = token_rewards_of(cfg.advantage, source.data, batch, cfg.reward.kl_coef)
        # Lambda 1: returns that do not lean on the values which they judge.
        _, returns = generalized_advantage_estimate(
            rewards, batch.values, batch.mask, gamma=cfg.advantage.gamma, gae_lambda=1.0
        )
        values.append(batch.values[batch.mask])
        targets.append(returns[batch.mask])
    known, wanted = torch.cat(values)[None], torch.cat(targets)[None]
    return float(explained_variance(known, wanted, torch.ones(known.shape, dtype=torch.bool)))
