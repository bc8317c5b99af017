"""How far a label can be trusted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.label_noise import label_trust
from tasks.errors import ConfigError, TrainingError


def test_trust_by_hand() -> None:
    # m = 0: the prior, 0.9. m = -log 9: the odds cancel. m = log 3: 0.75 * 0.9 / (0.75 * 0.9 +
    # 0.25 * 0.1) = 0.964286. Far out: certainty, without overflow.
    margins = torch.tensor([0.0, -math.log(9.0), math.log(3.0), 1e4, -1e4])
    trust = label_trust(margins, flip_rate=0.1)
    assert trust.tolist() == pytest.approx([0.9, 0.5, 0.964286, 1.0, 0.0], abs=1e-6)


@given(st.floats(-30, 30), st.floats(0.01, 0.49))
def test_trust_is_bayes_rule(margin: float, flip_rate: float) -> None:
    better = 1.0 / (1.0 + math.exp(-margin))
    right, wrong = (1.0 - flip_rate) * better, flip_rate * (1.0 - better)
    found = float(label_trust(torch.tensor([margin], dtype=torch.float64), flip_rate=flip_rate))
    assert found == pytest.approx(right / (right + wrong), abs=1e-5)


@pytest.mark.parametrize("flip_rate", [0.0, 0.5, -0.1, math.nan])
def test_flip_rate_has_bounds(flip_rate: float) -> None:
    with pytest.raises(ConfigError, match="flip_rate"):
        label_trust(torch.zeros(1), flip_rate=flip_rate)


def test_broken_margin_is_an_error() -> None:
    with pytest.raises(TrainingError, match="margins"):
        label_trust(torch.tensor([math.nan]), flip_rate=0.1)
