"""Scores of a trained reward model: the one way from rows to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.artifacts import RewardComponent, RewardModelCheckpoint
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session
from tasks.errors import RewardError


@dataclass(frozen=True)
class ComponentScores:
    """Scores of N rows by one component, the mean of its members.

    Args:
        total: (N,) in standard deviations of the training scores.
        raw: (N,) as the members give them.
        disagreement: (N,) standard deviation of the members' scores, each about its own mean over
            these rows, in the unit of ``total``; None for a component of one member.
    """

    total: Tensor
    raw: Tensor
    disagreement: Tensor | None = None


@dataclass(frozen=True)
class RewardScores:
    """Scores of N rows.

    Args:
        components: by name.
    """

    components: Mapping[str, ComponentScores]

    @property
    def total(self) -> Tensor:
        """(N,) mean of the components, each in standard deviations of its training scores."""
        return torch.stack([scores.total for scores in self.components.values()]).mean(dim=0)

    @property
    def raw(self) -> Tensor:
        """(N,) mean of the components as their members give them."""
        return torch.stack([scores.raw for scores in self.components.values()]).mean(dim=0)

    @property
    def disagreement(self) -> Tensor | None:
        """(N,) mean over the components that have several members; None where none has."""
        known = [
            scores.disagreement
            for scores in self.components.values()
            if scores.disagreement is not None
        ]
        return torch.stack(known).mean(dim=0) if known else None


@dataclass(frozen=True)
class RewardScorer:
    """A reward model in the workers; scoring is shared by all ranks.

    Args:
        session: workers; `load` puts the members into them.
        components: what to score with.
    """

    session: Session
    components: Mapping[str, RewardComponent]

    @classmethod
    def load(cls, session: Session, checkpoint: RewardModelCheckpoint) -> RewardScorer:
        """Put the reward model into the workers."""
        components = checkpoint.components
        for component in components.values():
            for index, directory in enumerate(component.member_dirs):
                name = _role(component.name, index)
                session.load(RoleSpec(name, "value_model", str(directory), trained_head=True))
        return cls(session, components)

    def score(self, rows: Sequence[Row]) -> RewardScores:
        """Return the scores of rows, in their order.

        Raises:
            RewardError: a score is not finite.
        """
        return RewardScores(
            {name: self._score(component, rows) for name, component in self.components.items()}
        )

    def _score(self, component: RewardComponent, rows: Sequence[Row]) -> ComponentScores:
        if not rows:
            return ComponentScores(torch.zeros(0), torch.zeros(0))
        members = torch.stack(
            [
                self.session.scores(_role(component.name, index), rows)
                for index in range(len(component.member_dirs))
            ]
        )
        broken = int((~torch.isfinite(members)).any(dim=0).sum())
        if broken:
            raise RewardError(
                f"The reward model gives {broken} of {len(rows)} rows a score that is not finite",
                "finite scores",
                "look at the run that trained it, or use another reward model",
            )
        return combine_members(members, component.mean, component.std)


def combine_members(members: Tensor, mean: float, std: float) -> ComponentScores:
    """Average the scores of members.

    Args:
        members: (K, N) raw scores.
        mean: of the averaged scores over the training responses.
        std: of the same.
    """
    raw = members.mean(dim=0)
    disagreement = None
    if len(members) > 1:
        # A Bradley-Terry score has a free offset, which is no disagreement.
        centred = members - members.mean(dim=1, keepdim=True)
        disagreement = centred.std(dim=0) / std
    return ComponentScores((raw - mean) / std, raw, disagreement)


def _role(component: str, index: int) -> str:
    return f"reward-{component}-{index}"
