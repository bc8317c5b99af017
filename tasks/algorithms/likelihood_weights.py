"""Weights of the policy gradients that have no proximal policy: TOPR, A-LoL, positives only."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_choice,
    check_finite,
    check_in_range,
    check_shape,
    check_token_values,
)
from tasks.algorithms.importance import LOG_RATIO_LIMIT, RatioLevel, sequence_log_ratio
from tasks.algorithms.masking import sanitize

LikelihoodKind = Literal["topr", "a_lol", "positives_only"]


def likelihood_weights(
    kind: LikelihoodKind,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float = 0.2,
) -> Tensor:
    """Return the weight w of `policy_losses.weighted_likelihood_loss`, without a gradient.

    With ``r = exp(log_ratio)`` of the current policy to the behaviour policy:

    - topr (Le Roux et al. 2025): 1 where ``A >= 0``, ``min(r, 1)`` where ``A < 0``
    - a_lol (Baheti et al. 2024): ``clip(r, 1 - c, 1 + c)`` where ``A > 0``, else 0
    - positives_only: 1 where ``A > 0``, else 0

    Args:
        kind: which of them.
        log_ratio: ``(B, T)`` in nats, the same for all tokens of a response unless it is taken
            token by token.
        advantages: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.
        clip_range: c of a_lol, from 0 to 1.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.

    Raises:
        TrainingError: a real log-ratio or advantage that is not finite.
    """
    check_choice("kind", kind, get_args(LikelihoodKind))
    check_in_range("clip_range", clip_range, 0.0, 1.0)
    check_token_values(mask, log_ratio=log_ratio, advantages=advantages)
    check_finite("log_ratio", log_ratio, mask)
    check_finite("advantages", advantages, mask)
    adv = sanitize(advantages.detach(), mask)
    one = torch.ones_like(adv)
    zero = torch.zeros_like(adv)
    if kind == "positives_only":
        weights = torch.where(adv > 0, one, zero)
    elif kind == "topr":
        faded = sanitize(log_ratio.detach(), mask).clamp(max=0.0).exp()
        weights = torch.where(adv < 0, faded, one)
    else:
        ratio = sanitize(log_ratio.detach(), mask).clamp(max=LOG_RATIO_LIMIT).exp()
        weights = torch.where(adv > 0, ratio.clamp(1.0 - clip_range, 1.0 + clip_range), zero)
    return sanitize(weights, mask)


def current_log_ratio(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, level: RatioLevel
) -> Tensor:
    """Return ``log(pi / mu)`` of the policy under training as ``(B, T)``, without a gradient.

    Args:
        logprobs: ``(B, T)`` of the current policy; behavior_logprobs: ``(B, T)`` of the writer.
        mask: ``(B, T)`` bool, True = a real response token.
        level: of `importance.sequence_log_ratio`; at sequence and geometric every token of a
            response gets the response's ratio.
    """
    ratio = sequence_log_ratio(logprobs.detach(), behavior_logprobs, mask, level=level)
    if level == "token":
        return ratio
    check_shape("log_ratio", ratio, mask.shape[:1])
    return sanitize(ratio.unsqueeze(1).expand(mask.shape), mask)
