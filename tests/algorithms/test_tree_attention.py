"""Attention piece by piece equals attention under a mask over the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tasks.algorithms.packed_rows import PromptTree, RowShape, dense_mask, lay_out, tree_attention

Trees = st.lists(
    st.builds(
        PromptTree,
        st.integers(1, 5),
        st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _inputs(trees: list[PromptTree], heads: int = 2, width: int = 4) -> list[Tensor]:
    n_tokens = sum(tree.tokens for tree in trees)
    return [_random(1, heads, n_tokens, width, seed=i).requires_grad_() for i in range(3)]


def _under_masks(
    query: Tensor, key: Tensor, value: Tensor, trees: list[PromptTree], scale: float | None
) -> Tensor:
    """Return the same tree by tree, under the mask of a merged row."""
    found, start = [], 0
    for tree in trees:
        rows = [RowShape("p", tree.prompt_tokens, n) for n in tree.response_tokens]
        mask = dense_mask(lay_out(rows, [list(range(len(rows)))]).segments)
        span = slice(start, start + tree.tokens)
        parts = (x[:, :, span] for x in (query, key, value))
        found.append(scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale))
        start = span.stop
    return torch.cat(found, dim=2)


def test_by_hand() -> None:
    """One head of width 1, a prompt of one token and two responses of one token.

    Queries 0, 1 and 1, keys 0, ln 3 and ln 2, values 8, 4 and 2, scale 1:
    the prompt sees itself: 8.
    Response 1 sees the prompt with weight e^0 = 1 and itself with e^ln 3 = 3:
    (1 * 8 + 3 * 4) / 4 = 5.
    Response 2 sees the prompt with 1 and itself with 2, not response 1:
    (1 * 8 + 2 * 2) / 3 = 4.
    """
    query = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1)
    key = torch.tensor([0.0, math.log(3.0), math.log(2.0)]).view(1, 1, 3, 1)
    value = torch.tensor([8.0, 4.0, 2.0]).view(1, 1, 3, 1)
    found = tree_attention(query, key, value, [PromptTree(1, (1, 1))], 1.0)
    torch.testing.assert_close(found.flatten(), torch.tensor([8.0, 5.0, 4.0]))


@given(trees=Trees, scale=st.sampled_from([None, 0.3]))
@settings(max_examples=40, deadline=None)
def test_equals_the_dense_mask_with_its_gradients(
    trees: list[PromptTree], scale: float | None
) -> None:
    inputs = _inputs(trees)
    found = tree_attention(*inputs, trees, scale)
    expected = _under_masks(*inputs, trees, scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = _random(*found.shape, seed=9)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_trees_and_siblings_do_not_touch_each_other() -> None:
    trees = [PromptTree(2, (3, 2)), PromptTree(1, (2,))]
    query, key, value = _inputs(trees)
    before = tree_attention(query, key, value, trees, None)
    # The second response of the first tree, tokens 5 and 6, holds NaN.
    key, value = key.detach().clone(), value.detach().clone()
    key[:, :, 5:7] = value[:, :, 5:7] = math.nan
    after = tree_attention(query, key, value, trees, None)
    others = [0, 1, 2, 3, 4, 7, 8, 9]
    assert torch.equal(before[:, :, others], after[:, :, others])
    assert bool(after[:, :, 5:7].isnan().all())


def test_a_future_token_is_not_seen() -> None:
    trees = [PromptTree(2, (2, 2))]
    query, key, value = _inputs(trees)
    before = tree_attention(query, key, value, trees, None)
    value = value.detach().clone()
    value[:, :, [1, 3, 5]] += 1.0
    changed = (tree_attention(query, key, value, trees, None) != before).any(-1)[0, 0]
    # The first token alone sees none of them: the others see the prompt's second.
    assert changed.tolist() == [False, True, True, True, True, True]


def test_other_shapes_are_refused() -> None:
    trees = [PromptTree(2, (2, 2))]
    for query, key in (((1, 2, 5, 4), (1, 2, 5, 4)), ((1, 2, 6, 4), (1, 1, 6, 4))):
        with pytest.raises(AssertionError):
            tree_attention(torch.zeros(query), torch.zeros(key), torch.zeros(key), trees, None)
