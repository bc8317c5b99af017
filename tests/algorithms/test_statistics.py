"""Means, win rates and their intervals against values worked out by hand."""

from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression

from tasks.algorithms import statistics
from tasks.algorithms.statistics import (
    Agreement,
    Bootstrap,
    Column,
    Estimate,
    LengthControlledWinRate,
    PlainWinRate,
    SeedMean,
    Side,
    agreement,
    clustered_interval,
    clustered_mean,
    compare_policies,
    fit_logistic,
    label_agreement,
    length_controlled_win_rate,
    paired_difference,
    paired_interval,
    plain_win_rate,
    seed_mean,
    standard_error,
    wilson_interval,
    win_credit,
)
from tasks.errors import DataError, TrainingError

FEW = Bootstrap(replicates=200)


def _values(*values: float) -> Column:
    return np.array(values, np.float64)


def _repeat(*parts: tuple[float, int]) -> Column:
    return np.repeat([value for value, _ in parts], [n for _, n in parts]).astype(np.float64)


def _plain(credit: Column, bootstrap: Bootstrap = FEW) -> PlainWinRate:
    return plain_win_rate(credit, np.arange(len(credit)), bootstrap)


def _at_equal_length(
    credit: Column, longer: Column, bootstrap: Bootstrap = FEW
) -> LengthControlledWinRate:
    return length_controlled_win_rate(credit, longer, np.arange(len(credit)), bootstrap)


# --- Wilson's interval


def test_wilson_interval_of_three_in_four(monkeypatch: pytest.MonkeyPatch) -> None:
    # z = 2, p = 0.75, n = 4: ratio 1; centre (0.75 + 0.5) / 2 = 0.625;
    # half 2 sqrt(0.75 * 0.25 / 4 + 1 / 16) / 2 = sqrt(0.046875 + 0.0625) = 0.330719.
    monkeypatch.setattr(statistics, "_Z_95", 2.0)
    low, high = wilson_interval(3, 4)
    assert low == pytest.approx(0.625 - 0.33071891, abs=1e-8)
    assert high == pytest.approx(0.625 + 0.33071891, abs=1e-8)


def test_wilson_interval_at_the_ends() -> None:
    # p = 1: centre + half = (1 + r / 2 + r / 2) / (1 + r) = 1 and centre - half = 1 / (1 + r).
    low, high = wilson_interval(10, 10)
    assert low == pytest.approx(1.0 / (1.0 + 1.959963984540054**2 / 10))
    assert high == 1.0
    low, high = wilson_interval(0, 1)
    assert low == 0.0
    assert 0.0 < high < 1.0


@given(st.integers(1, 3000), st.floats(0.0, 1.0))
def test_wilson_interval_holds_the_proportion(n: int, share: float) -> None:
    correct = round(2 * n * share) / 2
    low, high = wilson_interval(correct, n)
    assert 0.0 <= low <= correct / n <= high <= 1.0
    if correct == int(correct):
        known = binomtest(int(correct), n).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((known.low, known.high), abs=1e-12)


# --- plain win rate


def test_credit_of_wins_ties_and_losses() -> None:
    ours, theirs = _values(2.0, 1.0, 0.0, 1.2), _values(1.0, 1.0, 1.0, 1.0)
    assert win_credit(ours, theirs).tolist() == [1.0, 0.5, 0.0, 1.0]


def test_plain_rate_counts_and_wilson() -> None:
    found = _plain(_values(1.0, 1.0, 0.5, 0.0))
    assert (found.n_wins, found.n_ties, found.n_losses, found.n_prompts) == (2, 1, 1, 4)
    assert found.value == 0.625
    assert tuple(found.wilson) == wilson_interval(2.5, 4)
    assert found.interval == found.wilson


def test_bootstrap_of_rows_has_the_binomial_spread() -> None:
    # 100 rows, 60 won: standard error sqrt(0.6 * 0.4 / 100) = 0.04899, so 0.6 +- 0.0960.
    credit = _repeat((1.0, 60), (0.0, 40))
    low, high = _plain(credit, Bootstrap(4000)).bootstrap
    assert low == pytest.approx(0.6 - 0.0960, abs=0.015)
    assert high == pytest.approx(0.6 + 0.0960, abs=0.015)


def test_rows_of_one_prompt_are_drawn_together() -> None:
    # 25 prompts of 4 equal rows each, 15 won: as wide as 25 rows, sqrt(0.24 / 25) = 0.09798,
    # which is twice as wide as 100 independent rows.
    credit = _repeat((1.0, 60), (0.0, 40))
    prompts = np.repeat(np.arange(25), 4)
    found = plain_win_rate(credit, prompts, Bootstrap(4000))
    assert found.n_prompts == 25
    assert found.bootstrap.low == pytest.approx(0.6 - 0.1920, abs=0.03)
    assert found.bootstrap.high == pytest.approx(0.6 + 0.1920, abs=0.03)
    assert found.interval == found.bootstrap


def test_interval_is_never_empty() -> None:
    # Every resample of all wins is all wins: Wilson's end holds there.
    found = plain_win_rate(np.ones(20), np.tile(np.arange(10), 2), FEW)
    assert found.bootstrap == pytest.approx((1.0, 1.0))
    assert found.interval.low == wilson_interval(20, 20)[0]


def test_the_seed_fixes_the_interval() -> None:
    credit = (np.random.default_rng(0).random(50) < 0.5).astype(float)
    first = _plain(credit, Bootstrap(300, seed=1))
    assert _plain(credit, Bootstrap(300, seed=1)) == first
    assert _plain(credit, Bootstrap(300, seed=2)) != first


def test_prompt_ids_are_only_labels() -> None:
    credit = _values(1.0, 0.0, 1.0, 1.0)
    plain = plain_win_rate(credit, [0, 0, 1, 2], FEW)
    assert plain_win_rate(credit, [-7, -7, 40, 10**12], FEW) == plain


def test_every_replicate_draws_as_many_prompts_as_there_are() -> None:
    drawn = Bootstrap(400, seed=5).draw(2)
    assert drawn.shape == (400, 2)
    # The same draws as torch's generator of this seed.
    generator = torch.Generator().manual_seed(5)
    assert drawn.tolist() == torch.randint(2, (400, 2), generator=generator).tolist()


# --- at equal length


def test_without_an_effect_of_length_it_is_the_plain_rate() -> None:
    # 3 of 4 won where the policy is longer, and 3 of 4 where it is shorter.
    credit = _values(1, 1, 1, 0, 1, 1, 1, 0)
    longer = _values(5, 5, 5, 5, -3, -3, -3, -3)
    found = _at_equal_length(credit, longer)
    assert found.value == pytest.approx(0.75, abs=1e-5)
    assert found.log_odds_per_std == pytest.approx(0.0, abs=1e-5)
    assert found.outcome == "fitted"
    assert not found.is_extrapolated


def test_two_lengths_have_a_closed_form() -> None:
    # 3/4 won at +2 tokens (log odds log 3) and 1/2 at -1 (log odds 0): the line through both has
    # log 3 / 3 at 0, where the rate is 1 / (1 + 3^(-1/3)) = 0.590518, while the plain rate is 5/8.
    credit = _values(1, 1, 1, 0, 1, 1, 0, 0)
    longer = _values(2, 2, 2, 2, -1, -1, -1, -1)
    found = _at_equal_length(credit, longer)
    assert found.value == pytest.approx(1.0 / (1.0 + 3.0 ** (-1.0 / 3.0)), abs=1e-5)
    # The two lengths are 3 tokens or 2 standard deviations apart.
    assert found.log_odds_per_std == pytest.approx(math.log(3.0) / 2.0, abs=1e-4)
    assert found.interval is not None
    assert found.interval.low < 0.59 < found.interval.high


def test_extrapolation_is_told() -> None:
    # 1/2 won at +1 token and 3/4 at +2: log odds 0 and log 3, so -log 3 at 0: 1/4.
    credit = _values(1, 1, 0, 0, 1, 1, 1, 0)
    longer = _values(1, 1, 1, 1, 2, 2, 2, 2)
    found = _at_equal_length(credit, longer)
    assert found.value == pytest.approx(0.25, abs=1e-4)
    assert found.is_extrapolated


def test_a_tie_is_half_a_win_and_half_a_loss() -> None:
    ties = _at_equal_length(_values(1, 0.5, 0, 0.5), _values(2, 2, -1, -1))
    # Each row twice, a tie as one win and one loss.
    doubled = _at_equal_length(_values(1, 1, 1, 0, 0, 0, 1, 0), _values(2, 2, 2, 2, -1, -1, -1, -1))
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
    found = _at_equal_length(credit, _values(*longer))
    assert found.outcome == "separable"
    assert found.value == pytest.approx(expected, abs=1e-3)
    assert found.known is None


def test_wins_and_losses_at_equal_length_settle_the_rate() -> None:
    # At 0 tokens 2 of 3 are won; that all longer ones win makes the slope endless and no more.
    credit, longer = _values(1, 1, 0, 1, 1), _values(0, 0, 0, 5, 9)
    found = _at_equal_length(credit, longer)
    assert found.outcome == "fitted"
    assert found.value == pytest.approx(2 / 3, abs=1e-4)
    tied = _at_equal_length(_values(0.5, 1, 0), _values(0, 3, -3))
    assert tied.outcome == "fitted"
    assert tied.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("longer", "credit", "expected"),
    [
        ((1, 2, 3, 4), (0, 0, 1, 1), "separable"),
        ((1, 2, 3, 4), (1, 0, 0, 0), "separable"),
        # A win and a loss at the border itself do not stop the slope from growing.
        ((1, 2, 2, 3), (0, 0, 1, 1), "separable"),
        ((1, 2, 3, 4), (0, 1, 0, 1), "fitted"),
        # A tie may lie on the border and nowhere else.
        ((1, 2, 3, 4), (0, 0.5, 1, 1), "separable"),
        ((1, 2, 3, 4), (0, 0.5, 0.5, 1), "fitted"),
        ((1, 2, 3, 4), (0.5, 0.5, 0.5, 0.5), "equal_results"),
    ],
)
def test_what_is_separable(
    longer: tuple[float, ...], credit: tuple[float, ...], expected: str
) -> None:
    assert _at_equal_length(_values(*credit), _values(*longer)).outcome == expected


def test_all_won_is_the_plain_rate_with_an_honest_interval() -> None:
    found = _at_equal_length(np.ones(30), np.arange(30.0))
    assert (found.value, found.outcome) == (1.0, "equal_results")
    assert found.interval is not None
    assert found.interval.low == wilson_interval(30, 30)[0]


def test_equal_lengths_leave_the_plain_rate() -> None:
    found = _at_equal_length(_values(1, 1, 1, 0), np.zeros(4))
    assert (found.value, found.outcome, found.log_odds_per_std) == (0.75, "equal_lengths", 0.0)
    assert found.known is not None


def test_one_length_difference_for_all_cannot_be_controlled_for() -> None:
    found = _at_equal_length(_values(1, 1, 1, 0), np.full(4, 7.0), FEW)
    assert (found.value, found.interval, found.known) == (None, None, None)
    assert (found.outcome, found.is_extrapolated) == ("constant_difference", True)


def test_true_rate_at_equal_length_is_recovered() -> None:
    # P(win) = sigmoid(0.4 + 0.05 d), d about N(10, 20^2): at d = 0 it is sigmoid(0.4) = 0.5987.
    generator = torch.Generator().manual_seed(3)
    drawn = 10.0 + 20.0 * torch.randn(4000, generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(0.4 + 0.05 * drawn)
    won = (torch.rand(4000, generator=generator) < chance).double()
    credit, longer = won.numpy(), drawn.numpy()
    found = _at_equal_length(credit, longer)
    assert found.value == pytest.approx(0.5987, abs=0.025)
    assert found.interval is not None
    assert found.interval.low < 0.5987 < found.interval.high
    assert float(credit.mean()) > 0.66


def test_unit_of_length_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(60, generator=generator, dtype=torch.float64) + 0.3
    won = (torch.rand(60, generator=generator) < 0.6).double()
    credit, longer = won.numpy(), drawn.numpy()
    one = _at_equal_length(credit, longer)
    other = _at_equal_length(credit, 1000.0 * longer)
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
    found = _at_equal_length(credit, longer, Bootstrap(20))
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
    credit = torch.randint(3, (n,), generator=generator).double().numpy() / 2
    longer = torch.randint(-5, 6, (n,), generator=generator).double().numpy()
    one = _at_equal_length(credit, longer, Bootstrap(5))
    other = _at_equal_length(1.0 - credit, -longer, Bootstrap(5))
    assert one.outcome == other.outcome
    if one.value is not None and other.value is not None:
        assert one.value == pytest.approx(1.0 - other.value, abs=1e-6)


def test_fit_is_that_of_scikit_learn() -> None:
    generator = np.random.default_rng(5)
    x, credit = generator.normal(size=40), generator.integers(0, 3, 40) / 2
    weights = generator.integers(0, 4, (3, 40)).astype(float)
    weights /= weights.sum(axis=1, keepdims=True)
    # The ridge of 1e-6 is on the intercept too; a tie is half of each.
    rows, wins = np.tile(np.stack([np.ones(40), x], axis=1), (2, 1)), np.repeat([1, 0], 40)
    model = LogisticRegression(C=1e6, fit_intercept=False, solver="newton-cholesky", tol=1e-12)
    for found, weight in zip(fit_logistic(x, credit, weights), weights, strict=True):
        model.fit(rows, wins, np.concatenate([weight * credit, weight * (1 - credit)]))
        assert found == pytest.approx(model.coef_[0], abs=1e-8)


def test_a_fit_that_does_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_NEWTON_STEPS", 1)
    with pytest.raises(TrainingError, match="has not converged"):
        _at_equal_length(_values(1, 0, 1, 0), _values(3, 1, -1, 0))


# --- both together


def test_comparison_by_hand() -> None:
    policy = Side(_values(3, 1, 2, 0), _values(12, 10, 10, 11))
    base = Side(_values(1, 1, 1, 1), _values(10, 10, 11, 10))
    found = compare_policies(policy, base, [0, 0, 1, 1], FEW)
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
    assert found.standard_error == pytest.approx(float(values.std(ddof=1)) / 2.0)
    assert clustered_mean(values, [0, 0, 0, 0]).standard_error is None


@pytest.mark.parametrize(
    ("policy", "base", "error", "match"),
    [
        ([], [], DataError, "no scores"),
        ([1.0, math.nan], [1.0, 2.0], TrainingError, "scores of the policy"),
        ([1.0, 1.0], [math.inf, 2.0], TrainingError, "scores of the base"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(
    policy: list[float], base: list[float], error: type[Exception], match: str
) -> None:
    sides = [Side(_values(*scores), np.ones(len(scores))) for scores in (policy, base)]
    with pytest.raises(error, match=match):
        compare_policies(sides[0], sides[1], np.arange(len(policy)), FEW)


# --- judgments, with the question as the unit

SCORES = st.lists(st.lists(st.floats(1, 10), min_size=1, max_size=2), min_size=1, max_size=8)


def test_mean_is_over_all_values() -> None:
    # (2 + 4 + 9) / 3, not the mean of the questions' means (3 + 9) / 2.
    assert clustered_interval([[2.0, 4.0], [9.0]]).value == 5.0


@given(SCORES)
def test_interval_holds_its_value_and_lies_within_the_scores(clusters: list[list[float]]) -> None:
    value, low, high = clustered_interval(clusters)
    values = [v for cluster in clusters for v in cluster]
    slack = 1e-9
    assert min(values) - slack <= low <= high <= max(values) + slack
    assert min(values) - slack <= value <= max(values) + slack


def test_same_scores_have_no_spread_and_one_question_has_none() -> None:
    assert clustered_interval([[5.0, 5.0], [5.0]]) == Estimate(5.0, 5.0, 5.0)
    assert clustered_interval([[3.0, 4.0]]) == Estimate(3.5, 3.5, 3.5)


def test_width_is_that_of_independent_questions() -> None:
    draw = random.Random(1)
    clusters = [[value, value] for value in (draw.gauss(5.0, 1.0) for _ in range(400))]
    _, low, high = clustered_interval(clusters)
    # Two equal turns say no more than one: 2 * 1.96 / sqrt(400) = 0.196, not 0.139 as for 800.
    assert high - low == pytest.approx(0.196, rel=0.12)


def test_replicates_are_those_of_pythons_generator() -> None:
    clusters = [[float(i % 7), float(i % 5)][: 1 + i % 2] for i in range(30)]
    draw = random.Random(0)
    means = sorted(
        fmean(value for cluster in draw.choices(clusters, k=30) for value in cluster)
        for _ in range(2000)
    )
    expected = np.quantile(means, [0.025, 0.975])
    assert clustered_interval(clusters)[1:] == pytest.approx(expected, abs=1e-12)


def test_difference_is_taken_where_both_have_a_score() -> None:
    ours = {1: {1: 8.0, 2: 6.0}, 2: {1: 5.0}, 3: {1: 9.0}}
    theirs = {1: {1: 5.0}, 2: {1: 6.0, 2: 7.0}, 4: {1: 1.0}}
    interval, n = paired_interval(ours, theirs)
    # (8 - 5) and (5 - 6): mean 1.
    assert (interval.value, n) == (1.0, 2)
    with pytest.raises(DataError, match="no judged question in common"):
        paired_interval({1: {1: 2.0}}, {1: {2: 2.0}})


def test_pairing_removes_what_questions_share() -> None:
    draw = random.Random(0)
    hard = {q: draw.uniform(1, 9) for q in range(80)}
    ours = {q: {1: value + 1.0} for q, value in hard.items()}
    theirs = {q: {1: value} for q, value in hard.items()}
    interval, _ = paired_interval(ours, theirs)
    assert interval == pytest.approx(Estimate(1.0, 1.0, 1.0))


def test_agreement_of_repeats() -> None:
    # Pairs: (7, 7), (7, 9), (7, 9) and (4, 5): one of four equal; (0 + 2 + 2 + 1) / 4.
    assert agreement([[7.0, 7.0, 9.0], [4.0, 5.0], [3.0], []]) == Agreement(4, 0.25, 1.25)
    assert label_agreement([["A", "A"], ["A", "tie"]]) == Agreement(2, 0.5, None)
    assert agreement([[1.0], []]) is None
    assert label_agreement([["A"]]) is None


def test_standard_error_by_hand() -> None:
    # Variance of (0, 1, 1, 0) is 4 * 0.25 / 3 = 1/3; sqrt(1/3 / 4).
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx((1 / 12) ** 0.5)
    assert standard_error([1.0]) is None


# --- figures over seeds

RATES = st.floats(0.0, 1.0)


def test_mean_and_standard_error_by_hand() -> None:
    # Mean 0.9; squares 0.0004 + 0 + 0.0004 over n - 1 = 2 give s = 0.02; s / sqrt 3 = 0.011547.
    found = seed_mean([0.88, 0.90, 0.92])
    assert found.mean == pytest.approx(0.9)
    assert found.standard_error == pytest.approx(0.02 / math.sqrt(3))
    assert found.n == 3


def test_one_seed_has_no_standard_error() -> None:
    assert seed_mean([0.7]) == SeedMean(0.7, None, 1)


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [math.inf]])
def test_figures_that_are_none_are_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match="figures over seeds"):
        seed_mean(values)


def test_difference_is_taken_within_seeds_by_hand() -> None:
    # Both vary by 0.2 from seed to seed, the differences 0.02, 0.04, 0.06 hardly: mean 0.04,
    # s^2 = (0.0004 + 0 + 0.0004) / 2, s = 0.02, error 0.02 / sqrt 3. Unpaired it would be about
    # sqrt(2) * 0.2 / sqrt(3) = 0.16.
    reference = {3: 0.5, 4: 0.7, 5: 0.9}
    found = paired_difference({5: 0.96, 3: 0.52, 4: 0.74}, reference)
    assert found is not None
    assert found.mean == pytest.approx(0.04)
    assert found.standard_error == pytest.approx(0.02 / math.sqrt(3))


def test_only_seeds_that_both_have_count() -> None:
    # Seed 2 of the one and seed 9 of the other have no partner: 0.9 - 0.6 alone is left.
    found = paired_difference({1: 0.9, 2: 0.1}, {1: 0.6, 9: 0.0})
    assert found is not None and (found.standard_error, found.n) == (None, 1)
    assert found.mean == pytest.approx(0.3)
    assert paired_difference({1: 0.9}, {2: 0.9}) is None


@given(st.dictionaries(st.integers(0, 9), RATES, min_size=2), st.floats(-1.0, 1.0))
def test_a_constant_difference_has_no_error(values: dict[int, float], shift: float) -> None:
    found = paired_difference({seed: value + shift for seed, value in values.items()}, values)
    assert found is not None and found.standard_error is not None
    assert found.mean == pytest.approx(shift, abs=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


@given(st.lists(RATES, min_size=2, max_size=8))
def test_order_does_not_matter(values: list[float]) -> None:
    forth, back = seed_mean(values), seed_mean(values[::-1])
    assert forth.mean == pytest.approx(back.mean)
    assert forth.standard_error == pytest.approx(back.standard_error, abs=1e-12)
