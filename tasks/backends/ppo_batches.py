"""What optimizer steps see: prompts drawn from the fixed dataset, and what a snapshot says of them.

A window is the batches between two snapshots. At its start the current policy becomes the proximal
one: its log-probabilities of all responses of the window are computed once, which is all that a
snapshot is needed for, so no second copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tasks.backends.roles import Row
from tasks.backends.session import Session
from tasks.backends.trajectories import Trajectories, mask_of, pad
from tasks.config import OfflinePPOConfig
from tasks.errors import DataError

ACTOR = "actor"
CRITIC = "critic"


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step sees; (B, T) tensors over response tokens.

    Args:
        indices: of the rows in the dataset.
        rows: prompts and responses.
        mask: True = a real response token.
        proximal_logprobs: of the snapshot, or of the reference where no snapshot is needed.
        values: of the critic, where there is one.
    """

    indices: Sequence[int]
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

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """Return the rows that a step over these prompts trains on.

        Ranks take equal shares; prompts with more responses than usual may leave a remainder.

        Raises:
            DataError: too few rows for the ranks.
        """
        indices = [i for prompt in prompts for i in self.data.groups[prompt]]
        unit = self.session.host.ranks
        if self.cfg.policy_loss == "dpo":
            indices = [i for i in indices if i < self.data.n_stored]
            unit *= 2
        indices = indices[: len(indices) - len(indices) % unit]
        if not indices:
            raise DataError(
                f"A step over {len(prompts)} prompts has fewer than {unit} rows",
                f"at least {unit} for {self.session.host.ranks} ranks",
                "raise offline_ppo.batch_prompts",
            )
        return indices

    def window(self, drawn: Sequence[Sequence[int]]) -> list[Minibatch]:
        """Compute what the snapshot says of the rows of several steps.

        Args:
            drawn: indices of the rows of each step.
        """
        rows = [self.data.rows[i] for indices in drawn for i in indices]
        if self.needs_snapshot:
            proximal: Sequence[Tensor] = self.session.logprobs(ACTOR, rows)
        else:
            proximal = [self.data.ref_logprobs[i] for indices in drawn for i in indices]
        values = self.session.values(CRITIC, rows) if self.uses_critic else None
        batches, start = [], 0
        for indices in drawn:
            span = slice(start, start + len(indices))
            start += len(indices)
            batches.append(
                Minibatch(
                    indices,
                    rows[span],
                    mask_of(rows[span]),
                    pad(proximal[span]),
                    None if values is None else pad(values[span]).float(),
                )
            )
        return batches
