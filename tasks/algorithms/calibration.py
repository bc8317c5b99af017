"""How far a reward model's accuracy and confidence can be trusted, from the margins of its pairs.

A margin is ``m = r_chosen - r_rejected`` in raw scores, so that ``sigmoid(m)`` is the probability
that chosen wins. All computations are in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tasks.algorithms.masking import check_count, check_finite, check_in_range, check_rank
from tasks.errors import DataError

_Z_95: Final = 1.959963984540054
# With a temperature this many times the largest margin every confidence is 0.5 to 6 decimals.
_FLAT: Final = 1e6
_HALVINGS: Final = 60

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


def wilson_interval(correct: float, n: int, z: float = _Z_95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (1927), 95 % by default.

    With ``p = correct / n``::

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    A tie enters as half a success, so ``correct`` may end in .5. Half credits spread less than the
    successes and failures that the formula assumes, so with ties the interval is a little too wide.

    Raises:
        DataError: no trials.
        ConfigError: ``correct`` is not between 0 and n.
    """
    check_count("n", n)
    check_in_range("correct", correct, 0.0, float(n))
    p, ratio = correct / n, z * z / n
    centre = (p + ratio / 2.0) / (1.0 + ratio)
    half = z * math.sqrt(p * (1.0 - p) / n + ratio / (4.0 * n)) / (1.0 + ratio)
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def pair_accuracy(margins: Tensor) -> Accuracy:
    """Return the accuracy of pairs, ties as halves, with Wilson's 95 % interval.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    credit = _credit(_checked(margins))
    n = int(credit.numel())
    correct = float(credit.sum())
    low, high = wilson_interval(correct, n)
    return Accuracy(correct / n, low, high, int((credit == 0.5).sum()), n)


def pair_log_loss(margins: Tensor, temperature: float = 1.0) -> float:
    """Return the mean of ``-log sigmoid(m / T)`` in nats; log 2 = 0.693 is chance.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    return float(softplus(-_checked(margins) / temperature).mean())


def reliability_bins(
    margins: Tensor, temperature: float = 1.0, n_bins: int = 10
) -> list[ReliabilityBin]:
    """Group pairs by confidence, in bins of equal width from 0.5 to 1; empty bins are left out.

    Which response is called chosen is known to the reader and not to the model, so the model's
    confidence is that of the side it prefers: ``c = sigmoid(|m| / T)``, at least 0.5. The pair
    counts as right (1) where ``m > 0``, wrong (0) where ``m < 0`` and half where ``m = 0``. Bin k
    holds ``0.5 + k w <= c < 0.5 + (k + 1) w`` with ``w = 0.5 / n_bins``; the last holds 1 too.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    check_count("n_bins", n_bins)
    checked = _checked(margins)
    confidence = torch.sigmoid(checked.abs() / temperature)
    credit = _credit(checked)
    edges = [0.5 + 0.5 * k / n_bins for k in range(n_bins + 1)]
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    place = torch.bucketize(confidence, inner, right=True)
    bins = []
    for k in range(n_bins):
        members = place == k
        if bool(members.any()):
            mean_confidence = float(confidence[members].mean())
            accuracy = float(credit[members].mean())
            count = int(members.sum())
            bins.append(ReliabilityBin(edges[k], edges[k + 1], count, mean_confidence, accuracy))
    return bins


def expected_calibration_error(
    margins: Tensor, temperature: float = 1.0, n_bins: int = 10
) -> float:
    """Return ``sum_k count_k / P |accuracy_k - confidence_k|`` (Naeini et al. 2015).

    The bins are those of `reliability_bins`; 0 is calibrated, 0.5 the worst possible value for
    confidences of at least one half.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    bins = reliability_bins(margins, temperature, n_bins)
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total


def fit_temperature(margins: Tensor) -> Temperature:
    """Return the T that minimises the mean of ``-log sigmoid(m / T)`` (Guo et al. 2017).

    The loss is convex in ``b = 1 / T``, and its derivative ``mean(-m sigmoid(-b m))`` rises; its
    zero is bracketed by doubling and then halved to the precision of fp64. Fit on pairs that the
    model was not trained on and that it is not reported on.

    Args:
        margins: ``(P,)``, P at least 1.
    """
    checked = _checked(margins)
    largest = float(checked.abs().max())
    if largest == 0.0:
        return Temperature(1.0, "all_tied")
    if float(checked.min()) >= 0.0:
        return Temperature(1.0, "all_right")
    # In units of the largest margin nothing under- or overflows.
    scaled = checked / largest

    def slope(b: float) -> float:
        """Return the derivative of the log loss by the scale b."""
        return float((-scaled * torch.sigmoid(-b * scaled)).mean())

    if slope(1.0 / _FLAT) >= 0.0:
        return Temperature(_FLAT * largest, "not_better_than_chance")
    return Temperature(largest / _rising_zero(slope, 1.0 / _FLAT), "fitted")


def _rising_zero(slope: Callable[[float], float], start: float) -> float:
    """Return where a rising function, negative at ``start`` and positive far out, is zero."""
    low, high = start, 2.0 * start
    while slope(high) < 0.0:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if slope(middle) < 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _credit(margins: Tensor) -> Tensor:
    """Return 1 where chosen scores higher, 0 where rejected does, 0.5 at a tie."""
    return 0.5 + 0.5 * torch.sign(margins)


def _checked(margins: Tensor) -> Tensor:
    check_rank("margins", margins, 1)
    if margins.numel() == 0:
        raise DataError("There are no margins", "at least one pair", "give pairs that have scores")
    check_finite("margins", margins)
    return margins.detach().double()
