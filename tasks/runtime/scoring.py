"""Scores of a trained reward model: the one way from rows to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.artifacts import RewardComponent, RewardModelCheckpoint
from tasks.errors import RewardError
from tasks.runtime.rows import RoleSpec, Row
from tasks.runtime.session import Session


@dataclass(frozen=True)
class ComponentScores:
    """Scores of N rows by one component.

    Args:
        members: (K, N) raw scores.
        means: (K,) of each member's scores over the training responses.
        std: of the averaged scores over the same.
    """

    members: Tensor
    means: Tensor
    std: float

    @classmethod
    def of(cls, component: RewardComponent, members: Tensor) -> ComponentScores:
        """Return the (K, N) scores with what is known of the component."""
        return cls(members, torch.tensor(component.member_means), component.std)

    @property
    def raw(self) -> Tensor:
        """(N,) average of the members."""
        return self.members.mean(dim=0)

    @property
    def total(self) -> Tensor:
        """(N,) in standard deviations of the training scores."""
        return (self.raw - self.means.mean()) / self.std

    @property
    def disagreement(self) -> Tensor | None:
        """(N,) standard deviation of the members' scores, each about its own training mean, in the
        unit of ``total``; None for one member."""
        if len(self.members) < 2:
            return None
        # A Bradley-Terry score has a free offset, which is no disagreement.
        return (self.members - self.means[:, None]).std(dim=0) / self.std

    @property
    def pair_disagreement(self) -> Tensor | None:
        """(N / 2,) standard deviation of the members' margins, for rows laid out chosen, rejected,
        chosen, ...; None for one member."""
        if len(self.members) < 2:
            return None
        return (self.members[:, 0::2] - self.members[:, 1::2]).std(dim=0)


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
        return cls.load_components(session, checkpoint.components)

    @classmethod
    def load_components(
        cls, session: Session, components: Mapping[str, RewardComponent]
    ) -> RewardScorer:
        """Put the members of these components into the workers."""
        for component in components.values():
            for index, directory in enumerate(component.member_dirs):
                name = _role(component.name, index)
                spec = RoleSpec(name, "value_model", str(directory), trained_head=True)
                if session.specs.get(name) != spec:
                    session.load(spec)
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
        n_members = len(component.member_dirs)
        members = torch.zeros(n_members, 0)
        if rows:
            roles = [_role(component.name, index) for index in range(n_members)]
            members = torch.stack([self.session.scores(role, rows) for role in roles])
        broken = int((~torch.isfinite(members)).any(dim=0).sum())
        if broken:
            raise RewardError(
                f"The reward model gives {broken} of {len(rows)} rows a score that is not finite",
                "finite scores",
                "look at the run that trained it, or use another reward model",
            )
        return ComponentScores.of(component, members)


def _role(component: str, index: int) -> str:
    return f"reward-{component}-{index}"
