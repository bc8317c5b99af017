"""Pairwise losses and accuracy of a reward model, and labels of which some are wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.masking import check_finite, real_only
from tasks.errors import DataError


def split_interleaved(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Split scores laid out chosen, rejected, chosen, rejected, ... into two.

    Args:
        scores: ``(2P,)``.

    Returns:
        chosen ``(P,)`` and rejected ``(P,)``.
    """
    assert scores.dim() == 1 and len(scores) % 2 == 0
    return scores[0::2], scores[1::2]


def pairwise_accuracy(chosen: Tensor, rejected: Tensor) -> tuple[float, float]:
    """Return the share of pairs whose chosen score is the higher one, and the share of ties, each
    of which counts a half in the first.

    Args:
        chosen, rejected: ``(P,)`` scores, best in fp32: bf16 turns close scores into ties.
    """
    gap = chosen.float() - rejected.float()
    ties, wins = (gap == 0).sum().float(), (gap > 0).sum().float()
    return float((wins + 0.5 * ties) / len(gap)), float(ties / len(gap))


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    total_pairs: float,
    weights: Tensor | None = None,
    margins: Tensor | None = None,
    trust: Tensor | None = None,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the Bradley-Terry loss of score pairs (1952; with margins: Touvron et al. 2023).

    With ``d = chosen - rejected``, margin m, smoothing s and trust q, ``p = (1 - s) q + s (1 -
    q)``::

        loss = sum_i w_i * (-p_i log sigmoid(d - m) - (1 - p_i) log sigmoid(-d - m) + center (chosen
        + rejected)^2) / total_pairs

    Whichever response is the better one has to win by the margin. The sum over micro-batches and
    ranks is the loss of the whole step. A score that is not finite makes the loss NaN.

    Args:
        chosen, rejected: ``(P,)`` scores.
        total_pairs: pairs (with weights: sum of weights) of the whole step.
        weights: ``(P,)``, at least 0; a pair of weight 0 is padding and may hold anything. None =
            all 1.
        margins: ``(P,)`` inside the sigmoid; None or NaN = no margin known = 0.
        trust: ``(P,)`` probability that the label is right, from 0 to 1; None = 1.
        label_smoothing: assumed share of flipped labels.
        center_coef: weight of ``(chosen + rejected)^2``, which pins the scores' free offset near 0.

    Returns:
        the loss and ``loss_sum``, ``correct_sum``, ``tie_sum``, ``gap_sum``, ``chosen_score_sum``,
        ``rejected_score_sum``, ``score_sq_sum`` (all unweighted but the first), ``n_pairs``,
        ``weight_sum``.
    """
    weight = torch.ones_like(chosen, dtype=torch.float32) if weights is None else weights.float()
    mask = weight > 0
    better, worse = real_only(chosen, mask), real_only(rejected, mask)
    gap = better - worse
    margin = 0.0 if margins is None else real_only(margins, mask & ~torch.isnan(margins))
    right = torch.full_like(gap, 1.0 - label_smoothing)
    if trust is not None:
        known = real_only(trust, mask)
        right = (1.0 - label_smoothing) * known + label_smoothing * (1.0 - known)
    pair_loss = -right * logsigmoid(gap - margin) - (1.0 - right) * logsigmoid(-gap - margin)
    pair_loss = pair_loss + center_coef * (better + worse).square()
    loss_sum = (weight * pair_loss).sum()

    better, worse, gap = better.detach(), worse.detach(), gap.detach()
    ties = ((gap == 0) & mask).sum().float()
    return loss_sum / total_pairs, {
        "correct_sum": (gap > 0).sum().float() + 0.5 * ties,
        "tie_sum": ties,
        "gap_sum": gap.sum(),
        "chosen_score_sum": better.sum(),
        "rejected_score_sum": worse.sum(),
        "score_sq_sum": (better.square() + worse.square()).sum(),
        "n_pairs": mask.sum().float(),
        "loss_sum": loss_sum.detach(),
        "weight_sum": weight.sum(),
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
    """
    prior = math.log((1.0 - flip_rate) / flip_rate)
    return torch.sigmoid(margins.double() + prior).float()


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

    Raises:
        DataError: no margin. TrainingError: a margin that is not finite.
    """
    return _noisy_log_loss(_checked(margins), flip_rate, scale)


def fit_noisy_scale(margins: Tensor, *, flip_rate: float) -> float:
    """Return the scale that minimises `noisy_log_loss`, from 1/1024 to 1024; errors as there.

    The loss need not be convex in the scale: the best point of a logarithmic grid is refined by
    golden-section search between its neighbours.

    Args:
        margins: ``(P,)``, P at least 1, of pairs that the model was not trained on.
    """
    checked = _checked(margins)
    low, high = math.log2(_SMALLEST_SCALE), math.log2(_LARGEST_SCALE)
    step = (high - low) / (_GRID_POINTS - 1)

    def loss(exponent: float) -> float:
        """Return the log loss at the scale 2^exponent."""
        return _noisy_log_loss(checked, flip_rate, 2.0**exponent)

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


def _noisy_log_loss(margins: Tensor, flip_rate: float, scale: float) -> float:
    scaled = margins * scale
    right, wrong = math.log(1.0 - flip_rate), math.log(flip_rate)
    return float(-torch.logaddexp(right + logsigmoid(scaled), wrong + logsigmoid(-scaled)).mean())


def _checked(margins: Tensor) -> Tensor:
    if margins.numel() == 0:
        raise DataError("There are no margins", "at least one pair", "give pairs that have scores")
    check_finite("margins", margins)
    return margins.detach().double()
