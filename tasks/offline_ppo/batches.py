"""What optimizer steps see: prompts drawn from the fixed dataset, and what a snapshot says of them.

A window is the batches between two snapshots. At its start the current policy becomes the proximal
one: its log-probabilities of all responses of the window are computed once, which is all that a
snapshot is needed for, so no second copy of the model exists.
"""

from __future__ import annotations

import json
import operator
import runpy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tasks.algorithms.advantages import group_statistics
from tasks.algorithms.samplers import Draw, OfflineSampler, Priorities, Strata
from tasks.artifacts import file_sha256
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


class Sampler(Protocol):
    """A sampler of your own: a class with these methods, called as ``Sampler(groups, seed)``.

    Args:
        groups: one for each prompt that may be drawn, ``{"subset": str, "prompt_tokens": int,
            "response_tokens": [int, ...], "rewards": [float, ...]}``, a number for each response.
        seed: of the run; another one after a guard reset the sampler.
    """

    def draw(self, batch_prompts: int) -> Sequence[int]:
        """Return the prompts of the next step: ``batch_prompts`` indices into ``groups``."""

    def state(self) -> Any:
        """Return plain JSON values, from which `resume` goes on with the very next draw."""

    def resume(self, state: Any) -> None:
        """Go on where the state was taken."""


class OwnSampler:
    """Stands where `OfflineSampler` does, around a sampler of the user's."""

    def __init__(self, cfg: OfflinePPOConfig, groups: Sequence[dict[str, Any]]) -> None:
        """Start the sampler.

        Raises:
            ConfigError: the file, or the class in it, cannot be used; names what is wrong.
        """
        self._file = Path(str(cfg.sampler.path)).expanduser()
        self._where = f"sampler {cfg.sampler.name} of {self._file}"
        self._groups, self._seed, self._batch_prompts = groups, cfg.seed, cfg.batch_prompts
        with self._named("cannot be used"):
            self._class = runpy.run_path(str(self._file))[cfg.sampler.name]
        self.reset(cfg.seed)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ConfigError(
                f"The {self._where} {what}: {error!r}",
                "a class with draw, state and resume (tasks/offline_ppo/batches.py: Sampler)",
                "mend it, or correct offline_ppo.sampler.path and name",
            ) from error

    def next_draw(self) -> Draw:
        """Draw the prompts of a step.

        Raises:
            ConfigError: what was drawn are not as many indices of groups.
        """
        with self._named("cannot draw"):
            drawn = [operator.index(i) for i in self._own.draw(self._batch_prompts)]
            wrong = [i for i in drawn if not 0 <= i < len(self._groups)]
            if wrong or len(drawn) != self._batch_prompts:
                raise ValueError(
                    f"{len(drawn)} indices, {wrong[:3]} among them, for {self._batch_prompts} "
                    f"prompts of {len(self._groups)}"
                )
        return Draw(drawn, [1.0] * len(drawn))

    def set_batch_size(self, batch_size: int) -> None:
        """Draw so many prompts from the next step on."""
        self._batch_prompts = batch_size

    def reset(self, seed: int) -> None:
        """Begin anew with another seed."""
        self._seed = seed
        with self._named("cannot start"):
            self._own: Sampler = self._class(self._groups, seed)

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        with self._named("has no state that JSON holds"):
            own = json.loads(json.dumps(self._own.state(), allow_nan=False))
        return {
            "file": file_sha256(self._file),
            "n_groups": len(self._groups),
            "seed": self._seed,
            "batch_prompts": self._batch_prompts,
            "own": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            DataError: a state of another file or of other groups.
        """
        here = {"file": file_sha256(self._file), "n_groups": len(self._groups)}
        if {name: state.get(name) for name in here} != here:
            raise DataError(
                f"a state of another sampler or of other prompts than the {self._where} has",
                "the file and the data of the first run",
                "resume with those, or start anew",
            )
        self.reset(state["seed"])
        self._batch_prompts = state["batch_prompts"]
        with self._named("cannot resume"):
            self._own.resume(state["own"])


def build_sampler(cfg: OfflinePPOConfig, data: Trajectories) -> OfflineSampler | OwnSampler:
    """Return the sampler over the prompts of the dataset, at its start.

    Raises:
        ConfigError: a sampler of the user's that cannot be used.
        DataError: a weight of a subset that the dataset has not.
    """
    how = cfg.sampler
    if how.path is not None:
        return OwnSampler(cfg, groups_of(data))
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


def groups_of(data: Trajectories) -> list[dict[str, Any]]:
    """Return what a sampler of the user's is told of each prompt."""
    subsets = data.subsets or [""] * len(data.groups)
    return [
        {
            "subset": subset,
            "prompt_tokens": len(data.rows[group[0]].prompt_ids),
            "response_tokens": [len(data.rows[i].response_ids) for i in group],
            "rewards": [float(data.rewards[i]) for i in group],
        }
        for subset, group in zip(subsets, data.groups, strict=True)
    ]


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
