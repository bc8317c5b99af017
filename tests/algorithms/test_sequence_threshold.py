"""The threshold on the geometric-mean ratio, fixed and adaptive."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.importance import (
    TauController,
    TauTarget,
    adapt_tau,
    effective_sample_size,
    geometric_mean_veto,
    sequence_log_ratio,
    sequence_weights,
    truncated_importance_weights,
)
from tasks.errors import ConfigError, DataError, TrainingError

RATIOS = torch.tensor([0.1, -0.2, 0.4, -0.8])


def test_veto_keeps_both_bounds() -> None:
    log_ratio = torch.tensor([0.0, 0.5, -0.5, 0.51, -0.51], dtype=torch.float64)
    keep = geometric_mean_veto(log_ratio, math.exp(0.5))
    assert keep.tolist() == [True, True, True, False, False]
    assert geometric_mean_veto(log_ratio, 1.0).tolist() == [True, False, False, False, False]
    mask = torch.tensor([True, False])
    assert geometric_mean_veto(torch.tensor([0.0, math.nan]), 2.0, mask).tolist() == [True, False]
    with pytest.raises(TrainingError, match="not finite"):
        geometric_mean_veto(torch.tensor([math.nan]), 2.0)
    with pytest.raises(ConfigError, match=r"tau is 0\.9"):
        geometric_mean_veto(log_ratio, 0.9)


def test_smallest_tau_that_meets_the_effective_sample_size() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0])
    # In order of distance 0.1, 0.2, 0.4, 0.8, of N = 4:
    #   k = 1: 1 / 1 = 1                     -> 0.25
    #   k = 2: 1.5^2 / 1.25 = 1.8            -> 0.45
    #   k = 3: 3.5^2 / 5.25 = 2.3333         -> 0.58333
    #   k = 4: 4.5^2 / 6.25 = 3.24           -> 0.81
    for share, log_tau, ess, keep in (
        (0.2, 0.1, 0.25, 0.25),
        (0.45, 0.2, 0.45, 0.5),
        (0.5, 0.4, 7.0 / 12.0, 0.75),
        (0.8, 0.8, 0.81, 1.0),
    ):
        choice = adapt_tau(RATIOS, weights, TauTarget(1.01, 9.0, ess_share=share))
        assert choice.reached and choice.reason == ""
        assert math.log(choice.tau) == pytest.approx(log_tau, abs=1e-7)
        assert choice.ess_share == pytest.approx(ess)
        assert choice.keep_share == keep
        assert float(geometric_mean_veto(RATIOS, choice.tau).double().mean()) == keep


def test_keep_share_and_bounds() -> None:
    ones = torch.ones(4)
    choice = adapt_tau(RATIOS, ones, TauTarget(1.01, 9.0, keep_share=0.6))
    assert (round(math.log(choice.tau), 6), choice.keep_share) == (0.4, 0.75)
    # tau_min already keeps two of four
    low = adapt_tau(RATIOS, ones, TauTarget(1.3, 9.0, keep_share=0.5))
    assert (low.tau, low.keep_share, low.reached) == (1.3, 0.5, True)


def test_an_unreachable_target_gives_the_greatest_share_and_says_so() -> None:
    # log 1.6 = 0.47: at most three are kept
    choice = adapt_tau(RATIOS, torch.ones(4), TauTarget(1.01, 1.6, ess_share=0.9))
    assert not choice.reached
    assert choice.ess_share == pytest.approx(0.75)
    assert math.log(choice.tau) == pytest.approx(0.4)
    assert "effective sample size 0.7500 N at tau 1.49" in choice.reason
    assert "target 0.9 N" in choice.reason and "1.01 to 1.6" in choice.reason
    # Not the widest tau: the last response outweighs all others and would lower the share.
    # k = 3: 9 / 3 / 4 = 0.75; k = 4: 103^2 / 10003 / 4 = 0.265
    heavy = torch.tensor([1.0, 1.0, 1.0, 100.0])
    assert adapt_tau(RATIOS, heavy, TauTarget(1.01, 9.0, ess_share=0.9)).keep_share == 0.75


def test_nothing_within_the_bounds_is_told() -> None:
    choice = adapt_tau(torch.tensor([3.0, -4.0]), torch.ones(2), TauTarget(1.1, 2.0, ess_share=0.5))
    assert (choice.tau, choice.ess_share, choice.keep_share) == (1.1, 0.0, 0.0)
    assert not choice.reached and "0.0000 N" in choice.reason


def test_weights_of_zero_are_worth_nothing() -> None:
    choice = adapt_tau(RATIOS, torch.zeros(4), TauTarget(1.1, 9.0, ess_share=0.5))
    assert (choice.ess_share, choice.reached) == (0.0, False)


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
    target = TauTarget(*bounds, **{"ess_share" if by_ess else "keep_share": share})

    def shares(tau: float) -> tuple[float, float]:
        kept = geometric_mean_veto(ratios, tau)
        return (
            float(effective_sample_size(weights[kept])) / len(rows),
            float(kept.double().mean()),
        )

    choice = adapt_tau(ratios, weights, target)
    assert bounds[0] <= choice.tau <= bounds[1]
    assert shares(choice.tau) == pytest.approx((choice.ess_share, choice.keep_share), abs=1e-6)
    tried = sorted({bounds[0], bounds[1], *(math.exp(abs(r)) * (1 + 1e-12) for r, _ in rows)})
    tried = [tau for tau in tried if bounds[0] <= tau <= bounds[1]]
    reached = {tau: shares(tau)[0 if by_ess else 1] for tau in tried}
    enough = [tau for tau, value in reached.items() if value >= share]
    if choice.reached and enough:
        assert choice.tau == pytest.approx(enough[0])
    elif not choice.reached:
        assert not [tau for tau in enough if reached[tau] > share + 1e-6]
        assert max(reached.values()) == pytest.approx(
            choice.ess_share if by_ess else choice.keep_share, abs=1e-6
        )
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = adapt_tau(ratios[order], weights[order], target)
    assert moved.tau == pytest.approx(choice.tau)


def test_masked_responses_never_matter() -> None:
    target = TauTarget(1.01, 9.0, ess_share=0.5)
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0])
    plain = adapt_tau(RATIOS, weights, target)
    mask = torch.tensor([True, True, True, True, False, False])
    padded = adapt_tau(
        torch.cat([RATIOS, torch.tensor([math.nan, 0.0])]),
        torch.cat([weights, torch.tensor([math.inf, -1.0])]),
        target,
        mask,
    )
    assert padded == plain


def test_sequence_weights_with_the_weights_of_training() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    new = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0], [math.nan] * 3])
    old = torch.tensor([[-1.5, -1.0, math.inf], [-2.0, -2.0, -2.0], [0.0] * 3])
    advantages = torch.where(mask, 1.0, math.nan)
    # Differences 0.5, -1 and 1, 1, 1; the cap is 2.
    token = truncated_importance_weights(
        sequence_log_ratio(new, old, mask, level="token"), advantages, mask, level="token", cap=2.0
    )
    expected = [(math.exp(0.5) + math.exp(-1.0)) / 2.0, 2.0, 0.0]
    assert sequence_weights(token, mask).tolist() == pytest.approx(expected)


def test_controller_by_hand_and_resumed() -> None:
    target = TauTarget(1.01, 9.0, keep_share=1.0)
    controller = TauController(target, decay=0.75)
    # Taus of the batches: log 0.4, then log 0.8. Smoothed: 0.4, then 0.75 * 0.4 + 0.25 * 0.8 = 0.5.
    controller, first = controller.update(torch.tensor([0.1, 0.4]), torch.ones(2))
    assert math.log(first.tau) == pytest.approx(0.4) and first.reached
    second_batch = torch.tensor([0.1, 0.45, 0.8, 0.2])
    after, second = controller.update(second_batch, torch.ones(4))
    assert math.log(second.tau) == pytest.approx(0.5)
    # It has not arrived: 0.8 is dropped still, and the choice says what really is kept.
    assert (second.keep_share, second.reached) == (0.75, False)
    assert "kept responses 0.7500 N" in second.reason
    state = json.loads(json.dumps(controller.state_dict()))
    resumed = TauController(target, decay=0.75).with_state(state)
    assert resumed.update(second_batch, torch.ones(4)) == (after, second)
    with pytest.raises(DataError, match="fields"):
        controller.with_state({"tau": 1.0})


def test_bad_targets_and_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="exactly one target"):
        TauTarget(1.1, 2.0)
    with pytest.raises(ConfigError, match="exactly one target"):
        TauTarget(1.1, 2.0, ess_share=0.5, keep_share=0.5)
    with pytest.raises(ConfigError, match="tau_max"):
        TauTarget(2.0, 1.5, ess_share=0.5)
    with pytest.raises(ConfigError, match="tau_min"):
        TauTarget(0.5, 1.5, ess_share=0.5)
    with pytest.raises(ConfigError, match="decay"):
        TauController(TauTarget(1.1, 2.0, ess_share=0.5), decay=1.0)
    target = TauTarget(1.1, 2.0, ess_share=0.5)
    with pytest.raises(DataError, match="0 responses"):
        adapt_tau(torch.ones(0), torch.ones(0), target)
    with pytest.raises(DataError, match="1 have a weight below 0"):
        adapt_tau(torch.ones(2), torch.tensor([1.0, -1.0]), target)
    with pytest.raises(DataError, match="weights has shape"):
        adapt_tau(torch.ones(2), torch.ones(2, 3), target)
    with pytest.raises(TrainingError, match="weights holds 1"):
        adapt_tau(torch.ones(2), torch.tensor([1.0, math.nan]), target)
