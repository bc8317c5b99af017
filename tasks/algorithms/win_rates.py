"""Two policies on the same prompts: win rates, at equal length too, and the KL between them.

Row i holds one response of each policy to the same prompt, and a prompt may have several rows. All
computations are in fp64, and every random draw comes from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tasks.algorithms.calibration import wilson_interval
from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.masking import (
    check_count,
    check_finite,
    check_in_range,
    check_rank,
    check_shape,
)
from tasks.errors import DataError, TrainingError

# Logistic regression on one variable, for many weightings of the same rows at once.

# Curvature added to the mean log loss: no finite fit moves visibly, and separable rows get one.
_RIDGE: Final = 1e-6
_GRADIENT_TOLERANCE: Final = 1e-12
_NEWTON_STEPS: Final = 200
_HALVINGS: Final = 40


def fit_logistic(x: Tensor, credit: Tensor, weights: Tensor) -> Tensor:
    """Return the ``(R, 2)`` a and b that minimise the log loss of ``sigmoid(a + b x)``.

    Damped Newton steps in fp64 on the weighted mean log loss plus ``1e-6 / 2 (a^2 + b^2)``.

    Args:
        x: ``(N,)``, of mean about 0 and standard deviation about 1.
        credit: ``(N,)`` from 0 (loss) to 1 (win).
        weights: ``(R, N)``, each row sums to 1.

    Raises:
        TrainingError: a gradient that stays above the tolerance.
    """
    beta = torch.zeros(len(weights), 2, dtype=torch.float64)
    active = torch.arange(len(weights))
    for _ in range(_NEWTON_STEPS):
        loss = _LogLoss(x, credit, weights[active])
        gradient = loss.gradient(beta[active])
        open_ = gradient.abs().amax(dim=1) > _GRADIENT_TOLERANCE
        if not bool(open_.any()):
            return beta
        active = active[open_]
        loss = _LogLoss(x, credit, weights[active])
        step = loss.newton_step(beta[active], gradient[open_])
        beta[active] = _descend(loss, beta[active], step)
    raise TrainingError(
        f"The regression on length has not converged for {len(active)} of {len(weights)} samples "
        f"after {_NEWTON_STEPS} Newton steps",
        f"a gradient below {_GRADIENT_TOLERANCE:g}",
        "look for lengths that differ by many orders of magnitude",
    )


def is_separable(x: Tensor, credit: Tensor) -> bool:
    """Return whether some line has no win on one side and no loss on the other; x is not constant.

    A tie is half of each, so it may only lie on the line.
    """
    wins, losses = x[credit > 0.0], x[credit < 1.0]
    if not (wins.numel() and losses.numel()):
        return True
    return bool(losses.max() <= wins.min() or wins.max() <= losses.min())


@dataclass(frozen=True)
class _LogLoss:
    """Mean log loss of ``sigmoid(a + b x)`` plus ``1e-6 / 2 (a^2 + b^2)``, for R weightings.

    Args:
        x, credit: ``(N,)``; weights: ``(R, N)``, each row sums to 1.
    """

    x: Tensor
    credit: Tensor
    weights: Tensor

    def value(self, beta: Tensor) -> Tensor:
        """Return the loss (R,) at beta (R, 2)."""
        z = beta[:, :1] + beta[:, 1:] * self.x
        fit = (self.weights * (softplus(z) - self.credit * z)).sum(dim=1)
        return fit + 0.5 * _RIDGE * beta.square().sum(dim=1)

    def gradient(self, beta: Tensor) -> Tensor:
        """Return the gradient (R, 2) at beta (R, 2)."""
        z = beta[:, :1] + beta[:, 1:] * self.x
        slope = self.weights * (torch.sigmoid(z) - self.credit)
        return torch.stack([slope.sum(dim=1), slope @ self.x], dim=1) + _RIDGE * beta

    def newton_step(self, beta: Tensor, gradient: Tensor) -> Tensor:
        """Return ``H^-1 g``; the 2 x 2 inverse is written out."""
        p = torch.sigmoid(beta[:, :1] + beta[:, 1:] * self.x)
        curve = self.weights * p * (1.0 - p)
        aa = curve.sum(dim=1) + _RIDGE
        ab = curve @ self.x
        bb = curve @ self.x.square() + _RIDGE
        ga, gb = gradient.unbind(dim=1)
        return torch.stack([bb * ga - ab * gb, aa * gb - ab * ga], dim=1) / (
            aa * bb - ab.square()
        ).unsqueeze(1)


def _descend(loss: _LogLoss, beta: Tensor, step: Tensor) -> Tensor:
    """Take the step, halved where the whole of it would raise the loss."""
    before = loss.value(beta)
    size = torch.ones_like(before)
    for _ in range(_HALVINGS):
        # Near the minimum a good step changes the loss by less than its rounding error.
        rises = loss.value(beta - size.unsqueeze(1) * step) > before + 1e-14
        if not bool(rises.any()):
            break
        size = torch.where(rises, 0.5 * size, size)
    return beta - size.unsqueeze(1) * step


# Means and intervals of rows that come in clusters: several responses to one prompt.

# Rows of all replicates that are in memory at once.
_BLOCK: Final = 2_000_000

Statistic = Callable[[Tensor], Tensor]


class Interval(NamedTuple):
    """Hold the ends of a confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Bootstrap:
    """How an interval is drawn: prompts with replacement, each with all its rows (percentiles).

    Attributes:
        replicates: at least 1.
        level: coverage, from 0 to 1.
    """

    replicates: int = 1000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        check_count("bootstrap.replicates", self.replicates)
        check_in_range("bootstrap.level", self.level, 0.0, 1.0)


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


def clustered_mean(values: Tensor, clusters: Tensor | None = None) -> ClusteredMean:
    """Return a mean and its standard error when values of one cluster move together.

    With ``d_g`` the sum over cluster g of ``value - mean``, G clusters and n values::

        SE = sqrt(G / (G - 1) * sum_g d_g^2) / n

    which for clusters of one is the usual ``std / sqrt(n)``.

    Args:
        values: ``(N,)``, N at least 1.
        clusters: ``(N,)`` integers, or None for independent values.
    """
    column = real_column("values", values, values.shape)
    index = cluster_index(clusters, column.numel())
    n, n_clusters = column.numel(), int(index.max()) + 1
    mean = column.mean()
    sums = torch.zeros(n_clusters, dtype=torch.float64).index_add(0, index, column - mean)
    error = None
    if n_clusters > 1:
        error = math.sqrt(n_clusters / (n_clusters - 1) * float(sums.square().sum())) / n
    return ClusteredMean(float(mean), error, n, n_clusters)


def replicate(bootstrap: Bootstrap, clusters: Tensor, statistic: Statistic) -> Tensor:
    """Return the statistic of each replicate.

    Args:
        clusters: ``(N,)`` from 0 to G - 1.
        statistic: from ``(R, N)`` weights, each row's sum 1, to ``(R,)``.
    """
    n_clusters = int(clusters.max()) + 1
    generator = torch.Generator().manual_seed(bootstrap.seed)
    block = max(1, _BLOCK // clusters.numel())
    found = []
    for start in range(0, bootstrap.replicates, block):
        shape = (min(block, bootstrap.replicates - start), n_clusters)
        drawn = torch.randint(n_clusters, shape, generator=generator)
        counts = torch.zeros(shape, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones(shape, dtype=torch.float64))
        weights = counts[:, clusters]
        found.append(statistic(weights / weights.sum(dim=1, keepdim=True)))
    return torch.cat(found)


def percentiles(values: Tensor, level: float) -> Interval:
    """Return the interval between which the middle ``level`` of ``(R,)`` values lies."""
    tails = torch.tensor([0.5 - 0.5 * level, 0.5 + 0.5 * level], dtype=torch.float64)
    low, high = torch.quantile(values, tails).tolist()
    return Interval(low, high)


def cluster_index(groups: Tensor | None, n: int) -> Tensor:
    """Return ``(N,)`` indices from 0 to G - 1, in the order of the ids.

    Args:
        groups: ``(N,)`` integers, equal = one cluster; None = every row is its own.

    Raises:
        DataError: no rows, another shape, or ids that are not integers.
    """
    if n == 0:
        raise DataError("There are no rows", "at least one", "generate for some prompts")
    if groups is None:
        return torch.arange(n)
    check_shape("prompts or clusters", groups, (n,))
    if groups.is_floating_point() or groups.dtype == torch.bool:
        raise DataError(f"Ids have dtype {groups.dtype}", "integers", "pass them as .long()")
    index: Tensor = torch.unique(groups.cpu(), return_inverse=True)[1]
    return index


def real_column(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """Return finite values of this shape in fp64, on the CPU and without a gradient."""
    check_shape(name, values, shape)
    column = values.detach().cpu().double()
    check_finite(name, column)
    return column


LengthFit = Literal["fitted", "separable", "equal_lengths", "equal_results", "constant_difference"]


@dataclass(frozen=True)
class Side:
    """One policy's responses.

    Attributes:
        scores: ``(N,)`` higher is better.
        lengths: ``(N,)`` tokens.
    """

    scores: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class PlainWinRate:
    """Share of rows that the policy wins, a tie counted as a half.

    Attributes:
        wilson: 95 % interval for independent rows; too narrow where a prompt has several.
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


@dataclass(frozen=True)
class ProbeKL:
    """KL from the policy to the base, from responses that the policy sampled.

    Attributes:
        k1, k3: nats per token, clustered by response; both estimate the same number.
        per_response: k1 summed over a response, in nats.
    """

    k1: ClusteredMean
    k3: ClusteredMean
    per_response: ClusteredMean


def compare_policies(
    policy: Side,
    base: Side,
    prompts: Tensor | None = None,
    *,
    tie_tolerance: float = 0.0,
    bootstrap: Bootstrap | None = None,
) -> PolicyComparison:
    """Compare two policies on N rows, with and without control for length.

    Args:
        prompts: ``(N,)`` integers, equal = the same prompt; None = every row has its own.
        tie_tolerance: scores that differ by no more than this are a tie.

    Raises:
        DataError: no rows, or shapes that differ.
        TrainingError: a score or length that is not finite.
    """
    drawn = bootstrap or Bootstrap()
    credit = win_credit(policy.scores, base.scores, tie_tolerance=tie_tolerance)
    better = _difference("scores", policy.scores, base.scores)
    longer = _difference("lengths", policy.lengths, base.lengths)
    clusters = cluster_index(prompts, credit.numel())
    return PolicyComparison(
        plain=plain_win_rate(credit, clusters, drawn),
        length_controlled=length_controlled_win_rate(credit, longer, clusters, drawn),
        score_difference=clustered_mean(better, clusters),
        length_difference=clustered_mean(longer, clusters),
    )


def win_credit(policy_scores: Tensor, base_scores: Tensor, *, tie_tolerance: float = 0.0) -> Tensor:
    """Return ``(N,)`` 1 where the policy scores higher, 0 where the base does, 0.5 at a tie.

    Args:
        policy_scores, base_scores: ``(N,)``, N at least 1.
        tie_tolerance: ``|policy - base|`` up to this is a tie, so 0 asks for equal scores.

    Raises:
        DataError: no rows, or shapes that differ.
        TrainingError: a score that is not finite.
    """
    check_in_range("tie_tolerance", tie_tolerance, 0.0, math.inf)
    margin = _difference("scores", policy_scores, base_scores)
    if margin.numel() == 0:
        raise DataError("There are no scores", "one row at least", "generate for some prompts")
    return torch.where(margin.abs() <= tie_tolerance, 0.5, 0.5 + 0.5 * torch.sign(margin))


def plain_win_rate(
    credit: Tensor, prompts: Tensor | None = None, bootstrap: Bootstrap | None = None
) -> PlainWinRate:
    """Return the mean credit with Wilson's and the prompt-clustered bootstrap interval.

    Args:
        credit: ``(N,)`` from `win_credit`.
        prompts: ``(N,)`` integers, or None for one row per prompt.
    """
    drawn = bootstrap or Bootstrap()
    column = real_column("credit", credit, credit.shape)
    clusters = cluster_index(prompts, column.numel())
    n, won = column.numel(), float(column.sum())
    means = replicate(drawn, clusters, lambda weights: (weights @ column).clamp(0, 1))
    return PlainWinRate(
        value=won / n,
        wilson=Interval(*wilson_interval(won, n)),
        bootstrap=percentiles(means, drawn.level),
        n_wins=int((column == 1.0).sum()),
        n_ties=int((column == 0.5).sum()),
        n_losses=int((column == 0.0).sum()),
        n_prompts=int(clusters.max()) + 1,
    )


def length_controlled_win_rate(
    credit: Tensor,
    length_difference: Tensor,
    prompts: Tensor | None = None,
    bootstrap: Bootstrap | None = None,
) -> LengthControlledWinRate:
    """Return the win rate at equal length (the idea of Dubois et al. 2024, AlpacaEval 2).

    ``P(win) = sigmoid(a + b x)`` with x the length difference, centred and in standard deviations,
    is fitted to the credits (a tie is half a win and half a loss); the rate is its value where the
    difference is 0 tokens. Where length has no effect that is the plain win rate.

    Args:
        credit: ``(N,)`` from `win_credit`.
        length_difference: ``(N,)`` policy less base, in tokens.
        prompts: ``(N,)`` integers, or None for one row per prompt.

    Raises:
        TrainingError: the fit does not converge.
    """
    drawn = bootstrap or Bootstrap()
    won = real_column("credit", credit, credit.shape)
    clusters = cluster_index(prompts, won.numel())
    longer = real_column("length_difference", length_difference, won.shape)
    low, high = float(longer.min()), float(longer.max())
    if low == high or float(won.min()) == float(won.max()):
        return _without_regression(won, longer, clusters, drawn)
    mean, std = longer.mean(), longer.std(correction=0)
    x = (longer - mean) / std

    def fit(weights: Tensor) -> Tensor:
        """Return the coefficients (B, 2) of each of B weightings (B, N)."""
        return fit_logistic(x, won, weights)

    def at_equal_length(coefficients: Tensor) -> Tensor:
        """Return the win rates (B,) where both responses are equally long."""
        return torch.sigmoid(coefficients[:, 0] - coefficients[:, 1] * mean / std)

    whole = fit(torch.full((1, won.numel()), 1.0 / won.numel(), dtype=torch.float64))
    rates = replicate(drawn, clusters, lambda weights: at_equal_length(fit(weights)))
    return LengthControlledWinRate(
        value=float(at_equal_length(whole)),
        interval=percentiles(rates, drawn.level),
        outcome="separable" if _is_undetermined(longer, won) else "fitted",
        log_odds_per_std=float(whole[0, 1]),
        is_extrapolated=not low <= 0.0 <= high,
    )


def kl_probe_estimate(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> ProbeKL:
    """Estimate ``KL(policy || base)`` per token from responses that the policy itself sampled.

    k1 is the mean over tokens of ``logprob - base_logprob``, k3 that of ``exp(-d) - 1 + d``; see
    `tasks.algorithms.kl.kl_per_token`. Both are unbiased only for tokens sampled from the whole
    distribution of the policy (temperature 1, top_p 1), and the base's own responses do not do.

    Args:
        logprobs, base_logprobs: ``(B, T)`` in nats.
        mask: ``(B, T)`` bool, True = a real response token; rows without any are left out.

    Raises:
        DataError: no token.
        TrainingError: a log-probability that is not finite.
    """
    kept = mask.any(dim=-1)
    if not bool(kept.any()):
        raise DataError("The probe has no response token", "one at least", "sample responses first")
    ours, theirs, real = logprobs.detach()[kept], base_logprobs.detach()[kept], mask[kept]
    rows = torch.arange(len(real), device=real.device).unsqueeze(1).expand(real.shape)[real]
    k1 = kl_per_token(ours, theirs, real, kind="k1")
    k3 = kl_per_token(ours, theirs, real, kind="k3")
    return ProbeKL(
        k1=clustered_mean(k1[real], rows),
        k3=clustered_mean(k3[real], rows),
        per_response=clustered_mean(k1.double().sum(dim=1)),
    )


def _without_regression(
    credit: Tensor, longer: Tensor, clusters: Tensor, bootstrap: Bootstrap
) -> LengthControlledWinRate:
    low, high = float(longer.min()), float(longer.max())
    is_outside = not low <= 0.0 <= high
    outcome: LengthFit = "equal_results" if low < high else "equal_lengths"
    if low == high and low != 0.0:
        return LengthControlledWinRate(None, None, "constant_difference", 0.0, is_outside)
    plain = plain_win_rate(credit, clusters, bootstrap)
    return LengthControlledWinRate(plain.value, plain.interval, outcome, 0.0, is_outside)


def _is_undetermined(longer: Tensor, credit: Tensor) -> bool:
    """Return whether wins and losses are divided, and not by the very difference of 0 tokens.

    Where both kinds occur at 0 their share there is the rate, however steep the rest.
    """
    there = credit[longer == 0.0]
    are_both_there = bool((there > 0.0).any() and (there < 1.0).any())
    return is_separable(longer, credit) and not are_both_there


def _difference(name: str, policy: Tensor, base: Tensor) -> Tensor:
    check_rank(f"{name} of the policy", policy, 1)
    ours = real_column(f"{name} of the policy", policy, policy.shape)
    return ours - real_column(f"{name} of the base", base, policy.shape)
