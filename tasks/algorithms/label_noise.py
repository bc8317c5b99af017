"""How far a preference label can be trusted, when some are wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.algorithms.checks import check_finite, check_in_range, check_rank


def label_trust(margins: Tensor, *, flip_rate: float) -> Tensor:
    """Return the probability that a label is right, by Bayes' rule.

    With flip rate e and the odds that a member gives, which never saw the pair, ``P(chosen is
    better) = sigmoid(m)``::

        P(label right | m) = (1 - e) sigmoid(m) / ((1 - e) sigmoid(m) + e sigmoid(-m))
                           = sigmoid(m + log((1 - e) / e))

    Args:
        margins: ``(P,)`` chosen minus rejected score, calibrated, in nats.
        flip_rate: share of wrong labels, above 0 and below 0.5.

    Returns:
        ``(P,)`` fp32, from 0 to 1.

    Raises:
        ConfigError: a flip rate outside its bounds. TrainingError: a margin that is not finite.
    """
    check_rank("margins", margins, 1)
    check_finite("margins", margins)
    check_in_range("flip_rate", flip_rate, 1e-9, 0.5 - 1e-9)
    prior = math.log((1.0 - flip_rate) / flip_rate)
    return torch.sigmoid(margins.detach().double() + prior).float()
