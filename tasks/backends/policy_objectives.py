"""The policy losses by name: what the workers compute, and the columns that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tasks.algorithms.policy_losses import ClipRange
from tasks.backends.ppo_batches import Minibatch
from tasks.backends.ppo_step import StepInputs
from tasks.backends.roles import Batch
from tasks.backends.trajectories import Trajectories, unpad
from tasks.config import OfflinePPOConfig


def actor_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the loss of ``policy_loss`` for the workers."""
    from tasks.backends.verl_policy_losses import (
        ActorTerms,
        LikelihoodRule,
        likelihood_loss,
        policy_loss,
        preference_loss,
    )

    loss = cfg.loss
    terms = ActorTerms(loss.aggregation, loss.entropy_coef, loss.kl_coef, loss.kl_kind)
    if cfg.policy_loss == "ppo":
        clip = ClipRange(loss.clip_low, loss.clip_high, loss.dual_clip)
        return partial(policy_loss, clip, terms)
    if cfg.policy_loss == "dpo":
        return partial(preference_loss, loss.dpo_beta, loss.dpo_label_smoothing, terms)
    rule = LikelihoodRule(cfg.policy_loss, cfg.importance.level, loss.clip_high)
    return partial(likelihood_loss, rule, terms)


def critic_step_loss(cfg: OfflinePPOConfig) -> Callable[..., Any]:
    """Return the critic's loss for the workers."""
    from tasks.backends.verl_policy_losses import critic_loss

    return partial(critic_loss, cfg.critic.value_clip, cfg.loss.aggregation)


def actor_batch(
    cfg: OfflinePPOConfig,
    data: Trajectories,
    batch: Minibatch,
    inputs: StepInputs,
    n_rows: int,
) -> Batch:
    """Return a step's rows with the columns that its loss reads.

    Args:
        inputs: advantages and weights of the whole step.
        n_rows: the first rows, which are trained on.
    """
    padded: dict[str, Tensor] = {}
    stored: dict[str, Sequence[Tensor]] = {}
    if cfg.policy_loss == "ppo":
        padded = {
            "proximal_logprobs": batch.proximal_logprobs,
            "advantages": inputs.advantages,
            "weights": inputs.weights,
        }
    elif cfg.policy_loss != "dpo":
        padded = {"advantages": inputs.advantages}
        stored = {"behavior_logprobs": data.behavior_logprobs}
    if cfg.policy_loss == "dpo" or cfg.loss.kl_coef > 0.0:
        stored = {**stored, "ref_logprobs": data.ref_logprobs}
    rows, indices = batch.rows[:n_rows], batch.indices[:n_rows]
    columns = {name: unpad(tensor[:n_rows], rows) for name, tensor in padded.items()}
    columns |= {name: [column[i] for i in indices] for name, column in stored.items()}
    return Batch(
        rows,
        columns,
        group_size=2 if cfg.policy_loss == "dpo" else 1,
        scalars={"calculate_entropy": cfg.loss.entropy_coef > 0.0},
    )


def critic_batch(batch: Minibatch, returns: Tensor, n_rows: int) -> Batch:
    """Return the first ``n_rows`` rows of a step with old values and returns, (B, T)."""
    assert batch.values is not None
    columns = {"old_values": batch.values, "returns": returns}
    rows = batch.rows[:n_rows]
    return Batch(rows, {name: unpad(tensor[:n_rows], rows) for name, tensor in columns.items()})
