"""Probabilities of a sampler with a temperature and a nucleus, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms.logprobs import sampling_logprobs
from tasks.errors import TrainingError


def test_sampling_logprobs_by_hand() -> None:
    # p = 1/2, 1/4, 1/8, 1/8. Temperature 1/2 squares: 16/22, 4/22, 1/22, 1/22.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    cold = sampling_logprobs(logits, torch.tensor([1]), temperature=0.5, top_p=1.0)
    assert cold.logprobs.exp().tolist() == pytest.approx([4 / 22])
    # Top 0.7: the first two (before the third lies 0.75), renormalised to 2/3 and 1/3.
    # KL = 2/3 ln(4/3) + 1/3 ln(4/3) = ln(4/3).
    top = sampling_logprobs(logits, torch.tensor([1]), temperature=1.0, top_p=0.7)
    assert top.logprobs.exp().tolist() == pytest.approx([1 / 3])
    assert top.kl.tolist() == pytest.approx([math.log(4 / 3)])
    # Cold and top 0.8: 16/20 and 4/20; KL = 0.8 ln(0.8 / 0.5) + 0.2 ln(0.2 / 0.25).
    both = sampling_logprobs(logits, torch.tensor([0]), temperature=0.5, top_p=0.8)
    assert both.logprobs.exp().tolist() == pytest.approx([0.8])
    assert both.kl.tolist() == pytest.approx([0.8 * math.log(1.6) + 0.2 * math.log(0.8)], abs=1e-6)
    plain = sampling_logprobs(logits, torch.tensor([3]), temperature=1.0, top_p=1.0)
    assert plain.logprobs.exp().tolist() == pytest.approx([0.125])
    assert plain.kl.tolist() == pytest.approx([0.0], abs=1e-7)


def test_a_token_far_outside_the_nucleus_is_refused() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    with pytest.raises(TrainingError, match="outside the nucleus"):
        sampling_logprobs(logits, torch.tensor([3]), temperature=1.0, top_p=0.7)


def test_a_token_at_the_border_keeps_its_mass() -> None:
    # Rounding put the second token outside: 0.7 lies before it and top_p is 0.7 less a little.
    logits = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    found = sampling_logprobs(logits, torch.tensor([1]), temperature=1.0, top_p=0.7 - 1e-5)
    assert found.logprobs.exp().tolist() == pytest.approx([0.2 / 0.9])
