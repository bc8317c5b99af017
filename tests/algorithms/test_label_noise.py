"""How far a label can be trusted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.reward_losses import (
    fit_noisy_scale,
    fitted_log_loss,
    label_trust,
    noisy_log_loss,
)
from tasks.errors import DataError, TrainingError


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


def test_broken_margin_is_an_error() -> None:
    with pytest.raises(TrainingError, match="margins"):
        fitted_log_loss(torch.tensor([math.nan]), flip_rate=0.1)


def test_noisy_loss_by_hand() -> None:
    # m = log 3: sigmoid 0.75. -log(0.9 * 0.75 + 0.1 * 0.25) = -log 0.7 = 0.356675.
    # m = -log 3: -log(0.9 * 0.25 + 0.1 * 0.75) = -log 0.3 = 1.203973.
    margins = torch.tensor([math.log(3.0), -math.log(3.0)])
    assert noisy_log_loss(margins, flip_rate=0.1) == pytest.approx((0.356675 + 1.203973) / 2)
    # However wrong a label seems, it costs at most -log 0.1.
    assert noisy_log_loss(torch.tensor([-1e6]), flip_rate=0.1) == pytest.approx(-math.log(0.1))


def test_scale_is_found_on_labels_with_that_noise() -> None:
    # Pairs whose true odds are sigmoid(2 m), and of whose labels a tenth is flipped.
    generator = torch.Generator().manual_seed(0)
    gaps = torch.randn(200_000, generator=generator)
    better = torch.rand(len(gaps), generator=generator) < torch.sigmoid(2.0 * gaps)
    flipped = torch.rand(len(gaps), generator=generator) < 0.1
    margins = torch.where(better ^ flipped, gaps, -gaps)
    scale = fit_noisy_scale(margins, flip_rate=0.1)
    # Fisher information of about 0.1 per pair: a standard error of 1 / sqrt(2e4) = 0.007.
    assert scale == pytest.approx(2.0, abs=0.04)
    row = [noisy_log_loss(margins, flip_rate=0.1, scale=k / 20) for k in range(20, 60)]
    assert noisy_log_loss(margins, flip_rate=0.1, scale=scale) <= min(row) + 1e-12


def test_unit_of_the_scores_does_not_choose_the_model() -> None:
    # Of four pairs a model gets three right, with margins -+1: the best odds are 3 to 1, so with
    # flip rate .1 sigmoid(s) solves .9 p + .1 (1 - p) = 3/4, p = .8125, and the loss is that of a
    # coin of 3/4: .75 log(4/3) + .25 log 4 = .562335. A tenth of the margins changes nothing; at
    # scale 1 it would lose: (3 x .65396 + .73393) / 4 = .67395.
    margins = torch.tensor([1.0, 1.0, 1.0, -1.0])
    for unit in (0.1, 1.0, 7.0):
        assert fitted_log_loss(unit * margins, flip_rate=0.1) == pytest.approx(0.562335, abs=1e-6)
    assert noisy_log_loss(0.1 * margins, flip_rate=0.1) == pytest.approx(0.67395, abs=1e-5)
    # All scores equal: a coin of 1/2, log 2, at every scale.
    assert fitted_log_loss(torch.zeros(3), flip_rate=0.1) == pytest.approx(math.log(2.0))


def test_scale_stays_within_its_bounds() -> None:
    assert fit_noisy_scale(torch.tensor([1.0, 2.0]), flip_rate=0.1) <= 1024.0
    assert fit_noisy_scale(torch.tensor([-1.0, -2.0]), flip_rate=0.1) >= 1 / 1024 - 1e-12
    with pytest.raises(DataError, match="no margins"):
        fit_noisy_scale(torch.zeros(0), flip_rate=0.1)
