"""How far a teacher and a reward model agree about responses."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.algorithms.checks import check_shape


def agreement_weights(teacher_margin: Tensor, rewards: Tensor) -> Tensor:
    """Weigh responses by how far teacher and reward model agree about them.

    With ``P = sigmoid(z)`` of either's opinion in standard deviations over the responses, the
    weight is ``P_T P_R + (1 - P_T)(1 - P_R)``, the chance that two judges who are right with these
    probabilities both call the response better, or both worse, than the average; scaled to mean 1.

    Args:
        teacher_margin: ``(N,)`` how much the teacher likes a response more than the base does;
            NaN = it wrote the response, and so likes it for certain.
        rewards: ``(N,)`` of the reward model.

    Returns:
        ``(N,)`` fp32.
    """
    check_shape("rewards", rewards, teacher_margin.shape)
    own = torch.isnan(teacher_margin)
    stored = teacher_margin[~own]
    likes = torch.ones_like(rewards, dtype=torch.float64)
    likes[~own] = _standardised(stored.double()).sigmoid()
    pays = _standardised(rewards.double()).sigmoid()
    weights = likes * pays + (1.0 - likes) * (1.0 - pays)
    return (weights / weights.mean()).float()


def _standardised(values: Tensor) -> Tensor:
    spread = values.std(unbiased=False) if values.numel() else torch.zeros(())
    return (values - values.mean()) / spread if float(spread) > 0.0 else torch.zeros_like(values)
