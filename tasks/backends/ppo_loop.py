"""Offline PPO with three policies: behaviour (wrote the data), proximal (a snapshot), current.

A window is the batches between two snapshots. At its start the current policy becomes the proximal
one: its log-probabilities of all responses of the window are computed once, which is all that a
snapshot is needed for, so no second copy of the model exists.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.advantages import (
    adaptive_gae_lambda,
    broadcast_to_tokens,
    explained_variance,
    generalized_advantage_estimate,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
)
from tasks.algorithms.importance import (
    effective_sample_size_from_sums,
    sequence_log_ratio,
    truncated_importance_weights,
    weight_metrics,
)
from tasks.algorithms.kl import AdaptiveKLController, weighted_kl_on_data
from tasks.algorithms.masking import masked_mean, masked_whiten
from tasks.algorithms.policy_losses import ClipRange
from tasks.algorithms.rewards import token_level_rewards
from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.roles import Batch, Row
from tasks.backends.session import Session
from tasks.backends.supervised import per_unit
from tasks.backends.trajectories import Trajectories, mask_of, pad, unpad
from tasks.config import AdvantageConfig, OfflinePPOConfig
from tasks.context import RunLog
from tasks.errors import TrainingError

ACTOR = "actor"
CRITIC = "critic"
# Without re-anchoring a window only decides how far ahead batches are drawn.
_FIXED_ANCHOR_WINDOW_STEPS = 16


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step sees; (B, T) tensors over response tokens, ``mask`` True = a real
    token."""

    indices: Sequence[int]
    rows: Sequence[Row]
    mask: Tensor
    proximal_logprobs: Tensor
    values: Tensor | None


@dataclass
class PPOLoop:
    """The loop and its state.

    Args:
        session: holds the actor, and the critic where advantages need one.
        cfg: the stage's config.
        data: the fixed dataset.
        store: checkpoints.
        log: where to report.
    """

    session: Session
    cfg: OfflinePPOConfig
    data: Trajectories
    store: CheckpointStore
    log: RunLog
    sampler: LengthGroupedSampler = field(init=False)
    kl: AdaptiveKLController | None = field(init=False, default=None)
    group_of: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = self.data.rows
        self.sampler = LengthGroupedSampler(
            [max(len(rows[i]) for i in group) for group in self.data.groups],
            batch_size=self.cfg.batch_prompts,
            seed=self.cfg.seed,
        )
        reward = self.cfg.reward
        if reward.kl_target is not None:
            self.kl = AdaptiveKLController(reward.kl_coef, reward.kl_target, reward.kl_horizon)
        self.group_of = torch.zeros(len(self.data.rows), dtype=torch.long)
        for group, members in enumerate(self.data.groups):
            self.group_of[list(members)] = group

    @property
    def uses_critic(self) -> bool:
        """Whether advantages are estimated with a value function."""
        return self.cfg.advantage.estimator == "gae"

    @property
    def roles(self) -> list[str]:
        """Roles whose state a checkpoint holds."""
        return [ACTOR, CRITIC] if self.uses_critic else [ACTOR]

    @property
    def kl_coef(self) -> float:
        """Present coefficient of the KL-in-reward."""
        return self.cfg.reward.kl_coef if self.kl is None else self.kl.coef

    def run(self) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        Raises:
            TrainingError: something that is not finite, or a critic that explains nothing.
        """
        done = self._resume()
        self._set_losses()
        if self.uses_critic and done == 0:
            self._warm_up_critic()
        saved = done
        while done < self.cfg.steps:
            for batch in self._window(min(self._window_steps, self.cfg.steps - done)):
                done += 1
                self._step(done, batch)
            if done - saved >= self.cfg.checkpoint.save_every_steps and done < self.cfg.steps:
                self.store.save(done, self.session, self.roles, self._state())
                saved = done

    @property
    def _window_steps(self) -> int:
        return self.cfg.reanchor_steps or _FIXED_ANCHOR_WINDOW_STEPS

    def _state(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "kl_coef": self.kl_coef}

    def _resume(self) -> int:
        step = self.store.latest_step()
        if step:
            state = self.store.restore(step, self.session, self.roles)
            self.sampler.load_state_dict(state["sampler"])
            if self.kl is not None:
                self.kl = AdaptiveKLController(state["kl_coef"], self.kl.target, self.kl.horizon)
            self.log.event("resumed", f"continuing from step {step} of {self.cfg.steps}")
        return step

    def _set_losses(self) -> None:
        from tasks.backends.verl_losses import critic_loss, policy_loss

        loss = self.cfg.loss
        clip = ClipRange(loss.clip_low, loss.clip_high, loss.dual_clip)
        self.session.set_loss(
            ACTOR, partial(policy_loss, clip, loss.aggregation, loss.entropy_coef)
        )
        if self.uses_critic:
            self.session.set_loss(
                CRITIC, partial(critic_loss, self.cfg.critic.value_clip, loss.aggregation)
            )

    def _window(self, n_steps: int) -> list[Minibatch]:
        """Draw the next batches and compute what the snapshot says about them."""
        drawn = [self._draw() for _ in range(n_steps)]
        rows = [self.data.rows[i] for indices in drawn for i in indices]
        if self.cfg.reanchor_steps:
            proximal = self.session.logprobs(ACTOR, rows)
        else:
            proximal = [self.data.ref_logprobs[i] for indices in drawn for i in indices]
        values = self.session.values(CRITIC, rows) if self.uses_critic else None
        batches, start = [], 0
        for indices in drawn:
            span = slice(start, start + len(indices))
            start += len(indices)
            part = rows[span]
            batches.append(
                Minibatch(
                    indices,
                    part,
                    mask_of(part),
                    pad(proximal[span]),
                    None if values is None else pad(values[span]).float(),
                )
            )
        return batches

    def _draw(self) -> list[int]:
        prompts = self.sampler.next_batch(self.cfg.batch_prompts)
        indices = [i for prompt in prompts for i in self.data.groups[prompt]]
        # Ranks take equal shares; a prompt with more responses than usual may leave a remainder.
        return indices[: len(indices) - len(indices) % self.session.host.ranks]

    def _step(self, step: int, batch: Minibatch) -> None:
        started = time.monotonic()
        behavior = pad([self.data.behavior_logprobs[i] for i in batch.indices])
        advantages, returns = self._advantages(batch)
        level, cap = self.cfg.importance.level, self.cfg.importance.cap
        ratio = sequence_log_ratio(batch.proximal_logprobs, behavior, batch.mask, level=level)
        weights = truncated_importance_weights(ratio, advantages, batch.mask, level=level, cap=cap)
        if returns is not None and batch.values is not None:
            self.session.train_step(CRITIC, _critic_batch(batch, returns))
        metrics = self.session.train_step(ACTOR, self._actor_batch(batch, advantages, weights))
        tokens = sum(map(len, batch.rows))
        readable = per_unit(metrics)
        readable |= _weight_report(weight_metrics(ratio, weights, batch.mask, level=level, cap=cap))
        readable |= self._data_report(batch, advantages, weights)
        readable["tokens_per_second"] = tokens / max(time.monotonic() - started, 1e-9)
        self.log.metrics(readable, step)
        self.log.progress(step, self.cfg.steps, f"ESS {readable['ess_share']:.2f}")

    def _token_rewards(self, batch: Minibatch) -> Tensor:
        return token_level_rewards(
            self.data.rewards[list(batch.indices)],
            batch.proximal_logprobs,
            pad([self.data.ref_logprobs[i] for i in batch.indices]) if self.kl_coef else None,
            batch.mask,
            kl_coef=self.kl_coef,
        )

    def _advantages(self, batch: Minibatch) -> tuple[Tensor, Tensor | None]:
        """Return (B, T) advantages and, with a critic, (B, T) returns."""
        rewards = self._token_rewards(batch)
        if batch.values is not None:
            return gae_of(self.cfg.advantage, rewards, batch.values, batch.mask)
        groups = self.group_of[list(batch.indices)]
        return (
            sequence_advantages(self.cfg.advantage, rewards, batch.mask, groups),
            None,
        )

    def _actor_batch(self, batch: Minibatch, advantages: Tensor, weights: Tensor) -> Batch:
        columns = {
            "proximal_logprobs": batch.proximal_logprobs,
            "advantages": advantages,
            "weights": weights,
        }
        return Batch(
            batch.rows,
            {name: unpad(tensor, batch.rows) for name, tensor in columns.items()},
            scalars={"calculate_entropy": self.cfg.loss.entropy_coef > 0.0},
        )

    def _data_report(
        self, batch: Minibatch, advantages: Tensor, weights: Tensor
    ) -> dict[str, float]:
        ref = pad([self.data.ref_logprobs[i] for i in batch.indices])
        estimate, _ = weighted_kl_on_data(batch.proximal_logprobs, ref, weights, batch.mask)
        rewards = self.data.rewards[list(batch.indices)]
        kl_data = float(estimate)
        if self.kl is not None:
            self.kl = self.kl.update(kl_data, len(batch.rows))
        return {
            "kl_data": kl_data,
            "kl_coef": self.kl_coef,
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "advantage_mean": float(masked_mean(advantages, batch.mask)),
        }

    def _warm_up_critic(self) -> None:
        """Fit the critic on returns while the policy stands still; refuse one that explains
        nothing."""
        steps = self.cfg.critic.warmup_steps
        for step in range(1, steps + 1):
            batch = self._window(1)[0]
            _, returns = self._advantages(batch)
            assert returns is not None
            metrics = self.session.train_step(CRITIC, _critic_batch(batch, returns))
            self.log.metrics({f"critic_warmup/{k}": v for k, v in per_unit(metrics).items()}, step)
            self.log.progress(step, steps, "critic warm-up")
        batch = self._window(min(4, self._window_steps))[-1]
        assert batch.values is not None
        # Lambda 1: returns that do not lean on the values which they judge.
        _, returns = generalized_advantage_estimate(
            self._token_rewards(batch),
            batch.values,
            batch.mask,
            gamma=self.cfg.advantage.gamma,
            gae_lambda=1.0,
        )
        explained = float(explained_variance(batch.values, returns, batch.mask))
        self.log.metrics({"critic_explained_variance": explained}, 0)
        if explained <= 0.0 and not self.cfg.critic.force:
            raise TrainingError(
                f"After {steps} steps the critic explains {explained:.3f} of the returns' variance",
                "more than 0",
                "raise critic.warmup_steps, use advantage.estimator: group, or set critic.force",
            )


def gae_of(
    cfg: AdvantageConfig, rewards: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages and the returns, both (B, T).

    An adaptive lambda follows the share of the returns' variance that the values leave unexplained.
    """
    gae_lambda = cfg.gae_lambda
    if gae_lambda == "adaptive":
        _, returns = generalized_advantage_estimate(
            rewards, values, mask, gamma=cfg.gamma, gae_lambda=1.0
        )
        unexplained = 1.0 - float(explained_variance(values, returns, mask))
        gae_lambda = adaptive_gae_lambda(min(max(unexplained, 0.0), 1.0))
    advantages, returns = generalized_advantage_estimate(
        rewards, values, mask, gamma=cfg.gamma, gae_lambda=gae_lambda
    )
    return masked_whiten(advantages, mask), returns


def sequence_advantages(
    cfg: AdvantageConfig, rewards: Tensor, mask: Tensor, groups: Tensor
) -> Tensor:
    """Return (B, T) advantages from token rewards without a critic.

    Args:
        cfg: estimator and its options.
        rewards: (B, T) token rewards.
        mask: (B, T) bool, True = a real response token.
        groups: (B,) int64, the prompt of each row.
    """
    if cfg.estimator == "reinforce_pp":
        return reinforce_pp_advantages(rewards, mask, gamma=cfg.gamma)[0]
    scores = rewards.sum(dim=1)
    if cfg.estimator == "rloo":
        advantages = rloo_advantages(scores, groups)
    else:
        advantages = grpo_advantages(scores, groups, normalize_std=cfg.normalize_std)
    spread = broadcast_to_tokens(advantages, mask)
    return masked_whiten(spread, mask) if cfg.whiten else spread


def _critic_batch(batch: Minibatch, returns: Tensor) -> Batch:
    assert batch.values is not None
    columns = {"old_values": batch.values, "returns": returns}
    return Batch(batch.rows, {name: unpad(tensor, batch.rows) for name, tensor in columns.items()})


def _weight_report(sums: dict[str, Tensor]) -> dict[str, float]:
    n = float(sums["n_weights"])
    used = effective_sample_size_from_sums(sums["weight_sum"], sums["weight_sq_sum"])
    raw = effective_sample_size_from_sums(sums["raw_weight_sum"], sums["raw_weight_sq_sum"])
    return {
        "ess_share": float(used) / n,
        "ess_share_raw": float(raw) / n,
        "weight_mean": float(sums["weight_sum"]) / n,
        "weight_max": float(sums["weight_max"]),
        "weight_above_cap": float(sums["above_cap_sum"]) / n,
    }
