"""Log-probabilities of labels, computed in parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tasks.runtime.verl_engine import label_logprobs


def test_by_hand() -> None:
    # Logits 0 and ln 3: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    found = label_logprobs(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(found, torch.tensor([math.log(0.25), math.log(0.75)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_a_time", [1, 21, 70, 10_000])
def test_parts_change_nothing(dtype: torch.dtype, at_a_time: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(7, (13,))
    given = torch.randn(13, 7).to(dtype)

    def gradient(logprobs: Tensor, logits: Tensor) -> Tensor:
        weights = torch.arange(13.0)
        return torch.autograd.grad((logprobs * weights).sum(), logits)[0]

    parts, whole = (given.clone().requires_grad_() for _ in range(2))
    found = label_logprobs(parts, labels, at_a_time)
    expected = whole.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, parts), gradient(expected, whole))
