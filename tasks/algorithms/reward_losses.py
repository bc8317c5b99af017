"""Pairwise losses and accuracy of a reward model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.masking import (
    check_count,
    check_finite,
    check_float,
    check_in_range,
    check_rank,
    check_shape,
    sanitize,
)
from tasks.errors import DataError


@dataclass(frozen=True)
class PairRegularization:
    """Hold the two regularizers of the pairwise loss.

    Attributes:
        label_smoothing: assumed share of flipped labels, from 0 to 0.5.
        center_coef: weight of ``(chosen + rejected)^2``, which pins the scores' free offset near 0.
    """

    label_smoothing: float = 0.0
    center_coef: float = 0.0

    def __post_init__(self) -> None:
        check_in_range("label_smoothing", self.label_smoothing, 0.0, 0.5)
        check_in_range("center_coef", self.center_coef, 0.0, 1e6)


class PairTargets(NamedTuple):
    """Hold what is known of each of P pairs beside its label.

    Attributes:
        weights: ``(P,)``, at least 0; a pair of weight 0 is padding and may hold anything. None =
            all 1.
        margins: ``(P,)`` inside the sigmoid; None or NaN = no margin known = 0.
        trust: ``(P,)`` probability that the label is right, from 0 to 1; None = 1.
    """

    weights: Tensor | None = None
    margins: Tensor | None = None
    trust: Tensor | None = None


class PairwiseAccuracy(NamedTuple):
    """Hold counts that add up over batches.

    Attributes:
        correct_sum: pairs ranked right, a tie counted as a half.
        tie_sum: pairs with two equal scores.
        n_pairs: all pairs.
    """

    correct_sum: Tensor
    tie_sum: Tensor
    n_pairs: Tensor

    @property
    def accuracy(self) -> Tensor:
        """Return ``correct_sum / n_pairs``."""
        return self.correct_sum / self.n_pairs


def split_interleaved(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Split scores laid out chosen, rejected, chosen, rejected, ... into two.

    Args:
        scores: ``(2P,)``.

    Returns:
        chosen ``(P,)`` and rejected ``(P,)``.

    Raises:
        DataError: an odd number of scores.
    """
    check_rank("scores", scores, 1)
    if scores.shape[0] % 2:
        raise DataError(
            f"{scores.shape[0]} interleaved scores",
            "an even number: chosen and rejected of each pair side by side",
            "keep both responses of a pair in one batch",
        )
    return scores[0::2], scores[1::2]


def pairwise_accuracy(
    chosen: Tensor, rejected: Tensor, pair_mask: Tensor | None = None
) -> PairwiseAccuracy:
    """Count the pairs whose chosen score is the higher one; a tie counts a half and is reported.

    Args:
        chosen, rejected: ``(P,)`` scores, best in fp32: bf16 turns close scores into ties.
        pair_mask: ``(P,)`` bool, True = the pair counts.
    """
    check_rank("chosen", chosen, 1)
    check_shape("rejected", rejected, chosen.shape)
    mask = torch.ones_like(chosen, dtype=torch.bool) if pair_mask is None else pair_mask
    gap = sanitize(chosen.detach().float() - rejected.detach().float(), mask)
    check_finite("score differences", gap)
    ties = ((gap == 0) & mask).sum().float()
    wins = ((gap > 0) & mask).sum().float()
    return PairwiseAccuracy(wins + 0.5 * ties, ties, mask.sum().float())


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    total_pairs: float,
    targets: PairTargets | None = None,
    regularization: PairRegularization | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the Bradley-Terry loss of score pairs (1952; with margins: Touvron et al. 2023).

    With ``d = chosen - rejected``, margin m, smoothing s and trust q, ``p = (1 - s) q + s (1 -
    q)``::

        loss = sum_i w_i * (-p_i log sigmoid(d - m) - (1 - p_i) log sigmoid(-d - m) + center (chosen
        + rejected)^2) / total_pairs

    Whichever response is the better one has to win by the margin.

    The sum over micro-batches and ranks is the loss of the whole step.

    Args:
        chosen, rejected: ``(P,)`` scores.
        total_pairs: pairs (with weights: sum of weights) of the whole step.
        targets: weights, margins and trust; None = all pairs alike.
        regularization: label smoothing and centring; None = neither.

    Returns:
        the loss and ``loss_sum``, ``correct_sum``, ``tie_sum``, ``gap_sum``, ``chosen_score_sum``,
        ``rejected_score_sum``, ``score_sq_sum`` (all unweighted but the first), ``n_pairs``,
        ``weight_sum``.

    Raises:
        DataError: shapes that differ, a negative weight, a trust outside 0 to 1, a total that is
            not above 0.
        TrainingError: a score that is not finite.
    """
    check_count("total_pairs", total_pairs)
    known = targets or PairTargets()
    pair_weights = _pair_weights(chosen, known.weights)
    mask = pair_weights > 0
    better, worse = (
        _checked_scores("chosen", chosen, mask),
        _checked_scores("rejected", rejected, mask),
    )
    gap, margin = better - worse, _known_margin(known.margins, mask)
    terms = regularization or PairRegularization()
    right = _label_probability(known.trust, terms.label_smoothing, mask)
    pair_loss = -right * logsigmoid(gap - margin) - (1.0 - right) * logsigmoid(-gap - margin)
    pair_loss = pair_loss + terms.center_coef * (better + worse).square()
    loss_sum = (pair_weights * sanitize(pair_loss, mask)).sum()
    metrics = _pair_metrics(better.detach(), worse.detach(), mask)
    metrics["loss_sum"] = loss_sum.detach()
    metrics["weight_sum"] = pair_weights.sum()
    return loss_sum / total_pairs, metrics


def _pair_weights(chosen: Tensor, weights: Tensor | None) -> Tensor:
    check_rank("chosen", chosen, 1)
    if weights is None:
        return torch.ones_like(chosen, dtype=torch.float32)
    check_shape("weights", weights, chosen.shape)
    check_finite("weights", weights)
    if bool((weights < 0).any()):
        raise DataError(
            f"a pair weight of {float(weights.min())}",
            "weights of at least 0",
            "clip the weights at 0",
        )
    return weights.detach().float()


def _checked_scores(name: str, scores: Tensor, mask: Tensor) -> Tensor:
    check_float(name, scores)
    check_shape(name, scores, mask.shape)
    check_finite(name, scores, mask)
    return sanitize(scores, mask)


def _known_margin(margin: Tensor | None, mask: Tensor) -> Tensor:
    if margin is None:
        return torch.zeros(mask.shape, device=mask.device)
    check_shape("margin", margin, mask.shape)
    known = mask & ~torch.isnan(margin)
    check_finite("margin", margin, known)
    return sanitize(margin.detach().float(), known)


def _label_probability(trust: Tensor | None, smoothing: float, mask: Tensor) -> Tensor:
    if trust is None:
        return torch.full(mask.shape, 1.0 - smoothing, device=mask.device)
    check_shape("trust", trust, mask.shape)
    check_finite("trust", trust, mask)
    known = sanitize(trust.detach().float(), mask)
    if bool(((known < 0) | (known > 1)).any()):
        raise DataError(
            f"a label trust from {float(known.min())} to {float(known.max())}",
            "probabilities, from 0 to 1",
            "compute the trust with label_trust",
        )
    return (1.0 - smoothing) * known + smoothing * (1.0 - known)


def _pair_metrics(chosen: Tensor, rejected: Tensor, mask: Tensor) -> dict[str, Tensor]:
    accuracy = pairwise_accuracy(chosen, rejected, mask)
    return {
        "correct_sum": accuracy.correct_sum,
        "tie_sum": accuracy.tie_sum,
        "gap_sum": (chosen - rejected).sum(),
        "chosen_score_sum": chosen.sum(),
        "rejected_score_sum": rejected.sum(),
        "score_sq_sum": (chosen.square() + rejected.square()).sum(),
        "n_pairs": accuracy.n_pairs,
    }


# Preference labels of which some are wrong: how far to trust them, and a loss that allows for
# it.

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
