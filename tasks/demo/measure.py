"""Measurements with the oracle; nothing that trains imports this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tasks.algorithms.reward_losses import pairwise_accuracy
from tasks.data.hh import Message, Pair
from tasks.demo.oracle import is_good


def _messages(prompt: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt]


def good_rate(prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> float:
    """Return the share of responses that the oracle calls good."""
    verdicts = [is_good(_messages(p), r) for p, r in zip(prompts, responses, strict=True)]
    return sum(verdicts) / len(verdicts)


def clean_accuracy(pairs: Sequence[Pair], chosen: Tensor, rejected: Tensor) -> float:
    """Return how often the truly good response scores higher, whatever the label said; ties count
    half.

    Args:
        pairs: P pairs of the demo world, some with flipped labels.
        chosen: (P,) scores of the responses labelled chosen.
        rejected: (P,) scores of the others.
    """
    flipped = torch.tensor([not is_good(_messages(pair.prompt), pair.chosen) for pair in pairs])
    good = torch.where(flipped, rejected, chosen)
    bad = torch.where(flipped, chosen, rejected)
    return float(pairwise_accuracy(good, bad).accuracy)
