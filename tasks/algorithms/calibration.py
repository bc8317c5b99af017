"""How far a reward model's accuracy and confidence can be trusted, from the margins of its pairs.

A margin is ``m = r_chosen - r_rejected`` in raw scores, so that ``sigmoid(m)`` is the probability
that chosen wins. All computations are in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit

from tasks.algorithms.statistics import Column, wilson_interval
from tasks.errors import TrainingError

# With a temperature this many times the largest margin every confidence is 0.5 to 6 decimals.
_FLAT: Final = 1e6
_BINS: Final = 10

FitOutcome = Literal["fitted", "all_right", "not_better_than_chance", "all_tied"]


class Accuracy(NamedTuple):
    """Hold the accuracy of n pairs.

    Attributes:
        value: pairs ranked right over n, a tie counted as a half.
        low, high: 95 % interval.
        n_ties: pairs with two equal scores.
    """

    value: float
    low: float
    high: float
    n_ties: int
    n: int


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs of similar confidence.

    Attributes:
        low, high: edges of the bin.
        count: pairs in it, at least 1.
        confidence: their mean confidence.
        accuracy: share ranked right, a tie counted as a half.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Temperature:
    """What margins are divided by.

    Attributes:
        value: above 0.
        outcome: ``fitted``; ``all_right`` (no pair is ranked wrong: every lower temperature has a
            lower loss, so there is no best one and the value is 1); ``not_better_than_chance`` (the
            mean margin is not above 0: the higher the better, and the value makes every confidence
            one half); ``all_tied`` (every temperature gives the same loss, the value is 1).
    """

    value: float
    outcome: FitOutcome


def pair_accuracy(margins: ArrayLike) -> Accuracy:
    """Return the accuracy of pairs, ties as halves, with Wilson's 95 % interval.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    credit = _credit(_finite(margins))
    n, correct = len(credit), float(credit.sum())
    return Accuracy(correct / n, *wilson_interval(correct, n), int((credit == 0.5).sum()), n)


def pair_log_loss(margins: ArrayLike, temperature: float = 1.0) -> float:
    """Return the mean of ``-log sigmoid(m / T)`` in nats; log 2 = 0.693 is chance.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    return float(np.logaddexp(0.0, -_finite(margins) / temperature).mean())


def reliability_bins(margins: ArrayLike, temperature: float = 1.0) -> list[ReliabilityBin]:
    """Group pairs by confidence, in ten bins of equal width from 0.5 to 1; empty ones are left out.

    Which response is called chosen is known to the reader and not to the model, so the model's
    confidence is that of the side it prefers: ``c = sigmoid(|m| / T)``, at least 0.5. The pair
    counts as right (1) where ``m > 0``, wrong (0) where ``m < 0`` and half where ``m = 0``; so
    scikit-learn's `calibration_curve`, which takes right and wrong alone, does not do. Bin k holds
    ``0.5 + k w <= c < 0.5 + (k + 1) w`` with ``w = 0.05``; the last holds 1 too.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    checked = _finite(margins)
    confidence, credit = expit(np.abs(checked) / temperature), _credit(checked)
    edges = [0.5 + 0.5 * k / _BINS for k in range(_BINS + 1)]
    place = np.digitize(confidence, edges[1:-1])
    return [
        ReliabilityBin(
            low=edges[k],
            high=edges[k + 1],
            count=int((place == k).sum()),
            confidence=float(confidence[place == k].mean()),
            accuracy=float(credit[place == k].mean()),
        )
        for k in np.unique(place).tolist()
    ]


def expected_calibration_error(margins: ArrayLike, temperature: float = 1.0) -> float:
    """Return ``sum_k count_k / P |accuracy_k - confidence_k|`` (Naeini et al. 2015).

    The bins are those of `reliability_bins`; 0 is calibrated, 0.5 the worst possible value for
    confidences of at least one half.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    bins = reliability_bins(margins, temperature)
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total


def fit_temperature(margins: ArrayLike) -> Temperature:
    """Return the T that minimises the mean of ``-log sigmoid(m / T)`` (Guo et al. 2017).

    The loss is convex in ``b = 1 / T``, and its derivative ``mean(-m sigmoid(-b m))`` rises. Fit on
    pairs that the model was not trained on and that it is not reported on.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    checked = _finite(margins)
    largest = float(np.abs(checked).max())
    if largest == 0.0:
        return Temperature(1.0, "all_tied")
    if checked.min() >= 0.0:
        return Temperature(1.0, "all_right")
    # In units of the largest margin nothing under- or overflows.
    scaled = checked / largest

    def slope(b: float) -> float:
        """Return the derivative of the log loss by the scale b."""
        return float((-scaled * expit(-b * scaled)).mean())

    if slope(1.0 / _FLAT) >= 0.0:
        return Temperature(_FLAT * largest, "not_better_than_chance")
    high = 1.0
    while slope(high) < 0.0:
        high *= 2.0
    scale = brentq(slope, 1.0 / _FLAT, high, xtol=1e-300, rtol=1e-15, maxiter=1000)
    return Temperature(largest / scale, "fitted")


def _credit(margins: Column) -> Column:
    """Return 1 where chosen scores higher, 0 where rejected does, 0.5 at a tie."""
    return 0.5 + 0.5 * np.sign(margins)


def _finite(margins: ArrayLike) -> Column:
    checked = np.asarray(margins, np.float64)
    assert checked.ndim == 1 and len(checked), f"margins of shape {checked.shape}"
    bad = int((~np.isfinite(checked)).sum())
    if bad:
        raise TrainingError(
            f"{bad} of {len(checked)} margins are not finite",
            "finite scores",
            "look at the reward model that gave them",
        )
    return checked
