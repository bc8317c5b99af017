"""Log-probabilities and entropy of tokens, and where they sit in a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.algorithms.checks import (
    check_float,
    check_mask,
    check_positive,
    check_shape,
    check_token_values,
)
from tasks.algorithms.masking import masked_sum
from tasks.errors import DataError


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
