"""Means, win rates and how far they can be trusted, in fp64 and with numpy alone.

Values of one prompt or question stand on one answer and are not independent, so resampling draws
whole prompts (a cluster bootstrap; Cameron, Gelbach and Miller, 2008). scipy.stats has neither
clusters nor half wins, and a leaderboard need not wait for its import.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tasks.errors import DataError, TrainingError

Q = TypeVar("Q", bound=Hashable)
Column = NDArray[np.float64]
Index = NDArray[np.integer[Any]]

_Z_95: Final = 1.959963984540054
_TAILS: Final = (0.025, 0.975)


class Interval(NamedTuple):
    """The ends of a 95 % confidence interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A value and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


# Means and their standard errors.


@dataclass(frozen=True)
class ClusteredMean:
    """A mean of n values that are not independent within a cluster.

    Attributes:
        standard_error: None for one cluster, which says nothing of the spread between clusters.
    """

    value: float
    standard_error: float | None
    n: int
    n_clusters: int


def clustered_mean(values: ArrayLike, clusters: ArrayLike | None = None) -> ClusteredMean:
    """Return a mean and its standard error when values of one cluster move together.

    With ``d_g`` the sum over cluster g of ``value - mean``, G clusters and n values::

        SE = sqrt(G / (G - 1) * sum_g d_g^2) / n

    which for clusters of one is the usual ``std / sqrt(n)``.

    Args:
        values: ``(N,)``, N at least 1.
        clusters: ``(N,)`` integers, equal = one cluster; None for independent values.
    """
    column = np.asarray(values, np.float64)
    index = _cluster_index(clusters, len(column))
    n, n_clusters = len(column), int(index.max()) + 1
    mean = column.mean()
    error = None
    if n_clusters > 1:
        sums = np.bincount(index, column - mean)
        error = math.sqrt(n_clusters / (n_clusters - 1) * float(sums @ sums)) / n
    return ClusteredMean(float(mean), error, n, n_clusters)


def standard_error(values: Sequence[float]) -> float | None:
    """Return ``s / sqrt(n)`` of independent values; None for fewer than two."""
    return clustered_mean(values).standard_error if values else None


def _cluster_index(clusters: ArrayLike | None, n: int) -> Index:
    """Return ``(N,)`` indices from 0 to G - 1, in the order of the ids."""
    if clusters is None:
        return np.arange(n)
    ids = np.asarray(clusters)
    assert ids.shape == (n,) and ids.dtype.kind == "i", f"{ids.shape} of {ids.dtype} for {n} rows"
    return np.unique(ids, return_inverse=True)[1]


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes:
        standard_error: None for one seed, which says nothing about the spread.
        n: seeds.
    """

    mean: float
    standard_error: float | None
    n: int


def seed_mean(values: Sequence[float]) -> SeedMean:
    """Return mean and standard error of one figure per seed.

    Raises:
        DataError: no value, or one that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise DataError(
            f"The figures over seeds are {list(values)}",
            "one finite figure at least",
            "look at the runs of these seeds",
        )
    found = clustered_mean(values)
    return SeedMean(found.value, found.standard_error, found.n)


def paired_difference(
    values: Mapping[int, float], reference: Mapping[int, float]
) -> SeedMean | None:
    """Return mean and standard error of ``values - reference`` within the seeds that both have.

    A seed decides the data, the models and the sampling, so the difference within a seed varies
    less than either figure does.

    Args:
        values, reference: figures by seed.

    Returns:
        None where no seed is in both.

    Raises:
        DataError: a figure that is not finite.
    """
    shared = [seed for seed in values if seed in reference]
    return seed_mean([values[seed] - reference[seed] for seed in shared]) if shared else None


# Intervals.


def wilson_interval(correct: float, n: int) -> Interval:
    """Return Wilson's 95 % score interval of a proportion (1927).

    With ``p = correct / n``::

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    A tie enters as half a success, so ``correct`` may end in .5, which scipy's `binomtest` refuses.
    Half credits spread less than the successes and failures that the formula assumes, so with ties
    the interval is a little too wide.
    """
    assert n > 0 and 0.0 <= correct <= n, f"{correct} of {n}"
    p, ratio = correct / n, _Z_95 * _Z_95 / n
    centre = (p + ratio / 2.0) / (1.0 + ratio)
    half = _Z_95 * math.sqrt(p * (1.0 - p) / n + ratio / (4.0 * n)) / (1.0 + ratio)
    return Interval(max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


@dataclass(frozen=True)
class Bootstrap:
    """Replicates of prompts drawn with replacement, each with all its rows."""

    replicates: int = 1000
    seed: int = 0

    def draw(self, n: int) -> Index:
        """Return ``(R, n)`` indices below n, a replicate in each row."""
        # The stream of a RandomState never changes, and torch's generator has the same one.
        generator = np.random.RandomState(self.seed % 2**32)
        return generator.randint(2**32, size=(self.replicates, n), dtype=np.uint32) % np.uint32(n)


def _percentiles(replicates: Column) -> Interval:
    low, high = np.quantile(replicates, _TAILS).tolist()
    return Interval(low, high)


def _mean_interval(totals: Column, counts: Column, drawn: Index) -> Interval:
    """Return the interval of the mean over all values from the sum and the count of each cluster.

    Args:
        totals, counts: ``(G,)``; drawn: ``(R, G)`` clusters of each replicate.
    """
    return _percentiles(totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1))


# Judgments, with the question as the unit: both turns of a question, and its repeats.

_QUESTION_RESAMPLES: Final = 2000


@dataclass(frozen=True)
class Agreement:
    """How far repeats of one judgment agree.

    Attributes:
        n_pairs: pairs of repeats that were compared.
        equal: share of the pairs with the same outcome.
        mean_difference: mean absolute difference of a pair; None for outcomes without a distance.
    """

    n_pairs: int
    equal: float
    mean_difference: float | None


def clustered_interval(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over all values and its bootstrap interval over clusters.

    Args:
        clusters: the values of each question, at least one.
    """
    totals, counts = np.array([(sum(values), len(values)) for values in clusters], np.float64).T
    generator = np.random.RandomState([0])
    drawn = generator.random_sample((_QUESTION_RESAMPLES, len(totals))) * len(totals)
    interval = _mean_interval(totals, counts, drawn.astype(np.intp))
    return Estimate(float(totals.sum() / counts.sum()), *interval)


def paired_interval(
    ours: Mapping[Q, Mapping[int, float]], theirs: Mapping[Q, Mapping[int, float]]
) -> tuple[Estimate, int]:
    """Return the mean of ours - theirs over what both were judged on, and how many that were.

    Args:
        ours, theirs: score by turn, by question. What only one side has is left out.

    Raises:
        DataError: nothing was judged on both sides.
    """
    differences = [
        [ours[question][turn] - theirs[question][turn] for turn in sorted(shared)]
        for question in ours
        if (shared := set(ours[question]) & set(theirs.get(question, {})))
    ]
    if not differences:
        raise DataError(
            "The two models have no judged question in common",
            "judgments of the same questions",
            "judge both models on the same question file",
        )
    return clustered_interval(differences), sum(map(len, differences))


def agreement(groups: Sequence[Sequence[float]]) -> Agreement | None:
    """Compare all pairs of repeats of each rating; None where nothing was repeated."""
    pairs = [pair for values in groups for pair in combinations(values, 2)]
    if not pairs:
        return None
    equal, difference = fmean(a == b for a, b in pairs), fmean(abs(a - b) for a, b in pairs)
    return Agreement(len(pairs), equal, difference)


def label_agreement(groups: Sequence[Sequence[str]]) -> Agreement | None:
    """Compare all pairs of repeats of each verdict; None where nothing was repeated."""
    pairs = [pair for values in groups for pair in combinations(values, 2)]
    return Agreement(len(pairs), fmean(a == b for a, b in pairs), None) if pairs else None


# Two policies on the same prompts. Row i holds one response of each to the same prompt.

LengthFit = Literal["fitted", "separable", "equal_lengths", "equal_results", "constant_difference"]


@dataclass(frozen=True)
class Side:
    """One policy's responses.

    Attributes:
        scores: ``(N,)`` higher is better.
        lengths: ``(N,)`` tokens.
    """

    scores: Column
    lengths: Column


@dataclass(frozen=True)
class PlainWinRate:
    """Share of rows that the policy wins, a tie counted as a half.

    Attributes:
        wilson: for independent rows; too narrow where a prompt has several.
        bootstrap: over prompts; of no width where every prompt has the same result.
    """

    value: float
    wilson: Interval
    bootstrap: Interval
    n_wins: int
    n_ties: int
    n_losses: int
    n_prompts: int

    @property
    def n(self) -> int:
        """Rows compared."""
        return self.n_wins + self.n_ties + self.n_losses

    @property
    def interval(self) -> Interval:
        """Wilson's for one row per prompt, else the hull of both, which fails at neither end."""
        if self.n == self.n_prompts:
            return self.wilson
        return Interval(
            min(self.wilson.low, self.bootstrap.low), max(self.wilson.high, self.bootstrap.high)
        )


@dataclass(frozen=True)
class LengthControlledWinRate:
    """The win rate that a logistic regression gives at equal length.

    Attributes:
        value: probability of a win at a length difference of 0; None where it is unknown.
        interval: bootstrap over prompts; None likewise.
        outcome: ``fitted``; ``separable`` (wins and losses lie on two sides of one length
            difference, of which 0 tokens has not both: the maximum likelihood is at infinity, and
            the rate is what a tiny ridge leaves, near 0, one half or 1); ``equal_lengths`` (nothing
            to control for) and ``equal_results`` (all rows won, all lost or all tied: nothing to
            explain), where the plain rate and its interval hold; ``constant_difference`` (all rows
            differ by the same number of tokens: length and quality cannot be told apart).
        log_odds_per_std: change of the log odds of a win when the policy's response becomes longer
            by one standard deviation of the length difference.
        is_extrapolated: a difference of 0 tokens lies outside of all that was observed.
    """

    value: float | None
    interval: Interval | None
    outcome: LengthFit
    log_odds_per_std: float
    is_extrapolated: bool

    @property
    def known(self) -> tuple[float, Interval] | None:
        """Rate and interval where they say something; not for separable or constant lengths."""
        if self.value is None or self.interval is None or self.outcome == "separable":
            return None
        return self.value, self.interval


@dataclass(frozen=True)
class PolicyComparison:
    """A policy against the base, on the same prompts.

    Attributes:
        score_difference: policy less base, per row, clustered by prompt.
        length_difference: likewise, in tokens.
    """

    plain: PlainWinRate
    length_controlled: LengthControlledWinRate
    score_difference: ClusteredMean
    length_difference: ClusteredMean


def compare_policies(
    policy: Side, base: Side, prompts: ArrayLike, bootstrap: Bootstrap
) -> PolicyComparison:
    """Compare two policies on N rows, with and without control for length.

    Args:
        prompts: ``(N,)`` integers, equal = the same prompt.

    Raises:
        DataError: no rows.
        TrainingError: a score that is not finite.
    """
    if not len(policy.scores):
        raise DataError("There are no scores", "one row at least", "generate for some prompts")
    for name, side in (("policy", policy), ("base", base)):
        bad = np.count_nonzero(~np.isfinite(side.scores))
        if bad:
            raise TrainingError(
                f"scores of the {name} hold {bad} value(s) that are not finite",
                "finite scores",
                "look at the model that gave them",
            )
    credit = win_credit(policy.scores, base.scores)
    longer = policy.lengths - base.lengths
    return PolicyComparison(
        plain=plain_win_rate(credit, prompts, bootstrap),
        length_controlled=length_controlled_win_rate(credit, longer, prompts, bootstrap),
        score_difference=clustered_mean(policy.scores - base.scores, prompts),
        length_difference=clustered_mean(longer, prompts),
    )


def win_credit(policy_scores: ArrayLike, base_scores: ArrayLike) -> Column:
    """Return ``(N,)`` 1 where the policy scores higher, 0 where the base does, 0.5 at a tie."""
    margin = np.asarray(policy_scores, np.float64) - np.asarray(base_scores, np.float64)
    return 0.5 + 0.5 * np.sign(margin)


def plain_win_rate(credit: Column, prompts: ArrayLike, bootstrap: Bootstrap) -> PlainWinRate:
    """Return the mean credit with Wilson's and the prompt-clustered bootstrap interval.

    Args:
        credit: ``(N,)`` from `win_credit`.
        prompts: ``(N,)`` integers, equal = the same prompt.
    """
    clusters = _cluster_index(prompts, len(credit))
    n, won = len(credit), float(credit.sum())
    totals = np.bincount(clusters, credit).astype(np.float64)
    counts = np.bincount(clusters).astype(np.float64)
    return PlainWinRate(
        value=won / n,
        wilson=wilson_interval(won, n),
        bootstrap=_mean_interval(totals, counts, bootstrap.draw(len(counts))),
        n_wins=int((credit == 1.0).sum()),
        n_ties=int((credit == 0.5).sum()),
        n_losses=int((credit == 0.0).sum()),
        n_prompts=len(counts),
    )


def length_controlled_win_rate(
    credit: Column, longer: Column, prompts: ArrayLike, bootstrap: Bootstrap
) -> LengthControlledWinRate:
    """Return the win rate at equal length (the idea of Dubois et al. 2024, AlpacaEval 2).

    ``P(win) = sigmoid(a + b x)`` with x the length difference, centred and in standard deviations,
    is fitted to the credits (a tie is half a win and half a loss); the rate is its value where the
    difference is 0 tokens. Where length has no effect that is the plain win rate.

    Args:
        credit: ``(N,)`` from `win_credit`.
        longer: ``(N,)`` length of policy less base, in tokens.
        prompts: ``(N,)`` integers, equal = the same prompt.

    Raises:
        TrainingError: the fit does not converge.
    """
    low, high = longer.min(), longer.max()
    is_extrapolated = not low <= 0.0 <= high
    if low == high != 0.0:
        return LengthControlledWinRate(None, None, "constant_difference", 0.0, is_extrapolated)
    if low == high or credit.min() == credit.max():
        outcome: LengthFit = "equal_results" if low < high else "equal_lengths"
        plain = plain_win_rate(credit, prompts, bootstrap)
        return LengthControlledWinRate(plain.value, plain.interval, outcome, 0.0, is_extrapolated)

    mean, std = longer.mean(), longer.std()
    x = (longer - mean) / std

    def at_equal_length(coefficients: Column) -> Column:
        """Return the win rates (R,) of coefficients (R, 2)."""
        return _sigmoid(coefficients @ np.array([1.0, -mean / std]))

    clusters = _cluster_index(prompts, len(credit))
    drawn = bootstrap.draw(int(clusters.max()) + 1)
    block = max(1, _BLOCK // len(credit))
    rates = [
        at_equal_length(fit_logistic(x, credit, _row_weights(clusters, part)))
        for part in np.split(drawn, range(block, len(drawn), block))
    ]
    whole = fit_logistic(x, credit, np.full((1, len(credit)), 1.0 / len(credit)))
    return LengthControlledWinRate(
        value=float(at_equal_length(whole)[0]),
        interval=_percentiles(np.concatenate(rates)),
        outcome="separable" if _is_separable(longer, credit) else "fitted",
        log_odds_per_std=float(whole[0, 1]),
        is_extrapolated=is_extrapolated,
    )


def _row_weights(clusters: Index, drawn: Index) -> Column:
    """Return ``(R, N)`` weights of the rows of drawn clusters, the sum of each replicate 1."""
    counts = np.zeros(drawn.shape)
    np.add.at(counts, (np.arange(len(drawn))[:, None], drawn), 1.0)
    weights = counts[:, clusters]
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _is_separable(longer: Column, credit: Column) -> bool:
    """Return whether some length difference has no win on one side and no loss on the other.

    A tie is half of each, so it may only lie on the border. Where wins and losses both occur at a
    difference of 0, their share there is the rate, however steep the rest, and this is False.
    """
    there = credit[longer == 0.0]
    if (there > 0.0).any() and (there < 1.0).any():
        return False
    wins, losses = longer[credit > 0.0], longer[credit < 1.0]
    return bool(losses.max() <= wins.min() or wins.max() <= losses.min())


# Logistic regression on one variable, for many weightings of the same rows at once: with
# scikit-learn, which fits one at a time, the bootstrap takes 20 times as long.

# Rows of all replicates that are in memory at once.
_BLOCK: Final = 2_000_000
# Curvature added to the mean log loss: no finite fit moves visibly, and separable rows get one.
_RIDGE: Final = 1e-6
_GRADIENT_TOLERANCE: Final = 1e-12
_NEWTON_STEPS: Final = 200
_HALVINGS: Final = 40


def fit_logistic(x: Column, credit: Column, weights: Column) -> Column:
    """Return the ``(R, 2)`` a and b that minimise the log loss of ``sigmoid(a + b x)``.

    Damped Newton steps on the weighted mean log loss plus ``1e-6 / 2 (a^2 + b^2)``.

    Args:
        x: ``(N,)``, of mean about 0 and standard deviation about 1.
        credit: ``(N,)`` from 0 (loss) to 1 (win).
        weights: ``(R, N)``, each row sums to 1.

    Raises:
        TrainingError: a gradient that stays above the tolerance.
    """
    design = np.stack([np.ones_like(x), x])
    products = np.stack([np.ones_like(x), x, x, x * x])

    def loss(beta: Column) -> Column:
        """Return (R,) at beta (R, 2)."""
        z = beta @ design
        fit = (weights * (np.logaddexp(0.0, z) - credit * z)).sum(axis=1)
        return np.asarray(fit + 0.5 * _RIDGE * (beta * beta).sum(axis=1))

    beta = np.zeros((len(weights), 2))
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(beta @ design)
        gradient = (weights * (p - credit)) @ design.T + _RIDGE * beta
        if np.abs(gradient).max() <= _GRADIENT_TOLERANCE:
            return beta
        curvature = ((weights * p * (1.0 - p)) @ products.T).reshape(-1, 2, 2) + _RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        before = loss(beta)
        for _ in range(_HALVINGS):
            # Near the minimum a good step changes the loss by less than its rounding error.
            rises = loss(beta - step) > before + 1e-14
            if not rises.any():
                break
            step[rises] *= 0.5
        beta = beta - step
    raise TrainingError(
        f"The regression on length has not converged after {_NEWTON_STEPS} Newton steps",
        f"a gradient below {_GRADIENT_TOLERANCE:g}",
        "look for lengths that differ by many orders of magnitude",
    )


def _sigmoid(z: Column) -> Column:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * z))
