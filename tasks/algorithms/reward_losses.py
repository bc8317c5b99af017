"""Pairwise losses and accuracy of a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.algorithms.checks import (
    check_count,
    check_finite,
    check_float,
    check_in_range,
    check_rank,
    check_shape,
)
from tasks.algorithms.masking import sanitize
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
