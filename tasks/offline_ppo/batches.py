"""What optimizer steps see: prompts drawn from the fixed dataset, and what a snapshot says of them.

A window is the batches between two snapshots. At its start the current policy becomes the proximal
one: its log-probabilities of all responses of the window are computed once, which is all that a
snapshot is needed for, so no second copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.algorithms.advantages import group_statistics
from tasks.algorithms.samplers import Draw, OfflineSampler, Priorities, Strata
from tasks.errors import ConfigError, DataError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.offline_ppo.objectives import OBJECTIVES, Objective
from tasks.runtime.rows import ACTOR, CRITIC, Row, Trajectories, mask_of, pad, unpad
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
    """What one optimizer step sees of B rows; (B, T) tensors over response tokens.

    Args:
        rows: prompts and responses.
        mask: (B, T) bool, True = a real response token.
        groups: (B,) int64, the prompt of each row.
        rewards: (B,) of the dataset.
        corrections: (B,) factors of a prioritised draw.
        behavior_logprobs, ref_logprobs: (B, T) of the dataset.
        proximal_logprobs: (B, T) of the snapshot, or of the reference where none is needed.
        values: (B, T) of the critic before each token, where there is one.
        bootstrap_values: (B,) of the critic after the last token of a response that was cut off; 0
            where it ends its turn.
        advantages, weights, returns: (B, T), of `step.prepare_step` where the policy loss has them.
    """

    rows: Sequence[Row]
    mask: Tensor
    groups: Tensor
    rewards: Tensor
    corrections: Tensor
    behavior_logprobs: Tensor
    ref_logprobs: Tensor
    proximal_logprobs: Tensor
    values: Tensor | None = None
    bootstrap_values: Tensor | None = None
    advantages: Tensor | None = None
    weights: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def of(
        cls,
        data: Trajectories,
        drawn: Drawn,
        proximal: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None,
    ) -> Minibatch:
        """Put together what is known of the drawn rows.

        Args:
            proximal: of the snapshot, (T_i,) for each row; None = the reference.
            values: of the critic, (T_i + 1,) for each row: also after its last token.
        """
        rows = [data.rows[i] for i in drawn.rows]
        ref = [data.ref_logprobs[i] for i in drawn.rows]
        bootstrap = None
        if values is not None:
            last = torch.stack([row[-1] for row in values]).float()
            bootstrap = torch.where(data.ended[drawn.rows], 0.0, last)
        return cls(
            rows,
            mask_of(rows),
            data.group_of[drawn.rows],
            data.rewards[drawn.rows],
            torch.tensor(drawn.corrections),
            pad([data.behavior_logprobs[i] for i in drawn.rows]),
            pad(ref),
            pad(ref if proximal is None else proximal),
            None if values is None else pad([row[:-1] for row in values]).float(),
            bootstrap,
        )

    def columns(self, names: Iterable[str], n_rows: int) -> dict[str, list[Tensor]]:
        """Return (B, T) tensors by name, without their padding, of the first rows."""
        rows = self.rows[:n_rows]
        return {name: unpad(getattr(self, name)[:n_rows], rows) for name in names}


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
    def objective(self) -> Objective:
        """The policy loss."""
        return OBJECTIVES[self.cfg.policy_loss]

    @property
    def uses_critic(self) -> bool:
        """Whether advantages are estimated with a value function."""
        return self.cfg.advantage.estimator == "gae"

    def rows_of(self, draw: Draw) -> Drawn:
        """Return the rows of a step over these prompts."""
        rows: list[int] = []
        corrections: list[float] = []
        is_corrected = self.cfg.sampler.correct_priority
        for prompt, correction in zip(draw.indices, draw.corrections, strict=True):
            members = self.data.groups[prompt]
            if self.objective.in_pairs:
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
        unit = self.session.host.ranks * self.objective.group_size
        count = len(batch.rows) - len(batch.rows) % unit
        if not count:
            raise DataError(
                f"A step of {len(batch.rows)} rows",
                f"at least {unit} for {self.session.host.ranks} ranks",
                "raise offline_ppo.batch_prompts",
            )
        return count

    def window(self, steps: Sequence[Drawn]) -> list[Minibatch]:
        """Take a snapshot: ask policy and critic, where they are needed, for the rows of several
        steps at once."""
        rows = [self.data.rows[i] for step in steps for i in step.rows]
        proximal = values = None
        needs_snapshot = self.objective.needs_snapshot(
            self.cfg.reanchor_steps, self.cfg.reward.kl_coef
        )
        if needs_snapshot and self.uses_critic:
            proximal, values = self.session.logprobs_and_values(ACTOR, CRITIC, rows)
        elif needs_snapshot:
            proximal = self.session.logprobs(ACTOR, rows)
        elif self.uses_critic:
            values = self.session.values(CRITIC, rows)
        batches, start = [], 0
        for step in steps:
            span = slice(start, start + len(step.rows))
            start = span.stop
            batches.append(
                Minibatch.of(self.data, step, proximal and proximal[span], values and values[span])
            )
        return batches


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
