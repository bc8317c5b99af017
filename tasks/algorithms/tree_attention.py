"""Causal attention over packed rows that share prompts, piece by piece.

A mask over a whole row makes attention compute what the mask then hides: half of the pairs of
tokens for being in the future, and those between siblings. Here every piece meets the keys that it
sees and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tasks.algorithms.prefix_rows import PromptTree


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, trees: Sequence[PromptTree], scale: float | None
) -> Tensor:
    """Attend from every token to its prompt and to what came before it in its own response.

    softmax(scale * Q K^T) V over those keys. The prompt and the first response are one causal
    piece; each other response has a piece of its own.

    Args:
        query: (1, H, N, D), the trees' tokens end to end, each tree as prompt, response 1, ....
        key: (1, H, N, D).
        value: (1, H, N, D).
        trees: their lengths, N tokens in all.
        scale: factor of the logits; None for 1 / sqrt(D).

    Returns:
        (1, H, N, D).

    Raises:
        ValueError: the tensors have other shapes.
    """
    _check(query, key, value, trees)
    lengths = [length for tree in trees for length in _piece_tokens(tree)]
    pieces = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    attended = []
    for tree in trees:
        q, trunk_key, trunk_value = next(pieces)
        attended.append(
            scaled_dot_product_attention(q, trunk_key, trunk_value, is_causal=True, scale=scale)
        )
        prompt_key = trunk_key[:, :, : tree.prompt_tokens]
        prompt_value = trunk_value[:, :, : tree.prompt_tokens]
        for _ in tree.response_tokens[1:]:
            q, own_key, own_value = next(pieces)
            k = torch.cat([prompt_key, own_key], dim=2)
            v = torch.cat([prompt_value, own_value], dim=2)
            mask = _sees(q.shape[2], tree.prompt_tokens, q.device)
            attended.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(attended, dim=2)


def _piece_tokens(tree: PromptTree) -> list[int]:
    """Return the tokens of the prompt with the first response, and of each other response."""
    first, *others = tree.response_tokens
    return [tree.prompt_tokens + first, *others]


def _sees(response_tokens: int, prompt_tokens: int, device: torch.device) -> Tensor:
    """Return (response, prompt + response), True = the query sees the key."""
    shape = (response_tokens, prompt_tokens + response_tokens)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(prompt_tokens)


def _check(query: Tensor, key: Tensor, value: Tensor, trees: Sequence[PromptTree]) -> None:
    n_tokens = sum(tree.tokens for tree in trees)
    shape = query.shape
    if len(shape) != 4 or shape[0] != 1 or shape[2] != n_tokens:
        raise ValueError(f"query has shape {tuple(shape)}, expected (1, heads, {n_tokens}, width)")
    if key.shape != shape or value.shape != shape:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ from the query "
            f"{tuple(shape)}; repeat keys and values that heads share"
        )
