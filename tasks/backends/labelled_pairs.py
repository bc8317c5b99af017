"""Pairs to learn a reward from, with what is known of each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.backends.roles import Batch
from tasks.backends.trajectories import response_rows
from tasks.data.rendering import RenderedPair


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs to learn from.

    Args:
        pairs: P pairs.
        weights: (P,) above 0, or None for all 1.
        trust: (P,) probability that the label is right, or None for 1.
        margins: (P,) rated margin, NaN where unknown, or None.
    """

    pairs: Sequence[RenderedPair]
    weights: Tensor | None = None
    trust: Tensor | None = None
    margins: Tensor | None = None

    def subset(self, indices: Sequence[int]) -> LabelledPairs:
        """Return the pairs at these indices."""
        chosen = list(indices)
        return LabelledPairs(
            [self.pairs[i] for i in chosen],
            *(
                None if column is None else column[chosen]
                for column in (self.weights, self.trust, self.margins)
            ),
        )

    def batch(self, units: Sequence[int]) -> Batch:
        """Return interleaved rows of these pairs, with what is known of each."""
        part = self.subset(units)
        known = {"weight": part.weights, "trust": part.trust, "margin": part.margins}
        columns = {
            name: [value.float().reshape(1) for value in values for _ in range(2)]
            for name, values in known.items()
            if values is not None
        }
        scalars = {} if part.weights is None else {"total_weight": float(part.weights.sum())}
        return Batch(response_rows(part.pairs), columns, group_size=2, scalars=scalars)


def rated_margins(margins: Sequence[float | None], scale: float) -> Tensor | None:
    """Return scaled margins, (P,), NaN where unknown; None where they are off or none is known."""
    if scale == 0.0 or all(margin is None for margin in margins):
        return None
    return torch.tensor([math.nan if m is None else scale * m for m in margins])
