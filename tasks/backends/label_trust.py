"""Labels that models which did not see them contradict: cross-fitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasks.algorithms.calibration import fit_temperature
from tasks.algorithms.label_noise import label_trust
from tasks.algorithms.reward_losses import split_interleaved
from tasks.backends.reward_training import ROLE, LabelledPairs, MemberTrainer
from tasks.backends.roles import RoleSpec
from tasks.backends.trajectories import response_rows
from tasks.data.pairs import fold_of
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError


@dataclass(frozen=True)
class CrossFit:
    """What held-out members say of P pairs.

    Args:
        margins: (P,) chosen minus rejected score, calibrated, in nats, of the member that did not
            see the pair.
        trust: (P,) probability that the label is right.
    """

    margins: Tensor
    trust: Tensor

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
        name = f"{component}-fold-{fold}"
        directory = trainer.fit(name, seed, train.subset(others), validation)
        session = trainer.session
        session.load(RoleSpec(ROLE, "value_model", str(directory), trained_head=True))
        held_out = response_rows([train.pairs[i] for i in own])
        chosen, rejected = split_interleaved(session.scores(ROLE, held_out))
        gap = chosen - rejected
        margins[own] = gap / fit_temperature(gap).value
    return CrossFit(margins, label_trust(margins, flip_rate=noise.flip_rate))


def with_trust(train: LabelledPairs, found: CrossFit, method: str) -> LabelledPairs:
    """Return the pairs with weights (``downweight``) or soft labels (``relabel``) of their
    trust."""
    if method == "downweight":
        # A weight of 0 would mean padding.
        return replace(train, weights=found.trust.clamp(min=1e-4))
    return replace(train, trust=found.trust)
