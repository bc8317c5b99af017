"""Two policies on the same prompts: win rates, at equal length too, and the KL between them.

Row i holds one response of each policy to the same prompt, and a prompt may have several rows. All
computations are in fp64, and every random draw comes from a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tasks.algorithms.calibration import wilson_interval
from tasks.algorithms.checks import check_in_range, check_rank
from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.logistic import fit_logistic, is_separable
from tasks.algorithms.resampling import (
    Bootstrap,
    ClusteredMean,
    Interval,
    cluster_index,
    clustered_mean,
    percentiles,
    real_column,
    replicate,
)
from tasks.errors import DataError

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
