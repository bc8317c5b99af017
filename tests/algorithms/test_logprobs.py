"""Log-probabilities, entropy and their positions."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import logprobs as lp
from tasks.errors import ConfigError, DataError


def test_values_and_logits_are_read_before_the_token() -> None:
    values = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]])
    # token k of the response is predicted at 3 - 1 + k
    assert lp.response_positions(3, 2).tolist() == [2, 3]
    torch.testing.assert_close(lp.take_response_states(values, 3, 2), torch.tensor([[0.3, 0.4]]))


def test_positions_by_row_and_for_logits() -> None:
    lengths = torch.tensor([1, 3])
    assert lp.response_positions(lengths, 2).tolist() == [[0, 1], [2, 3]]
    logits = torch.arange(2 * 4 * 3).reshape(2, 4, 3).float()
    cut = lp.take_response_states(logits, lengths, 2)
    assert torch.equal(cut[0], logits[0, 0:2])
    assert torch.equal(cut[1], logits[1, 2:4])


def test_an_empty_prompt_and_a_short_row_are_refused() -> None:
    with pytest.raises(DataError, match="prompt_len 0"):
        lp.response_positions(0, 2)
    with pytest.raises(DataError, match="position 5 of rows of length 5"):
        lp.take_response_states(torch.ones(1, 5), 4, 3)


def test_logprob_and_entropy_share_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    # logits / 0.5 = 4, 2, 0: p = e^0, e^-2, e^-4 over 1.153651 = 0.866813, 0.117310, 0.015876
    entropy = lp.entropy_from_logits(logits, 0.5)
    assert entropy.item() == pytest.approx(0.441057, abs=1e-6)
    assert lp.entropy_from_logits(logits).item() == pytest.approx(0.832396, abs=1e-6)
    picked = lp.logprobs_from_logits(logits, torch.tensor(1), temperature=0.5)
    assert picked.item() == pytest.approx(-2 - math.log(1 + math.exp(-2) + math.exp(-4)), abs=1e-6)
    p = torch.stack(
        [lp.logprobs_from_logits(logits, torch.tensor(i), temperature=0.5) for i in range(3)]
    )
    assert -(p.exp() * p).sum().item() == pytest.approx(entropy.item(), abs=1e-6)


def test_masked_positions_may_hold_anything() -> None:
    logits = torch.randn(1, 3, 4)
    logits[0, 2] = math.nan
    logits.requires_grad_()
    labels = torch.tensor([[1, 3, -100]])
    mask = torch.tensor([[True, True, False]])
    out = lp.logprobs_from_logits(logits, labels, mask=mask)
    entropy = lp.entropy_from_logits(logits, mask=mask)
    (out.sum() + entropy.sum()).backward()
    assert out[0, 2].item() == 0.0 == entropy[0, 2].item()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[0, 2], torch.zeros(4))
    assert logits.grad[0, :2].abs().sum() > 0


def test_forbidden_tokens_add_no_entropy_and_no_nan_gradient() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    entropy = lp.entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_bf16_logits_are_computed_in_fp32() -> None:
    logits = torch.randn(5, 100).bfloat16()
    labels = torch.randint(0, 100, (5,))
    out = lp.logprobs_from_logits(logits, labels)
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(5), labels]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


def test_a_large_common_offset_costs_no_precision() -> None:
    logits = torch.tensor([3e4, 3e4 + 1.0])
    assert lp.logprobs_from_logits(logits, torch.tensor(0)).item() == pytest.approx(
        -1 - math.log1p(math.exp(-1)), abs=1e-6
    )


def test_flat_and_padded_logits_agree() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    padded = lp.logprobs_from_logits(logits, labels)
    flat = lp.logprobs_from_logits(logits.reshape(6, 5), labels.reshape(6))
    assert torch.equal(padded.reshape(6), flat)


def test_bad_labels_shapes_and_temperatures_are_refused() -> None:
    with pytest.raises(DataError, match="ids from 0 to 3"):
        lp.logprobs_from_logits(torch.zeros(1, 4), torch.tensor([4]))
    with pytest.raises(DataError, match="shape"):
        lp.logprobs_from_logits(torch.zeros(2, 4), torch.tensor([1]))
    with pytest.raises(ConfigError, match="temperature"):
        lp.entropy_from_logits(torch.zeros(4), 0.0)


def test_sequence_logprob_sums_real_tokens() -> None:
    values = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -0.5, -0.25]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert lp.sequence_logprob(values, mask).tolist() == [-3.0, -3.75]
