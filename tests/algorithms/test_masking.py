"""Masked reductions: hand-computed values, padding that never matters, exact micro-batching."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import masking
from tasks.errors import DataError

NAN, INF = math.nan, math.inf


def test_whiten_takes_statistics_of_real_tokens_only() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 100.0])
    mask = torch.tensor([True, True, True, False])
    # mean 2; squares 1 + 0 + 1: variance 2 / (3 - 1) = 1
    whitened = masking.masked_whiten(values, mask)
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0.0, 1.0, 0.0]))
    with pytest.raises(DataError, match="1 real position"):
        masking.masked_whiten(values, torch.tensor([True, False, False, False]))


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_junk_under_the_mask_reaches_neither_value_nor_gradient(junk: float) -> None:
    values = torch.tensor([[1.0, junk], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    total = masking.masked_sum(values, mask)  # 1 + 3 + 5
    mean = masking.masked_mean(values, mask)  # 9 / 3
    (total + mean).backward()
    assert total.item() == 9.0
    assert mean.item() == 3.0
    assert values.grad is not None
    # d(sum) = 1 and d(mean) = 1/3 at real positions
    torch.testing.assert_close(values.grad, torch.tensor([[4 / 3, 0.0], [4 / 3, 4 / 3]]))


def test_token_mean_is_not_a_mean_of_micro_batch_means() -> None:
    total_tokens, losses = 10.0, ([1.0] * 2, [4.0] * 8)
    # (2 * 1 + 8 * 4) / 10 = 3.4; the mean of means would be (1 + 4) / 2 = 2.5
    loss = sum(
        masking.aggregate(
            torch.tensor([part]),
            torch.ones(1, len(part), dtype=torch.bool),
            masking.Totals(total_tokens, 2),
        )
        for part in losses
    )
    assert float(loss) == pytest.approx(3.4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 3),  # (1 + 3 + 6) / 3
        ("seq-mean-token-sum", 5.0),  # (4 + 6) / 2
        ("seq-mean-token-mean", 4.0),  # (2 + 6) / 2
    ],
)
def test_three_ways_to_aggregate(mode: masking.LossMode, expected: float) -> None:
    loss = torch.tensor([[1.0, 3.0], [6.0, NAN], [NAN, NAN]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    value = masking.aggregate(loss, mask, masking.Totals(3, 2, mode))
    assert value.item() == pytest.approx(expected)


def test_sums_of_bf16_are_fp32() -> None:
    values = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)
    total = masking.masked_sum(values, torch.ones(1000, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total.item() == 1007.8125  # bf16 would give 1008


def test_last_token_for_left_and_right_padding() -> None:
    left = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert masking.last_token_index(left).tolist() == [3, 3]
    assert masking.last_token_index(right).tolist() == [1, 3]


def test_other_shapes_and_masks_do_not_broadcast() -> None:
    with pytest.raises(AssertionError):
        masking.masked_sum(torch.ones(2), torch.ones(2))
    with pytest.raises(AssertionError):
        masking.masked_sum(torch.ones(3, 2), torch.ones(3, 1, dtype=torch.bool))


def test_broadcast_to_tokens() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    got = masking.broadcast_to_tokens(torch.tensor([2.0, -1.0]), mask)
    assert got.tolist() == [[2.0, 0.0], [-1.0, -1.0]]
