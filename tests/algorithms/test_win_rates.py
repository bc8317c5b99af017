"""Win rates, their intervals and the probe KL against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.algorithms import win_rates as logistic
from tasks.algorithms.calibration import wilson_interval
from tasks.algorithms.win_rates import (
    Bootstrap,
    Side,
    cluster_index,
    clustered_mean,
    compare_policies,
    fit_logistic,
    is_separable,
    kl_probe_estimate,
    length_controlled_win_rate,
    plain_win_rate,
    replicate,
    win_credit,
)
from tasks.errors import ConfigError, DataError, TrainingError

FEW = Bootstrap(replicates=200)


def _values(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _repeat(*parts: tuple[float, int]) -> Tensor:
    return torch.cat([torch.full((n,), value, dtype=torch.float64) for value, n in parts])


# --- plain win rate


def test_credit_of_wins_ties_and_losses() -> None:
    ours, theirs = _values(2.0, 1.0, 0.0, 1.2), _values(1.0, 1.0, 1.0, 1.0)
    assert win_credit(ours, theirs).tolist() == [1.0, 0.5, 0.0, 1.0]
    # 1.25 - 1 = 0.25 is exact, and a difference of exactly the tolerance is a tie.
    ours[3] = 1.25
    assert win_credit(ours, theirs, tie_tolerance=0.25).tolist() == [1.0, 0.5, 0.0, 0.5]
    assert win_credit(ours, theirs, tie_tolerance=0.2499).tolist() == [1.0, 0.5, 0.0, 1.0]


def test_half_precision_scores_are_compared_without_rounding() -> None:
    # In bf16 the difference of these neighbours would still be exact; in fp64 it must be too.
    ours = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    assert win_credit(ours, torch.ones(2, dtype=torch.bfloat16)).tolist() == [0.5, 1.0]


def test_plain_rate_counts_and_wilson() -> None:
    found = plain_win_rate(_values(1.0, 1.0, 0.5, 0.0), bootstrap=FEW)
    assert (found.n_wins, found.n_ties, found.n_losses, found.n_prompts) == (2, 1, 1, 4)
    assert found.value == 0.625
    assert tuple(found.wilson) == wilson_interval(2.5, 4)
    assert found.interval == found.wilson


def test_bootstrap_of_rows_has_the_binomial_spread() -> None:
    # 100 rows, 60 won: standard error sqrt(0.6 * 0.4 / 100) = 0.04899, so 0.6 +- 0.0960.
    credit = _repeat((1.0, 60), (0.0, 40))
    low, high = plain_win_rate(credit, bootstrap=Bootstrap(4000)).bootstrap
    assert low == pytest.approx(0.6 - 0.0960, abs=0.015)
    assert high == pytest.approx(0.6 + 0.0960, abs=0.015)


def test_rows_of_one_prompt_are_drawn_together() -> None:
    # 25 prompts of 4 equal rows each, 15 won: as wide as 25 rows, sqrt(0.24 / 25) = 0.09798,
    # which is twice as wide as 100 independent rows.
    credit = _repeat((1.0, 60), (0.0, 40))
    prompts = torch.arange(25).repeat_interleave(4)
    found = plain_win_rate(credit, prompts, Bootstrap(4000))
    assert found.n_prompts == 25
    assert found.bootstrap.low == pytest.approx(0.6 - 0.1920, abs=0.03)
    assert found.bootstrap.high == pytest.approx(0.6 + 0.1920, abs=0.03)
    assert found.interval == found.bootstrap


def test_interval_is_never_empty() -> None:
    # Every resample of all wins is all wins: Wilson's end holds there.
    found = plain_win_rate(torch.ones(20), torch.arange(10).repeat(2), FEW)
    assert found.bootstrap == pytest.approx((1.0, 1.0))
    assert found.interval.low == wilson_interval(20, 20)[0]


def test_the_seed_fixes_the_interval() -> None:
    credit = (torch.rand(50, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    first = plain_win_rate(credit, bootstrap=Bootstrap(300, seed=1))
    assert plain_win_rate(credit, bootstrap=Bootstrap(300, seed=1)) == first
    assert plain_win_rate(credit, bootstrap=Bootstrap(300, seed=2)) != first


def test_prompt_ids_are_only_labels() -> None:
    credit = _values(1.0, 0.0, 1.0, 1.0)
    plain = plain_win_rate(credit, torch.tensor([0, 0, 1, 2]), FEW)
    assert plain_win_rate(credit, torch.tensor([-7, -7, 40, 10**12]), FEW) == plain


def test_every_replicate_draws_as_many_prompts_as_there_are() -> None:
    clusters = cluster_index(torch.tensor([5, 5, 9]), 3)
    seen: list[Tensor] = []

    def keep(weights: Tensor) -> Tensor:
        seen.append(weights)
        return weights.sum(dim=1)

    sums = replicate(Bootstrap(400), clusters, keep)
    weights = torch.cat(seen)
    assert weights.shape == (400, 3)
    torch.testing.assert_close(sums, torch.ones(400, dtype=torch.float64))
    # Two draws of two prompts: the first twice (1/2, 1/2, 0), both (1/3 each), the second twice.
    rows = {tuple(round(w, 4) for w in row) for row in weights.tolist()}
    assert rows == {(0.5, 0.5, 0.0), (0.3333, 0.3333, 0.3333), (0.0, 0.0, 1.0)}


# --- at equal length


def test_without_an_effect_of_length_it_is_the_plain_rate() -> None:
    # 3 of 4 won where the policy is longer, and 3 of 4 where it is shorter.
    credit = _values(1, 1, 1, 0, 1, 1, 1, 0)
    longer = _values(5, 5, 5, 5, -3, -3, -3, -3)
    found = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    assert found.value == pytest.approx(0.75, abs=1e-5)
    assert found.log_odds_per_std == pytest.approx(0.0, abs=1e-5)
    assert found.outcome == "fitted"
    assert not found.is_extrapolated


def test_two_lengths_have_a_closed_form() -> None:
    # 3/4 won at +2 tokens (log odds log 3) and 1/2 at -1 (log odds 0): the line through both has
    # log 3 / 3 at 0, where the rate is 1 / (1 + 3^(-1/3)) = 0.590518, while the plain rate is 5/8.
    credit = _values(1, 1, 1, 0, 1, 1, 0, 0)
    longer = _values(2, 2, 2, 2, -1, -1, -1, -1)
    found = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    assert found.value == pytest.approx(1.0 / (1.0 + 3.0 ** (-1.0 / 3.0)), abs=1e-5)
    # The two lengths are 3 tokens or 2 standard deviations apart.
    assert found.log_odds_per_std == pytest.approx(math.log(3.0) / 2.0, abs=1e-4)
    assert found.interval is not None
    assert found.interval.low < 0.59 < found.interval.high


def test_extrapolation_is_told() -> None:
    # 1/2 won at +1 token and 3/4 at +2: log odds 0 and log 3, so -log 3 at 0: 1/4.
    credit = _values(1, 1, 0, 0, 1, 1, 1, 0)
    longer = _values(1, 1, 1, 1, 2, 2, 2, 2)
    found = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    assert found.value == pytest.approx(0.25, abs=1e-4)
    assert found.is_extrapolated


def test_a_tie_is_half_a_win_and_half_a_loss() -> None:
    ties = length_controlled_win_rate(_values(1, 0.5, 0, 0.5), _values(2, 2, -1, -1), None, FEW)
    # Each row twice, a tie as one win and one loss.
    doubled = length_controlled_win_rate(
        _values(1, 1, 1, 0, 0, 0, 1, 0), _values(2, 2, 2, 2, -1, -1, -1, -1), None, FEW
    )
    assert ties.value == pytest.approx(doubled.value, abs=1e-9)


@pytest.mark.parametrize(
    ("longer", "expected"),
    [
        ([-2.0, -1.0, 1.0, 2.0], 0.5),  # the border is at 0
        ([1.0, 2.0, 8.0, 9.0], 0.0),  # wins only far above 0
        ([-9.0, -8.0, -2.0, -1.0], 1.0),  # wins even below 0
    ],
)
def test_separable_rows_converge_and_are_not_trusted(longer: list[float], expected: float) -> None:
    credit = _values(0, 0, 1, 1)
    found = length_controlled_win_rate(credit, _values(*longer), bootstrap=FEW)
    assert found.outcome == "separable"
    assert found.value == pytest.approx(expected, abs=1e-3)
    assert found.known is None


def test_wins_and_losses_at_equal_length_settle_the_rate() -> None:
    # At 0 tokens 2 of 3 are won; that all longer ones win makes the slope endless and no more.
    credit, longer = _values(1, 1, 0, 1, 1), _values(0, 0, 0, 5, 9)
    found = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    assert found.outcome == "fitted"
    assert found.value == pytest.approx(2 / 3, abs=1e-4)
    tied = length_controlled_win_rate(_values(0.5, 1, 0), _values(0, 3, -3), bootstrap=FEW)
    assert tied.outcome == "fitted"
    assert tied.value == pytest.approx(0.5)


def test_what_is_separable() -> None:
    x = _values(0, 1, 2, 3)
    assert is_separable(x, _values(0, 0, 1, 1))
    assert is_separable(x, _values(1, 0, 0, 0))
    # A win and a loss at the border itself do not stop the slope from growing.
    assert is_separable(_values(0, 1, 1, 2), _values(0, 0, 1, 1))
    assert not is_separable(x, _values(0, 1, 0, 1))
    # A tie may lie on the border and nowhere else.
    assert is_separable(x, _values(0, 0.5, 1, 1))
    assert not is_separable(x, _values(0, 0.5, 0.5, 1))
    assert not is_separable(x, _values(0.5, 0.5, 0.5, 0.5))


def test_all_won_is_the_plain_rate_with_an_honest_interval() -> None:
    found = length_controlled_win_rate(torch.ones(30), torch.arange(30.0), bootstrap=FEW)
    assert (found.value, found.outcome) == (1.0, "equal_results")
    assert found.interval is not None
    assert found.interval.low == wilson_interval(30, 30)[0]


def test_equal_lengths_leave_the_plain_rate() -> None:
    found = length_controlled_win_rate(_values(1, 1, 1, 0), torch.zeros(4), bootstrap=FEW)
    assert (found.value, found.outcome, found.log_odds_per_std) == (0.75, "equal_lengths", 0.0)
    assert found.known is not None


def test_one_length_difference_for_all_cannot_be_controlled_for() -> None:
    found = length_controlled_win_rate(_values(1, 1, 1, 0), torch.full((4,), 7.0), bootstrap=FEW)
    assert (found.value, found.interval, found.known) == (None, None, None)
    assert (found.outcome, found.is_extrapolated) == ("constant_difference", True)


def test_true_rate_at_equal_length_is_recovered() -> None:
    # P(win) = sigmoid(0.4 + 0.05 d), d about N(10, 20^2): at d = 0 it is sigmoid(0.4) = 0.5987.
    generator = torch.Generator().manual_seed(3)
    longer = 10.0 + 20.0 * torch.randn(4000, generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(0.4 + 0.05 * longer)
    credit = (torch.rand(4000, generator=generator) < chance).double()
    found = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    assert found.value == pytest.approx(0.5987, abs=0.025)
    assert found.interval is not None
    assert found.interval.low < 0.5987 < found.interval.high
    assert float(credit.mean()) > 0.66


def test_unit_of_length_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(4)
    longer = torch.randn(60, generator=generator, dtype=torch.float64) + 0.3
    credit = (torch.rand(60, generator=generator) < 0.6).double()
    one = length_controlled_win_rate(credit, longer, bootstrap=FEW)
    other = length_controlled_win_rate(credit, 1000.0 * longer, bootstrap=FEW)
    assert other.value == pytest.approx(one.value, abs=1e-9)
    assert other.interval == pytest.approx(one.interval, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-10_000, 10_000)),
        min_size=1,
        max_size=30,
    )
)
def test_any_rows_give_probabilities(rows: list[tuple[float, int]]) -> None:
    credit = _values(*(row[0] for row in rows))
    longer = _values(*(float(row[1]) for row in rows))
    found = length_controlled_win_rate(credit, longer, bootstrap=Bootstrap(20))
    if found.value is None:
        assert found.outcome == "constant_difference"
    else:
        assert found.interval is not None
        assert 0.0 <= found.interval.low <= found.interval.high <= 1.0
        assert 0.0 <= found.value <= 1.0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10_000))
def test_mirrored_roles_mirror_the_rate(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    credit = torch.randint(3, (n,), generator=generator).double() / 2
    longer = torch.randint(-5, 6, (n,), generator=generator).double()
    one = length_controlled_win_rate(credit, longer, bootstrap=Bootstrap(5))
    other = length_controlled_win_rate(1.0 - credit, -longer, bootstrap=Bootstrap(5))
    assert one.outcome == other.outcome
    if one.value is not None and other.value is not None:
        assert one.value == pytest.approx(1.0 - other.value, abs=1e-6)


def test_fit_has_no_gradient_left_and_agrees_with_weights() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, generator=generator, dtype=torch.float64)
    credit = torch.randint(2, (40,), generator=generator).double()
    counts = torch.randint(1, 4, (40,), generator=generator)
    weighted = fit_logistic(x, credit, (counts / counts.sum()).double().unsqueeze(0))
    # A weight of k is the row k times.
    repeated = fit_logistic(
        x.repeat_interleave(counts),
        credit.repeat_interleave(counts),
        torch.full((1, int(counts.sum())), 1.0 / int(counts.sum()), dtype=torch.float64),
    )
    assert weighted[0].tolist() == pytest.approx(repeated[0].tolist(), abs=1e-6)
    z = repeated[0, 0] + repeated[0, 1] * x
    residual = counts * (torch.sigmoid(z) - credit) / counts.sum()
    # The ridge of 1e-6 is all that the gradient of the log loss is balanced by.
    assert abs(float(residual.sum())) < 1e-5
    assert abs(float((residual * x).sum())) < 1e-5


def test_a_fit_that_does_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "_NEWTON_STEPS", 1)
    with pytest.raises(TrainingError, match="has not converged for"):
        length_controlled_win_rate(_values(1, 0, 1, 0), _values(3, 1, -1, 0), bootstrap=FEW)


# --- both together


def test_comparison_by_hand() -> None:
    policy = Side(_values(3, 1, 2, 0), torch.tensor([12, 10, 10, 11]))
    base = Side(_values(1, 1, 1, 1), torch.tensor([10, 10, 11, 10]))
    found = compare_policies(policy, base, torch.tensor([0, 0, 1, 1]), bootstrap=FEW)
    assert found.plain.value == 0.625
    # Lengths differ by 2, 0, -1, 1: mean 0.5; by prompt the deviations sum to 1 and -1, so
    # SE = sqrt(2 / 1 * 2) / 4 = 0.5.
    assert (found.length_difference.value, found.length_difference.standard_error) == (0.5, 0.5)
    # Scores differ by 2, 0, 1, -1: mean 0.5; by prompt 1 and -1 again.
    assert found.score_difference.value == 0.5
    assert found.score_difference.n_clusters == 2
    assert found.length_controlled.outcome == "fitted"


def test_clustered_error_of_independent_values_is_the_usual_one() -> None:
    values = _values(1, 2, 4, 9)
    found = clustered_mean(values)
    assert found.standard_error == pytest.approx(float(values.std()) / 2.0)
    assert clustered_mean(values, torch.zeros(4, dtype=torch.long)).standard_error is None


@pytest.mark.parametrize(
    ("policy", "base", "prompts", "error", "match"),
    [
        ([], [], None, DataError, "no scores"),
        ([1.0], [1.0, 2.0], None, DataError, "scores of the base"),
        ([1.0, math.nan], [1.0, 2.0], None, TrainingError, "scores of the policy"),
        ([1.0, 1.0], [math.inf, 2.0], None, TrainingError, "scores of the base"),
        ([1.0, 2.0], [1.0, 2.0], [0], DataError, "prompts"),
        ([1.0, 2.0], [1.0, 2.0], [0.0, 1.0], DataError, "integers"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(
    policy: list[float],
    base: list[float],
    prompts: list[float] | None,
    error: type[Exception],
    match: str,
) -> None:
    sides = [Side(_values(*scores), torch.ones(len(scores))) for scores in (policy, base)]
    ids = None if prompts is None else torch.tensor(prompts)
    with pytest.raises(error, match=match):
        compare_policies(sides[0], sides[1], ids, bootstrap=FEW)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="replicates"):
        Bootstrap(replicates=0)
    with pytest.raises(ConfigError, match="level"):
        Bootstrap(level=95)
    with pytest.raises(ConfigError, match="tie_tolerance"):
        win_credit(_values(1), _values(1), tie_tolerance=-0.1)


# --- probe KL


def test_probe_kl_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, math.nan], [math.nan, math.nan]])
    base = torch.tensor([[-1.5, -1.0], [-1.5, math.inf], [0.0, 0.0]])
    found = kl_probe_estimate(logprobs, base, mask)
    # d = 0.5, -1 | 1: mean 1/6; deviations by response 1/3 - 7/6 = -5/6 and 5/6, so
    # SE = sqrt(2 / 1 * 2 * 25 / 36) / 3 = 5/9.
    assert found.k1.value == pytest.approx(1 / 6)
    assert found.k1.standard_error == pytest.approx(5 / 9)
    assert (found.k1.n, found.k1.n_clusters) == (3, 2)
    # e^-0.5 - 1 + 0.5 = 0.106531, e^1 - 1 - 1 = 0.718282, e^-1 - 1 + 1 = 0.367879.
    assert found.k3.value == pytest.approx((0.106531 + 0.718282 + 0.367879) / 3, abs=1e-6)
    # -0.5 and 1 per response.
    assert found.per_response.value == pytest.approx(0.25)
    assert found.per_response.standard_error == pytest.approx(0.75)


def test_both_estimates_find_the_true_kl() -> None:
    policy, base = _values(0.6, 0.3, 0.1), _values(0.2, 0.3, 0.5)
    true = float((policy * (policy / base).log()).sum())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(policy.expand(2000, -1), 10, True, generator=generator)
    found = kl_probe_estimate(
        policy.log()[tokens], base.log()[tokens], torch.ones(2000, 10, dtype=torch.bool)
    )
    for estimate in (found.k1, found.k3):
        assert estimate.standard_error is not None
        assert abs(estimate.value - true) < 4 * estimate.standard_error
    assert found.per_response.value == pytest.approx(10 * found.k1.value)


def test_probe_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no response token"):
        kl_probe_estimate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3).bool())
    with pytest.raises(TrainingError, match="not finite"):
        kl_probe_estimate(torch.zeros(1, 1), torch.tensor([[math.nan]]), torch.ones(1, 1).bool())
