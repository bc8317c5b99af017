"""Preference labels of which some are wrong: how far to trust them, and a loss that allows for
it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.checks import check_finite, check_in_range, check_rank
from tasks.errors import DataError

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-10, 2.0**10
_GRID_POINTS, _REFINEMENTS = 81, 60
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def label_trust(margins: Tensor, *, flip_rate: float) -> Tensor:
    """Return the probability that a label is right, by Bayes' rule.

    With flip rate e and the odds that a member gives, which never saw the pair, ``P(chosen is
    better) = sigmoid(m)``::

        P(label right | m) = (1 - e) sigmoid(m) / ((1 - e) sigmoid(m) + e sigmoid(-m))
                           = sigmoid(m + log((1 - e) / e))

    Args:
        margins: ``(P,)`` chosen minus rejected score in nats, of the true preference.
        flip_rate: share of wrong labels, above 0 and below 0.5.

    Returns:
        ``(P,)`` fp32, from 0 to 1.

    Raises:
        ConfigError: a flip rate outside its bounds. TrainingError: a margin that is not finite.
    """
    checked = _checked(margins, flip_rate)
    prior = math.log((1.0 - flip_rate) / flip_rate)
    return torch.sigmoid(checked + prior).float()


def noisy_log_loss(margins: Tensor, *, flip_rate: float, scale: float = 1.0) -> float:
    """Return the mean loss of labels of which a share is wrong (forward correction, Patrini et al.
    2017)::

        -log((1 - e) sigmoid(scale m) + e sigmoid(-scale m))

    Unlike the plain log loss it is bounded by -log e: a confident model does not pay without limit
    for labels that are wrong.

    Args:
        margins: ``(P,)``, P at least 1.
        flip_rate: e, above 0 and below 0.5.
        scale: what margins are multiplied by.
    """
    scaled = _checked(margins, flip_rate) * scale
    right, wrong = math.log(1.0 - flip_rate), math.log(flip_rate)
    return float(-torch.logaddexp(right + logsigmoid(scaled), wrong + logsigmoid(-scaled)).mean())


def fit_noisy_scale(margins: Tensor, *, flip_rate: float) -> float:
    """Return the scale that minimises `noisy_log_loss`, from 1/1024 to 1024.

    The loss need not be convex in the scale: the best point of a logarithmic grid is refined by
    golden-section search between its neighbours.

    Args:
        margins: ``(P,)``, P at least 1, of pairs that the model was not trained on.
    """
    low, high = math.log2(_SMALLEST_SCALE), math.log2(_LARGEST_SCALE)
    step = (high - low) / (_GRID_POINTS - 1)

    def loss(exponent: float) -> float:
        """Return the log loss at the scale 2^exponent."""
        return noisy_log_loss(margins, flip_rate=flip_rate, scale=2.0**exponent)

    best = min((low + k * step for k in range(_GRID_POINTS)), key=loss)
    left, right = max(low, best - step), min(high, best + step)
    for _ in range(_REFINEMENTS):
        inner = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        if loss(inner[0]) <= loss(inner[1]):
            right = inner[1]
        else:
            left = inner[0]
    return float(2.0 ** (0.5 * (left + right)))


def fitted_log_loss(margins: Tensor, *, flip_rate: float) -> float:
    """Return `noisy_log_loss` at the scale that suits the margins best: what no temperature mends.

    It compares models whose scores differ in unit, as those of one run do whose margins grow from
    step to step or were kept small by smoothed labels.

    Args:
        margins: ``(P,)``, P at least 1, of pairs that the model was not trained on.
        flip_rate: share of wrong labels, above 0 and below 0.5.
    """
    scale = fit_noisy_scale(margins, flip_rate=flip_rate)
    return noisy_log_loss(margins, flip_rate=flip_rate, scale=scale)


def _checked(margins: Tensor, flip_rate: float) -> Tensor:
    check_rank("margins", margins, 1)
    if margins.numel() == 0:
        raise DataError("There are no margins", "at least one pair", "give pairs that have scores")
    check_finite("margins", margins)
    check_in_range("flip_rate", flip_rate, 1e-9, 0.5 - 1e-9)
    return margins.detach().double()
