"""Log-probabilities, and what a sampler with a temperature and a nucleus really draws from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.errors import TrainingError

# In nats; a log-ratio is clamped to +- this, so that its exponential is finite.
LOG_RATIO_LIMIT = 20.0
# Probability mass by which a drawn token may lie outside the nucleus: the same logits, computed in
# another batch, differ in their last digits, and so may the token at the nucleus' border.
NUCLEUS_TOLERANCE = 1e-2


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``log softmax(logits / temperature)`` over the last dimension, in fp32.

    Args:
        logits: ``(..., V)``; temperature: above 0.
    """
    fp32 = logits.float()
    return torch.log_softmax(fp32 / temperature if temperature != 1.0 else fp32, dim=-1)


class SamplingLogprobs(NamedTuple):
    """What N draws were drawn from.

    Attributes:
        logprobs: ``(N,)`` log mu(token), nats, fp32.
        kl: ``(N,)`` KL(mu || softmax(logits)), nats, over the whole vocabulary.
    """

    logprobs: Tensor
    kl: Tensor


def sampling_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float, top_p: float
) -> SamplingLogprobs:
    """Return the log-probability of drawn tokens under the sampling distribution mu.

    ``mu = softmax(logits / temperature)``, cut to the nucleus (Holtzman et al. 2020) and
    renormalised: sorted from the most likely on, a token stays while the mass before it is below
    ``top_p``.

    Args:
        logits: ``(N, V)``, the state before each token.
        tokens: ``(N,)`` long, as drawn.
        temperature: above 0.
        top_p: above 0, at most 1.

    Raises:
        TrainingError: a token that mu cannot have drawn.
    """
    own = log_softmax(logits)
    mu = log_softmax(logits, temperature)
    if top_p < 1.0:
        mu = mu.masked_fill(_outside(mu, tokens, top_p), -torch.inf).log_softmax(dim=-1)
    logprobs = mu.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if not bool(torch.isfinite(logprobs).all()):
        raise TrainingError(
            f"{int((~torch.isfinite(logprobs)).sum())} of {len(tokens)} drawn tokens have no "
            "finite log-probability",
            "tokens that the model gives some probability",
            "look at the model's logits",
        )
    difference = torch.where(torch.isneginf(mu), torch.zeros_like(mu), mu - own)
    return SamplingLogprobs(logprobs, (mu.exp() * difference).sum(dim=-1))


def _outside(logprobs: Tensor, tokens: Tensor, top_p: float) -> Tensor:
    """Return ``(N, V)`` bool, True = outside the nucleus; drawn tokens are always inside."""
    # From the least likely on, as samplers do it, so that sums are rounded alike.
    ascending, order = logprobs.sort(dim=-1)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    removed = mass <= 1.0 - top_p
    removed[..., -1] = False
    missing = torch.where(removed, 1.0 - top_p - mass, torch.zeros_like(mass))
    missing = torch.empty_like(missing).scatter(-1, order, missing)
    labels = tokens.unsqueeze(-1)
    worst = float(missing.gather(-1, labels).max()) if len(tokens) else 0.0
    if worst > NUCLEUS_TOLERANCE:
        raise TrainingError(
            f"A drawn token lies {worst:.3f} of probability mass outside the nucleus of {top_p}",
            f"at most {NUCLEUS_TOLERANCE}, which rounding explains",
            "score with the model, temperature and top_p that sampled",
        )
    outside = torch.empty_like(removed).scatter(-1, order, removed)
    return outside.scatter(-1, labels, False)
