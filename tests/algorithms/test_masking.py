"""Masked reductions: hand-computed values, padding that never matters, exact micro-batching."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import masking
from tasks.algorithms.masking import check_finite
from tasks.errors import ConfigError, DataError, TrainingError

NAN, INF = math.nan, math.inf


def test_whiten_takes_statistics_of_real_tokens_only() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 100.0])
    mask = torch.tensor([True, True, True, False])
    # mean 2; squares 1 + 0 + 1: variance 2/2 = 1 (unbiased), 2/3 (biased); 1/sqrt(2/3) = 1.224745
    unbiased = masking.masked_whiten(values, mask)
    biased = masking.masked_whiten(values, mask, unbiased=False)
    kept_mean = masking.masked_whiten(values, mask, unbiased=False, shift_mean=False)
    torch.testing.assert_close(unbiased, torch.tensor([-1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(biased, torch.tensor([-1.224745, 0.0, 1.224745, 0.0]))
    torch.testing.assert_close(kept_mean, torch.tensor([0.775255, 2.0, 3.224745, 0.0]))


def test_whiten_refuses_a_single_token_and_nan() -> None:
    mask = torch.tensor([True, False])
    with pytest.raises(DataError, match="1 real position"):
        masking.masked_whiten(torch.tensor([1.0, 2.0]), mask)
    with pytest.raises(TrainingError, match="not finite"):
        masking.masked_whiten(torch.tensor([NAN, 2.0]), mask, unbiased=False)


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


def test_mean_of_an_empty_mask_is_an_error() -> None:
    with pytest.raises(DataError, match="no real position"):
        masking.masked_mean(torch.ones(2, 2), torch.tensor([[True, True], [False, False]]), dim=1)
    with pytest.raises(DataError, match="no real position"):
        masking.masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool))


def test_select_last_is_the_same_for_left_and_right_padding() -> None:
    left = torch.tensor([[-9, -9, 0.5, 1.5], [0.1, 0.2, 0.3, 0.4]])
    right = torch.tensor([[0.5, 1.5, -9, -9], [0.1, 0.2, 0.3, 0.4]])
    left_mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    right_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = torch.tensor([1.5, 0.4])
    torch.testing.assert_close(masking.select_last(left, left_mask), expected)
    torch.testing.assert_close(masking.select_last(right, right_mask), expected)
    assert masking.last_token_index(left_mask).tolist() == [3, 3]
    assert masking.last_token_index(right_mask).tolist() == [1, 3]


def test_select_last_refuses_an_empty_row() -> None:
    with pytest.raises(DataError, match="row 1"):
        masking.last_token_index(torch.tensor([[True], [False]]))


def test_end_token_is_read_at_the_last_real_token() -> None:
    ids = torch.tensor([[11, 12, 2, 0, 0], [11, 12, 13, 14, 15], [0, 0, 11, 12, 2]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    assert masking.ended_with(ids, mask, 2).tolist() == [True, False, True]


def test_labels_leave_out_prompt_and_padding_on_either_side() -> None:
    ids = torch.tensor([[11, 12, 7, 8, 0], [0, 11, 12, 7, 8]])
    labels = masking.response_labels(ids, ids != 0, torch.tensor([2, 2]))
    assert labels.tolist() == [[-100, -100, 7, 8, -100], [-100, -100, -100, 7, 8]]


def test_labels_keep_an_end_token_that_equals_the_pad_token() -> None:
    ids = torch.tensor([[11, 7, 0, 0]])
    attention = torch.tensor([[True, True, True, False]])
    assert masking.response_labels(ids, attention, torch.tensor([1])).tolist() == [
        [-100, 7, 0, -100]
    ]


def test_token_mean_is_not_a_mean_of_micro_batch_means() -> None:
    total_tokens, losses = 10.0, ([1.0] * 2, [4.0] * 8)
    # (2 * 1 + 8 * 4) / 10 = 3.4; the mean of means would be (1 + 4) / 2 = 2.5
    loss = sum(
        masking.aggregate_token_loss(
            torch.tensor([part]),
            torch.ones(1, len(part), dtype=torch.bool),
            mode="token-mean",
            total_tokens=total_tokens,
            total_sequences=2,
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


@pytest.mark.parametrize("count", [0, -1, NAN, INF])
def test_a_denominator_that_is_no_count_is_refused(count: float) -> None:
    with pytest.raises(DataError, match=r"totals\.tokens"):
        masking.Totals(count, 1)
    with pytest.raises(DataError, match=r"totals\.sequences"):
        masking.Totals(1, count)


def test_wrong_mode_dtype_and_shape_are_named() -> None:
    with pytest.raises(ConfigError, match="seq-mean-token-sum"):
        masking.Totals(1, 1, "mean")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"mask\.bool\(\)"):
        masking.masked_sum(torch.ones(2), torch.ones(2))
    with pytest.raises(DataError, match=r"shape \(3,\)"):
        masking.masked_sum(torch.ones(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(DataError, match="floating"):
        masking.masked_sum(torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.bool))


def test_sums_of_bf16_are_fp32() -> None:
    values = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)
    total = masking.masked_sum(values, torch.ones(1000, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total.item() == 1007.8125  # bf16 would give 1008


def test_check_finite_says_where() -> None:
    values = torch.tensor([[1.0, NAN], [INF, 2.0]])
    with pytest.raises(TrainingError, match=r"logprobs holds 1 .* \(1, 0\)"):
        check_finite("logprobs", values, torch.tensor([[True, False], [True, True]]))
    check_finite("logprobs", values, torch.tensor([[True, False], [False, True]]))
