"""Labels that models which did not see them contradict: cross-fitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tasks.algorithms.label_noise import fit_noisy_scale, label_trust
from tasks.algorithms.reward_losses import split_interleaved
from tasks.backends.labelled_pairs import LabelledPairs
from tasks.backends.reward_training import ROLE, MemberTrainer
from tasks.backends.roles import RoleSpec
from tasks.backends.trajectories import response_rows
from tasks.data.pairs import fold_of
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError


@dataclass(frozen=True)
class CrossFit:
    """What held-out members say of P pairs.

    Args:
        margins: (P,) chosen minus rejected score of the member that did not see the pair, scaled to
            nats.
        trust: (P,) probability that the label is right.
        members: model of each fold.
    """

    margins: Tensor
    trust: Tensor
    members: tuple[Path, ...]

    @property
    def contradicted_share(self) -> float:
        """Share of pairs whose label the held-out member ranks the other way."""
        return float((self.margins < 0).float().mean())


def cross_fit(
    trainer: MemberTrainer,
    component: str,
    seed: int,
    train: LabelledPairs,
    validation: Sequence[RenderedPair],
) -> CrossFit:
    """Train a member per fold on all other folds and let it judge the labels of its own.

    All pairs of a prompt are in one fold.

    Raises:
        DataError: a fold without pairs.
    """
    noise = trainer.cfg.noise
    folds = [fold_of(pair.prompt_id, noise.folds) for pair in train.pairs]
    margins = torch.zeros(len(folds))
    members = []
    for fold in range(noise.folds):
        own = [i for i, found in enumerate(folds) if found == fold]
        others = [i for i, found in enumerate(folds) if found != fold]
        if not own or not others:
            raise DataError(
                f"{len(folds)} pairs of component {component!r} leave fold {fold} of "
                f"{noise.folds} without prompts",
                "prompts in every fold",
                "lower reward_model.noise.folds, set noise.method: none, or ingest more pairs",
            )
        name = f"{component}.fold-{fold}"
        directory = trainer.fit(name, seed, train.subset(others), validation)
        session = trainer.session
        session.load(RoleSpec(ROLE, "value_model", str(directory), trained_head=True))
        held_out = response_rows([train.pairs[i] for i in own])
        chosen, rejected = split_interleaved(session.scores(ROLE, held_out))
        gap = chosen - rejected
        margins[own] = gap * fit_noisy_scale(gap, flip_rate=noise.flip_rate)
        members.append(directory)
    return CrossFit(margins, label_trust(margins, flip_rate=noise.flip_rate), tuple(members))


def with_trust(train: LabelledPairs, trust: Tensor, method: str) -> LabelledPairs:
    """Return the pairs with their trust as weights (``downweight``), as soft labels (``soften``),
    or with the label swapped where it is less likely right than wrong (``relabel``)."""
    if method == "downweight":
        # A weight of 0 would mean padding.
        return replace(train, weights=trust.clamp(min=1e-4))
    if method == "soften":
        return replace(train, trust=trust)
    return replace(train, trust=(trust >= 0.5).float())
