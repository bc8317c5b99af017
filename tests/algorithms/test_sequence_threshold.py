"""The threshold on the geometric-mean ratio, fixed and adaptive."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.importance import (
    adapt_tau,
    effective_sample_size,
    geometric_mean_veto,
    sequence_log_ratio,
    sequence_weights,
    smooth_tau,
    truncated_importance_weights,
)

RATIOS = torch.tensor([0.1, -0.2, 0.4, -0.8])


def test_veto_keeps_both_bounds() -> None:
    log_ratio = torch.tensor([0.0, 0.5, -0.5, 0.51, -0.51], dtype=torch.float64)
    keep = geometric_mean_veto(log_ratio, math.exp(0.5))
    assert keep.tolist() == [True, True, True, False, False]
    assert geometric_mean_veto(log_ratio, 1.0).tolist() == [True, False, False, False, False]


def test_smallest_tau_that_meets_the_effective_sample_size() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0])
    # In order of distance 0.1, 0.2, 0.4, 0.8, of N = 4:
    #   k = 1: 1 / 1 = 1                     -> 0.25
    #   k = 2: 1.5^2 / 1.25 = 1.8            -> 0.45
    #   k = 3: 3.5^2 / 5.25 = 2.3333         -> 0.58333
    #   k = 4: 4.5^2 / 6.25 = 3.24           -> 0.81
    for share, log_tau, keep in (
        (0.2, 0.1, 0.25),
        (0.45, 0.2, 0.5),
        (0.5, 0.4, 0.75),
        (0.8, 0.8, 1),
    ):
        tau = adapt_tau(RATIOS, weights, tau_min=1.01, tau_max=9.0, ess_share=share)
        assert math.log(tau) == pytest.approx(log_tau, abs=1e-7)
        assert float(geometric_mean_veto(RATIOS, tau).double().mean()) == keep


def test_keep_share_and_bounds() -> None:
    ones = torch.ones(4)
    tau = adapt_tau(RATIOS, ones, tau_min=1.01, tau_max=9.0, keep_share=0.6)
    assert round(math.log(tau), 6) == 0.4
    # tau_min already keeps two of four
    assert adapt_tau(RATIOS, ones, tau_min=1.3, tau_max=9.0, keep_share=0.5) == 1.3
    # Nothing lies within the bounds.
    far = torch.tensor([3.0, -4.0])
    assert adapt_tau(far, ones[:2], tau_min=1.1, tau_max=2.0, ess_share=0.5) == 1.1
    # Weights of zero are worth nothing, however many are kept.
    assert adapt_tau(RATIOS, 0 * ones, tau_min=1.1, tau_max=9.0, ess_share=0.5) == 1.1


def test_an_unreachable_target_gives_the_greatest_share() -> None:
    # log 1.6 = 0.47: at most three are kept
    tau = adapt_tau(RATIOS, torch.ones(4), tau_min=1.01, tau_max=1.6, ess_share=0.9)
    assert math.log(tau) == pytest.approx(0.4)
    # Not the widest tau: the last response outweighs all others and would lower the share.
    # k = 3: 9 / 3 / 4 = 0.75; k = 4: 103^2 / 10003 / 4 = 0.265
    heavy = torch.tensor([1.0, 1.0, 1.0, 100.0])
    tau = adapt_tau(RATIOS, heavy, tau_min=1.01, tau_max=9.0, ess_share=0.9)
    assert math.log(tau) == pytest.approx(0.4)


def test_smoothing_by_hand() -> None:
    bounds = {"tau_min": 1.01, "tau_max": 9.0}
    # Taus of the batches: log 0.4, then log 0.8. Smoothed: 0.4, then 0.75 * 0.4 + 0.25 * 0.8 = 0.5.
    tau, log_tau = smooth_tau(math.exp(0.4), None, decay=0.75, **bounds)
    assert (math.log(tau), log_tau) == pytest.approx((0.4, 0.4))
    tau, log_tau = smooth_tau(math.exp(0.8), log_tau, decay=0.75, **bounds)
    assert (math.log(tau), log_tau) == pytest.approx((0.5, 0.5))
    # The state may be beyond a bound that a new config draws, the threshold is not.
    tau, log_tau = smooth_tau(1.2, log_tau, decay=0.75, tau_min=1.01, tau_max=1.3)
    assert tau == 1.3 and log_tau > math.log(1.3)


weight = st.one_of(st.just(0.0), st.floats(1e-3, 3.0))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, -0.1, 0.3, -0.5, 0.9, 2.0]), weight),
        min_size=1,
        max_size=15,
    ),
    share=st.floats(0.05, 1.0),
    bounds=st.sampled_from([(1.0, 1.2), (1.05, 3.0), (1.05, 1.05), (2.0, 100.0)]),
    by_ess=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_tau_is_that_of_trying_every_candidate(
    rows: list[tuple[float, float]],
    share: float,
    bounds: tuple[float, float],
    by_ess: bool,
    random: Random,
) -> None:
    ratios = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    weights = torch.tensor([w for _, w in rows], dtype=torch.float64)
    target = {"ess_share" if by_ess else "keep_share": share}
    target |= dict(zip(("tau_min", "tau_max"), bounds, strict=True))

    def shares(tau: float) -> tuple[float, float]:
        kept = geometric_mean_veto(ratios, tau)
        return (
            float(effective_sample_size(weights[kept])) / len(rows),
            float(kept.double().mean()),
        )

    tau = adapt_tau(ratios, weights, **target)
    assert bounds[0] <= tau <= bounds[1]
    found = shares(tau)[0 if by_ess else 1]
    tried = sorted({bounds[0], bounds[1], *(math.exp(abs(r)) * (1 + 1e-12) for r, _ in rows)})
    tried = [tau for tau in tried if bounds[0] <= tau <= bounds[1]]
    reached = {tau: shares(tau)[0 if by_ess else 1] for tau in tried}
    enough = [tau for tau, value in reached.items() if value >= share]
    if enough and found >= share:
        assert tau == pytest.approx(enough[0])
    elif found < share:
        assert not [t for t in enough if reached[t] > share + 1e-6]
        assert max(reached.values()) == pytest.approx(found, abs=1e-6)
    order = list(range(len(rows)))
    random.shuffle(order)
    assert adapt_tau(ratios[order], weights[order], **target) == pytest.approx(tau)


def test_sequence_weights_with_the_weights_of_training() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    new = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0], [math.nan] * 3])
    old = torch.tensor([[-1.5, -1.0, math.inf], [-2.0, -2.0, -2.0], [0.0] * 3])
    advantages = torch.where(mask, 1.0, math.nan)
    # Differences 0.5, -1 and 1, 1, 1; the cap is 2.
    token = truncated_importance_weights(
        sequence_log_ratio(new, old, mask, level="token"), advantages, mask, cap=2.0
    )
    expected = [(math.exp(0.5) + math.exp(-1.0)) / 2.0, 2.0, 0.0]
    assert sequence_weights(token, mask).tolist() == pytest.approx(expected)
