"""Rows that share a prompt, computed as one: [prompt | response 1 | ... | response n].

Every response sees the prompt and itself, never a sibling, and its positions go on from the prompt,
so each token is computed exactly as in a row of its own. Only the work on the prompt is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PADDING = -1
PROMPT = 0

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class RowShape(NamedTuple):
    """What decides which rows are merged.

    Args:
        prompt: equal for rows of the same prompt.
        prompt_tokens: tokens of the prompt, at least 1.
        response_tokens: tokens of the response.
    """

    prompt: Hashable
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of the row by itself."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class MergeLimit:
    """How far rows are merged.

    Args:
        max_tokens: tokens of a merged row, and of a micro-batch of packed ones.
        attention_tokens: length of a row at which attention costs as much as everything else;
            infinite where attention skips what the mask hides.
        packed: merged rows are laid end to end, so that none is padded.
    """

    max_tokens: int
    attention_tokens: float = math.inf
    packed: bool = False

    def cost(self, tokens: int) -> float:
        """Return the work of one row, in tokens: n + n^2 / attention_tokens."""
        return tokens + tokens**2 / self.attention_tokens

    def allows(self, merged_tokens: int, row: RowShape) -> bool:
        """Return whether a row fits into a merged row and costs no more there than by itself."""
        together = merged_tokens + row.response_tokens
        added = self.cost(together) - self.cost(merged_tokens)
        return together <= self.max_tokens and added <= self.cost(row.tokens)


def merge_rows(rows: Sequence[RowShape], limit: MergeLimit) -> list[list[int]]:
    """Partition rows into merged rows of one prompt each.

    Returns:
        Ascending indices into ``rows``, every index once; merged rows in the order of their first.
    """
    merged: list[list[int]] = []
    tokens: list[int] = []
    newest: dict[Hashable, int] = {}
    for index, row in enumerate(rows):
        at = newest.get(row.prompt)
        if at is not None and limit.allows(tokens[at], row):
            merged[at].append(index)
            tokens[at] += row.response_tokens
        else:
            newest[row.prompt] = len(merged)
            merged.append([index])
            tokens.append(row.tokens)
    return merged


class PromptTree(NamedTuple):
    """A merged row by its lengths in tokens.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        response_tokens: tokens of each response.
    """

    prompt_tokens: int
    response_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the merged row."""
        return self.prompt_tokens + sum(self.response_tokens)


def _tree(rows: Sequence[RowShape], members: Sequence[int]) -> PromptTree:
    responses = tuple(rows[i].response_tokens for i in members)
    return PromptTree(rows[members[0]].prompt_tokens, responses)


def merged_tokens(rows: Sequence[RowShape], members: Sequence[int]) -> int:
    """Return the length of the merged row of these rows, the prompt counted once."""
    return _tree(rows, members).tokens


@dataclass(frozen=True)
class RowLayout:
    """Where the N tokens of B rows, laid end to end, lie in G merged rows of width W.

    Packed, the merged rows lie end to end as well: G is 1 and W the number of their tokens.

    Args:
        slots: (N,) index into the G * W slots; the prompt tokens of siblings share theirs.
        positions: (G, W) position of each token in its own row; 0 for padding.
        segments: (G, W) 0 = prompt, k = k-th response, -1 = padding.
        before_response: (M,) tokens from which a response token is predicted, in row order.
        trees: the merged rows that are packed, in their order; empty if they are not.
    """

    slots: Tensor
    positions: Tensor
    segments: Tensor
    before_response: Tensor
    trees: tuple[PromptTree, ...] = ()

    def to(self, device: torch.device) -> RowLayout:
        """Return the layout on a device."""
        return RowLayout(
            self.slots.to(device),
            self.positions.to(device),
            self.segments.to(device),
            self.before_response.to(device),
            self.trees,
        )

    def merge(self, tokens: Tensor, padding: int) -> Tensor:
        """Return (N,) token ids as (G, W), ``padding`` where no token lies."""
        return _place(tokens, self.slots, self.segments.shape, padding)

    def spread(self, merged: Tensor) -> Tensor:
        """Return what was computed for the slots, (G, W), for the N tokens of the rows."""
        return merged.flatten()[self.slots]

    def fill(self, values: Tensor) -> Tensor:
        """Return (M,) values at ``before_response`` and 0 at the other tokens, shape (N,)."""
        zeros = torch.zeros(len(self.slots), dtype=values.dtype, device=values.device)
        return zeros.index_put((self.before_response,), values)


def lay_out(
    rows: Sequence[RowShape], merged: Sequence[Sequence[int]], packed: bool = False
) -> RowLayout:
    """Lay rows into merged rows.

    Args:
        rows: the B rows whose tokens lie end to end.
        merged: partition of their indices; the rows of a part share their prompt.
        packed: the merged rows lie end to end, not each padded to the longest.
    """
    trees = tuple(_tree(rows, members) for members in merged)
    widths = [tree.tokens for tree in trees]
    shape = (1, sum(widths)) if packed else (len(trees), max(widths))
    starts = accumulate(widths[:-1], initial=0) if packed else range(0, math.prod(shape), shape[1])
    start_of, segment_of, shift_of = _assign(rows, merged, tuple(starts))
    prompt_tokens = torch.tensor([row.prompt_tokens for row in rows])
    row_tokens = torch.tensor([row.tokens for row in rows])
    row = torch.repeat_interleave(torch.arange(len(rows)), row_tokens)
    position = torch.arange(len(row)) - (row_tokens.cumsum(0) - row_tokens)[row]
    in_response = position >= prompt_tokens[row]
    slots = start_of[row] + position + in_response * shift_of[row]
    return RowLayout(
        slots=slots,
        positions=_place(position, slots, shape, 0),
        segments=_place(in_response * segment_of[row], slots, shape, PADDING),
        before_response=in_response.nonzero()[:, 0] - 1,
        trees=trees if packed else (),
    )


def _assign(
    rows: Sequence[RowShape], merged: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row the slot where its merged row starts, its segment and how far its
    response moves right."""
    start_of, segment_of, shift_of = [0] * len(rows), [0] * len(rows), [0] * len(rows)
    for start, members in zip(starts, merged, strict=True):
        shift = 0
        for segment, index in enumerate(members, start=PROMPT + 1):
            start_of[index], segment_of[index], shift_of[index] = start, segment, shift
            shift += rows[index].response_tokens
    return torch.tensor(start_of), torch.tensor(segment_of), torch.tensor(shift_of)


def _place(values: Tensor, slots: Tensor, shape: Sequence[int], empty: int) -> Tensor:
    flat = torch.full((math.prod(shape),), empty, dtype=values.dtype, device=values.device)
    flat[slots] = values
    return flat.view(*shape)


def prefix_mask_mod(segments: Tensor) -> MaskMod:
    """Return the function that says which token attends to which, as block-sparse attention takes
    it.

    Args:
        segments: (G, W), see `RowLayout`.

    Returns:
        f(batch, head, query, key), True = the query sees the key: an earlier or the same token, of
        the prompt or of the query's own response. Padding sees itself, so that no query is blind.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether queries see keys, by their places in the rows."""
        of_key = segments[batch, key]
        return (key <= query) & ((of_key == PROMPT) | (of_key == segments[batch, query]))

    return sees


def dense_mask(segments: Tensor) -> Tensor:
    """Return the same as a bool tensor of shape (G, 1, W, W), True = attends."""
    n_rows, width = segments.shape
    batch = torch.arange(n_rows, device=segments.device)[:, None, None, None]
    place = torch.arange(width, device=segments.device)
    return prefix_mask_mod(segments)(batch, batch, place[:, None], place)


#
# Causal attention over packed rows that share prompts, piece by piece.
#
# A mask over a whole row makes attention compute what the mask then hides: half of the pairs of
# tokens for being in the future, and those between siblings. Here every piece meets the keys that
# it sees and no others.


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
    """
    lengths = []
    for tree in trees:
        first, *others = tree.response_tokens
        lengths += [tree.prompt_tokens + first, *others]
    assert query.shape == key.shape == value.shape, "repeat keys and values that heads share"
    assert query.shape[0] == 1 and query.shape[2] == sum(lengths)
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


def _sees(response_tokens: int, prompt_tokens: int, device: torch.device) -> Tensor:
    """Return (response, prompt + response), True = the query sees the key."""
    shape = (response_tokens, prompt_tokens + response_tokens)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(prompt_tokens)
