"""What optimizer steps see: prompts drawn from the fixed dataset, and what a snapshot says of them.

A window is the batches between two snapshots. At its start the current policy becomes the proximal
one: its log-probabilities of all responses of the window are computed once, which is all that a
snapshot is needed for, so no second copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.algorithms.advantages import group_statistics
from tasks.algorithms.samplers import Draw, OfflineSampler, Priorities, Strata
from tasks.errors import ConfigError, DataError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.runtime.rows import ACTOR, CRITIC, Row, Trajectories, mask_of, pad
from tasks.runtime.session import Session


@dataclass(frozen=True)
class Drawn:
    """What the sampler chose for one step.

    Args:
        rows: indices of B rows of the dataset, whole prompts.
        corrections: factor of each row that undoes the preference with which it was drawn.
    """

    rows: list[int]
    corrections: list[float]


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step sees; (B, T) tensors over response tokens.

    Args:
        indices: of the rows in the dataset.
        corrections: (B,) factors of a prioritised draw.
        rows: prompts and responses.
        mask: True = a real response token.
        proximal_logprobs: of the snapshot, or of the reference where no snapshot is needed.
        values: of the critic, where there is one.
    """

    indices: Sequence[int]
    corrections: Tensor
    rows: Sequence[Row]
    mask: Tensor
    proximal_logprobs: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class BatchSource:
    """Builds the batches of a window.

    Args:
        session: holds the actor, and the critic where advantages need one.
        cfg: the stage's config.
        data: the fixed dataset.
    """

    session: Session
    cfg: OfflinePPOConfig
    data: Trajectories

    @property
    def uses_critic(self) -> bool:
        """Whether advantages are estimated with a value function."""
        return self.cfg.policy_loss != "dpo" and self.cfg.advantage.estimator == "gae"

    @property
    def needs_snapshot(self) -> bool:
        """Whether the policy's own log-probabilities enter a step before it is taken."""
        if self.cfg.policy_loss == "ppo":
            return self.cfg.reanchor_steps > 0
        return self.cfg.policy_loss != "dpo" and self.cfg.reward.kl_coef > 0.0

    def rows_of(self, draw: Draw) -> Drawn:
        """Return the rows of a step over these prompts."""
        rows: list[int] = []
        corrections: list[float] = []
        is_corrected = self.cfg.sampler.correct_priority
        for prompt, correction in zip(draw.indices, draw.corrections, strict=True):
            members = self.data.groups[prompt]
            if self.cfg.policy_loss == "dpo":
                members = [i for i in members if i < self.data.n_stored]
            rows += members
            corrections += [correction if is_corrected else 1.0] * len(members)
        return Drawn(rows, corrections)

    def n_trained(self, batch: Minibatch) -> int:
        """Return how many of a step's rows are trained on.

        Ranks take equal shares, and prompts with more responses than usual may leave a remainder,
        which baselines still count.

        Raises:
            DataError: too few rows for the ranks.
        """
        unit = self.session.host.ranks * (2 if self.cfg.policy_loss == "dpo" else 1)
        count = len(batch.rows) - len(batch.rows) % unit
        if not count:
            raise DataError(
                f"A step of {len(batch.rows)} rows",
                f"at least {unit} for {self.session.host.ranks} ranks",
                "raise offline_ppo.batch_prompts",
            )
        return count

    def window(self, steps: Sequence[Drawn]) -> list[Minibatch]:
        """Compute what the snapshot says of the rows of several steps."""
        drawn = [step.rows for step in steps]
        rows = [self.data.rows[i] for indices in drawn for i in indices]
        proximal, values = self._read(rows)
        if proximal is None:
            proximal = [self.data.ref_logprobs[i] for indices in drawn for i in indices]
        batches, start = [], 0
        for step, indices in zip(steps, drawn, strict=True):
            span = slice(start, start + len(indices))
            start += len(indices)
            batches.append(
                Minibatch(
                    indices,
                    torch.tensor(step.corrections),
                    rows[span],
                    mask_of(rows[span]),
                    pad(proximal[span]),
                    None if values is None else pad(values[span]).float(),
                )
            )
        return batches

    def _read(self, rows: Sequence[Row]) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]:
        """Return what policy and critic say of the rows, where they are asked."""
        if self.needs_snapshot and self.uses_critic:
            return self.session.logprobs_and_values(ACTOR, CRITIC, rows)
        return (
            self.session.logprobs(ACTOR, rows) if self.needs_snapshot else None,
            self.session.values(CRITIC, rows) if self.uses_critic else None,
        )


# Which prompts a step trains on.


def build_sampler(cfg: OfflinePPOConfig, data: Trajectories) -> OfflineSampler:
    """Return the sampler over the prompts of the dataset, at its start.

    Raises:
        DataError: a weight of a subset that the dataset has not.
    """
    how = cfg.sampler
    strata = priorities = None
    if how.stratify:
        strata = Strata(data.subsets or [""] * len(data.groups), how.subset_weights)
    if how.priority != "none":
        values = margins(data) if how.priority == "margin" else distances(data)
        priorities = Priorities(values, how.priority_exponent, how.uniform_share, how.epoch_share)
    return OfflineSampler(
        [max(len(data.rows[i]) for i in group) for group in data.groups],
        batch_size=cfg.batch_prompts,
        seed=cfg.seed,
        strata=strata,
        priorities=priorities,
    )


def margins(data: Trajectories) -> list[float]:
    """Return how far apart the rewards of each prompt's responses are."""
    rewards = data.rewards.tolist()
    spans = [[rewards[i] for i in group] for group in data.groups]
    return [max(span) - min(span) for span in spans]


def distances(data: Trajectories) -> list[float]:
    """Return how far each prompt's responses are at most from their mean reward: what priorities by
    advantage start from."""
    centred = group_statistics(data.rewards, data.group_of).centred.abs().tolist()
    return [max(centred[i] for i in group) for group in data.groups]


def check_subsets(cfg: OfflinePPOConfig, subsets: Collection[str]) -> None:
    """Refuse weights of subsets that the training split has not.

    Raises:
        ConfigError: names them and those that there are.
    """
    unknown = sorted(set(cfg.sampler.subset_weights) - set(subsets))
    if unknown:
        raise ConfigError(
            f"offline_ppo.sampler.subset_weights names {unknown}",
            f"subsets of the training split: {sorted(set(subsets))}",
            "correct the names",
        )
