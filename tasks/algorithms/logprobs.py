"""Log-probabilities and entropy of tokens, and where they sit in a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.masking import (
    check_float,
    check_in_range,
    check_mask,
    check_positive,
    check_shape,
    check_token_values,
    masked_sum,
)
from tasks.errors import DataError, TrainingError


def log_softmax(logits: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return ``log softmax(logits / temperature)`` over the last dimension, in fp32.

    Args:
        logits: ``(..., V)``.
        temperature: above 0.
        mask: ``(...)`` bool, True = a real position; others give a uniform distribution without a
            gradient.
    """
    check_float("logits", logits)
    check_positive("temperature", temperature)
    fp32 = logits.float()
    if mask is not None:
        check_mask(mask, logits.shape[:-1])
        fp32 = torch.where(mask.unsqueeze(-1), fp32, torch.zeros((), device=fp32.device))
    return torch.log_softmax(fp32 / temperature if temperature != 1.0 else fp32, dim=-1)


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``log softmax(logits / temperature)[label]`` in fp32.

    The logits must already sit at the position that predicts the label, see `response_positions`.

    Args:
        logits: ``(..., V)``, any floating dtype.
        labels: ``(...)`` long, from 0 to V - 1 at real positions.
        temperature: the one that the policy samples and trains with.
        mask: ``(...)`` bool, True = a real position. Others may hold any label (such as -100) and
            any logits, and give 0 without a gradient.

    Returns:
        ``(...)`` log-probabilities in nats.

    Raises:
        DataError: shapes that differ, or a label outside the vocabulary.
    """
    check_shape("labels", labels, logits.shape[:-1])
    if mask is not None:
        check_mask(mask, labels.shape)
        labels = torch.where(mask, labels, 0)
    if labels.numel() and not bool(((labels >= 0) & (labels < logits.shape[-1])).all()):
        raise DataError(
            f"labels run from {int(labels.min())} to {int(labels.max())}",
            f"ids from 0 to {logits.shape[-1] - 1}",
            "pass the mask, and check that the tokenizer belongs to the model",
        )
    logprobs = log_softmax(logits, temperature=temperature, mask=mask)
    picked = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked if mask is None else torch.where(mask, picked, torch.zeros_like(picked))


def entropy_from_logits(
    logits: Tensor, temperature: float = 1.0, *, mask: Tensor | None = None
) -> Tensor:
    """Return the entropy ``-sum p log p`` of ``p = softmax(logits / temperature)``.

    Args:
        logits: ``(..., V)``; a logit of -inf (a forbidden token) adds nothing.
        temperature: the same as for the log-probabilities.
        mask: ``(...)`` bool, True = a real position; others give 0 without a gradient.

    Returns:
        ``(...)`` in nats.
    """
    logprobs = log_softmax(logits, temperature=temperature, mask=mask)
    finite = torch.where(torch.isneginf(logprobs), torch.zeros_like(logprobs), logprobs)
    entropy = -(logprobs.exp() * finite).sum(dim=-1)
    return entropy if mask is None else torch.where(mask, entropy, torch.zeros_like(entropy))


def response_positions(prompt_len: int | Tensor, response_len: int) -> Tensor:
    """Return where the state before each response token sits.

    Token k is predicted at ``prompt_len - 1 + k``; its logits and its value are both read there.

    Args:
        prompt_len: positions before the response, left padding included: one number, or ``(B,)``
            long.
        response_len: response tokens.

    Returns:
        ``(response_len,)`` long, or ``(B, response_len)`` for a tensor.

    Raises:
        DataError: a prompt of no token, from which nothing can be predicted.
    """
    shortest = int(prompt_len.min()) if isinstance(prompt_len, Tensor) else prompt_len
    if shortest < 1 or response_len < 0:
        raise DataError(
            f"prompt_len {shortest}, response_len {response_len}",
            "a prompt of at least one token and a response_len of at least 0",
            "begin every prompt with the tokenizer's first token (BOS)",
        )
    if isinstance(prompt_len, Tensor):
        steps = torch.arange(response_len, device=prompt_len.device)
        return prompt_len.unsqueeze(-1) - 1 + steps
    return torch.arange(response_len) + prompt_len - 1


def take_response_states(values: Tensor, prompt_len: int | Tensor, response_len: int) -> Tensor:
    """Cut the states before the response tokens out of a whole sequence.

    Args:
        values: ``(B, L)`` values by position, or ``(B, L, V)`` logits.
        prompt_len: one number for all rows, or ``(B,)`` long.
        response_len: response tokens T.

    Returns:
        ``(B, T)`` or ``(B, T, V)``: entry k belongs to response token k.

    Raises:
        DataError: a row is too short for prompt and response.
    """
    positions = response_positions(prompt_len, response_len).to(values.device)
    last = int(positions.max()) if positions.numel() else 0
    if last >= values.shape[1]:
        raise DataError(
            f"the response reaches position {last} of rows of length {values.shape[1]}",
            "prompt_len - 1 + response_len at most the row length",
            "check that prompt_len counts left padding, and pad the rows on the right",
        )
    if positions.dim() == 1:
        return values.index_select(1, positions)
    rows = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    return values[rows, positions]


def sequence_logprob(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum token log-probabilities to ``log p(response | prompt)``.

    Args:
        logprobs: ``(B, T)``; mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``(B,)`` in nats; 0 for an empty row.
    """
    check_token_values(mask, logprobs=logprobs)
    return masked_sum(logprobs, mask, dim=1)


# What a sampler with a temperature and a nucleus really draws from.

# Probability mass by which a drawn token may lie outside the nucleus: the same logits, computed in
# another batch, differ in their last digits, and so may the token at the nucleus' border.
NUCLEUS_TOLERANCE = 1e-2


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
    check_positive("temperature", temperature)
    check_in_range("top_p", top_p, 1e-9, 1.0)
    own = log_softmax(logits)
    mu = log_softmax(logits, temperature=temperature)
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
