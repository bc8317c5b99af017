"""What a reward model is worth on pairs it was not trained on: accuracy, calibration, examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from tasks.algorithms.calibration import (
    ReliabilityBin,
    Temperature,
    expected_calibration_error,
    fit_temperature,
    pair_accuracy,
    pair_log_loss,
    reliability_bins,
)
from tasks.algorithms.statistics import Column
from tasks.data.hh import Pair
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError
from tasks.report import plots
from tasks.report.page import cell, example, interval, join, table, write_report

_QUANTILES: Final = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
_ACCURACY_BINS: Final = 5
_WORST_PAIRS: Final = 20


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """A pair with its two scores.

    Args:
        chosen_score, rejected_score: raw, so that their difference is the log odds of chosen.
        chosen_tokens, rejected_tokens: length of the responses.
        last_turn: what was asked last.
        disagreement: how far the members of the reward model are apart on this pair, if it has
            several.
    """

    pair_id: str
    subset: str
    chosen_score: float
    rejected_score: float
    chosen_tokens: int
    rejected_tokens: int
    last_turn: str = ""
    chosen: str = ""
    rejected: str = ""
    source_file: str = ""
    source_line: int = 0
    disagreement: float | None = None

    @property
    def margin(self) -> float:
        """How much higher the chosen response scores."""
        return self.chosen_score - self.rejected_score

    @property
    def extra_tokens(self) -> int:
        """How much longer the chosen response is."""
        return self.chosen_tokens - self.rejected_tokens


def scored_pairs(
    pairs: Sequence[Pair],
    rendered: Sequence[RenderedPair],
    chosen: Tensor,
    rejected: Tensor,
    disagreement: Tensor | None = None,
) -> list[ScoredPair]:
    """Put the scores of rendered pairs beside the pairs' text.

    Args:
        pairs: at least the rendered ones, in any order.
        rendered: P pairs.
        chosen, rejected, disagreement: ``(P,)``, aligned with ``rendered``.
    """
    texts = {pair.pair_id: pair for pair in pairs}
    apart = [None] * len(rendered) if disagreement is None else disagreement.tolist()
    columns = zip(rendered, chosen.tolist(), rejected.tolist(), apart, strict=True)
    return [
        ScoredPair(
            pair_id=row.pair_id,
            subset=pair.subset,
            chosen_score=chosen_score,
            rejected_score=rejected_score,
            chosen_tokens=len(row.chosen_ids),
            rejected_tokens=len(row.rejected_ids),
            last_turn=pair.prompt[-1].content if pair.prompt else "",
            chosen=pair.chosen,
            rejected=pair.rejected,
            source_file=pair.source_file,
            source_line=pair.source_line,
            disagreement=far,
        )
        for row, chosen_score, rejected_score, far in columns
        for pair in (texts[row.pair_id],)
    ]


@dataclass(frozen=True)
class AccuracyBin:
    """Accuracy of the pairs whose quantity lies between two of its values, both included.

    Args:
        low, high: smallest and largest value in the bin.
        accuracy, accuracy_low, accuracy_high: ties as halves; 95 % interval.
    """

    low: float
    high: float
    n: int
    mean: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


@dataclass(frozen=True)
class PairSummary:
    """All figures of one set of pairs.

    Args:
        accuracy: share ranked right, a tie counted as a half, with its 95 % interval.
        log_loss: in nats; ``_calibrated`` is after division of the margins by the temperature.
        ece: expected calibration error, from 0 to 0.5 where accuracy is above chance.
        longer_wins, shorter_wins: accuracy of always preferring the response with more, or fewer,
            tokens; equal lengths count half.
        chosen, rejected, margin: mean, std (unbiased; 0 for one value), minimum, maximum, and
            quantiles by name, ``p05`` to ``p95``, interpolated linearly between values.
        by_margin: by the absolute margin.
        by_length_difference: by tokens of chosen less tokens of rejected.
        by_disagreement: empty where the reward model has one member.
    """

    n: int
    n_ties: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    log_loss: float
    log_loss_calibrated: float
    ece: float
    ece_calibrated: float
    longer_wins: float
    shorter_wins: float
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    margin: dict[str, Any]
    by_margin: list[AccuracyBin]
    by_length_difference: list[AccuracyBin]
    by_disagreement: list[AccuracyBin]


@dataclass(frozen=True)
class RewardReport:
    """A reward model on the test split, with the temperature from the validation split.

    Args:
        n_validation: pairs that the temperature was fitted on.
        overall, subsets: figures of all test pairs, and by subset.
        reliability, reliability_calibrated: of all test pairs.
        worst: test pairs with the largest rejected less chosen, the worst first.
        test: all test pairs.
    """

    n_validation: int
    temperature: Temperature
    overall: PairSummary
    subsets: Mapping[str, PairSummary]
    reliability: list[ReliabilityBin]
    reliability_calibrated: list[ReliabilityBin]
    worst: list[ScoredPair]
    test: Sequence[ScoredPair]

    def metrics(self) -> dict[str, float]:
        """Return flat figures with stable names, all finite."""
        found = {
            "temperature": self.temperature.value,
            "temperature_fitted": float(self.temperature.outcome == "fitted"),
            "baseline_longer_wins": self.overall.longer_wins,
            "baseline_shorter_wins": self.overall.shorter_wins,
            "test_tie_share": self.overall.n_ties / self.overall.n,
            "test_margin_mean": self.overall.margin["mean"],
            "test_margin_std": self.overall.margin["std"],
        }
        names = ("accuracy", "accuracy_low", "accuracy_high", "log_loss", "log_loss_calibrated")
        for name in (*names, "ece", "ece_calibrated"):
            found[f"test_{name}"] = getattr(self.overall, name)
        if len(self.subsets) > 1:
            for subset, summary in self.subsets.items():
                found[f"test_accuracy.{subset}"] = summary.accuracy
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything but the list of all pairs, as plain values."""
        return {
            "pairs": {"validation": self.n_validation, "test": self.overall.n},
            "temperature": asdict(self.temperature),
            "overall": asdict(self.overall),
            "subsets": {name: asdict(summary) for name, summary in self.subsets.items()},
            "reliability": [asdict(bin_) for bin_ in self.reliability],
            "reliability_calibrated": [asdict(bin_) for bin_ in self.reliability_calibrated],
            "worst_pairs": [{**asdict(pair), "margin": pair.margin} for pair in self.worst],
        }


def reward_report(validation: Sequence[ScoredPair], test: Sequence[ScoredPair]) -> RewardReport:
    """Fit the temperature on the validation pairs and report on the test pairs.

    Raises:
        DataError: a split without pairs.
        TrainingError: a score that is not finite.
    """
    for name, pairs in (("validation", validation), ("test", test)):
        if not pairs:
            raise DataError(f"The {name} split has no scored pairs", "at least one", "score some")
    temperature = fit_temperature(margins_of(validation))
    by_subset: dict[str, list[ScoredPair]] = {}
    for pair in test:
        by_subset.setdefault(pair.subset, []).append(pair)
    margins = margins_of(test)
    return RewardReport(
        n_validation=len(validation),
        temperature=temperature,
        overall=summarize_pairs(test, temperature.value),
        subsets={
            name: summarize_pairs(by_subset[name], temperature.value) for name in sorted(by_subset)
        },
        reliability=reliability_bins(margins),
        reliability_calibrated=reliability_bins(margins, temperature.value),
        worst=sorted(test, key=lambda pair: (pair.margin, pair.pair_id))[:_WORST_PAIRS],
        test=test,
    )


def margins_of(pairs: Sequence[ScoredPair]) -> Column:
    """Return the (P,) margins in fp64."""
    return np.array([pair.margin for pair in pairs], np.float64)


def summarize_pairs(pairs: Sequence[ScoredPair], temperature: float) -> PairSummary:
    """Return the figures of some pairs, at least one."""
    margins = margins_of(pairs)
    accuracy = pair_accuracy(margins)
    extra = np.array([pair.extra_tokens for pair in pairs], np.float64)
    longer = pair_accuracy(extra).value
    apart = [pair.disagreement for pair in pairs if pair.disagreement is not None]
    complete = len(apart) == len(pairs)
    return PairSummary(
        n=accuracy.n,
        n_ties=accuracy.n_ties,
        accuracy=accuracy.value,
        accuracy_low=accuracy.low,
        accuracy_high=accuracy.high,
        log_loss=pair_log_loss(margins),
        log_loss_calibrated=pair_log_loss(margins, temperature),
        ece=expected_calibration_error(margins),
        ece_calibrated=expected_calibration_error(margins, temperature),
        longer_wins=longer,
        shorter_wins=1.0 - longer,
        chosen=_distribution([pair.chosen_score for pair in pairs]),
        rejected=_distribution([pair.rejected_score for pair in pairs]),
        margin=_distribution(margins),
        by_margin=accuracy_bins(np.abs(margins), margins),
        by_length_difference=accuracy_bins(extra, margins),
        by_disagreement=accuracy_bins(np.array(apart), margins) if complete else [],
    )


def accuracy_bins(values: Column, margins: Column) -> list[AccuracyBin]:
    """Return the accuracy of pairs by a quantity, in up to five bins of about equal size.

    Pairs of equal quantity are never torn apart, so there may be fewer bins.

    Args:
        values: ``(P,)``, the quantity.
        margins: ``(P,)``.
    """
    ordered = np.sort(values)
    cuts = [ordered[len(ordered) * k // _ACCURACY_BINS] for k in range(1, _ACCURACY_BINS)]
    place = np.digitize(values, cuts)
    bins = []
    for k in np.unique(place):
        members = values[place == k]
        found = pair_accuracy(margins[place == k])
        low, high, mean = float(members.min()), float(members.max()), float(members.mean())
        bins.append(AccuracyBin(low, high, found.n, mean, found.value, found.low, found.high))
    return bins


def _distribution(values: Sequence[float] | Column) -> dict[str, Any]:
    column = np.asarray(values, np.float64)
    return {
        "mean": float(column.mean()),
        "std": float(column.std(ddof=1)) if len(column) > 1 else 0.0,
        "minimum": float(column.min()),
        "maximum": float(column.max()),
        "quantiles": {name: float(np.quantile(column, q)) for name, q in _QUANTILES.items()},
    }


def write_reward_report(report: RewardReport, directory: Path) -> list[Path]:
    """Write ``report.json``, ``report.md`` and the plots; return what was written."""
    files = write_report(directory, report.as_json(), render_reward_report(report))
    drawn = {name: partial(draw, report=report) for name, draw in _PLOTS.items()}
    return files + plots.draw_plots(drawn, directory)


# The page.

_OUTCOMES: Final = {
    "fitted": "",
    "all_right": "no validation pair is ranked wrong, so no temperature is the best and 1 is kept",
    "not_better_than_chance": "the mean validation margin is not above 0, so every confidence is "
    "set to one half",
    "all_tied": "all validation pairs are ties, so 1 is kept",
}


def render_reward_report(report: RewardReport) -> str:
    """Return tables and the worst-ranked pairs; what people and models wrote is kept inert."""
    overall, temperature = report.overall, report.temperature
    remark = _OUTCOMES[temperature.outcome]
    return join(
        [
            "# Reward model",
            f"{overall.n} test pairs; the temperature is from {report.n_validation} validation "
            "pairs. Scores are raw: the difference of two is the log odds of the better one.",
            "![](overview.png)",
            "## Accuracy",
            "Share of pairs whose chosen response scores higher; ties count half. The interval is "
            "Wilson's, 95 %.",
            _accuracy_table(report),
            "## Calibration",
            f"Temperature {temperature.value:.4g}"
            + (f": {remark}." if remark else "; margins are divided by it."),
            _calibration_table(report),
            "## Where it is right",
            _bin_table("absolute margin", overall.by_margin, ".3f"),
            _bin_table("tokens of chosen less rejected", overall.by_length_difference, ".0f"),
            _bin_table("disagreement of members", overall.by_disagreement, ".3f"),
            "## Scores",
            _score_table(report),
            f"## The {len(report.worst)} worst-ranked pairs",
            "The largest rejected less chosen first.",
            *(_pair_section(rank, pair) for rank, pair in enumerate(report.worst, start=1)),
        ]
    )


def _named(report: RewardReport) -> list[tuple[str, PairSummary]]:
    """Return all pairs first, then the subsets where there are several."""
    subsets = list(report.subsets.items()) if len(report.subsets) > 1 else []
    return [("all", report.overall), *((cell(name), summary) for name, summary in subsets)]


def _accuracy_table(report: RewardReport) -> str:
    rows = []
    for name, s in _named(report):
        ends = interval(s.accuracy_low, s.accuracy_high)
        by_length = (f"{s.longer_wins:.3f}", f"{s.shorter_wins:.3f}")
        rows.append((name, s.n, s.n_ties, f"{s.accuracy:.3f}", ends, *by_length))
    header = ("pairs", "n", "ties", "accuracy", "95 %", "longer wins", "shorter wins")
    return table(header, rows)


def _calibration_table(report: RewardReport) -> str:
    rows = []
    for name, s in _named(report):
        figures = (s.log_loss, s.log_loss_calibrated, s.ece, s.ece_calibrated)
        rows.append((name, *(f"{value:.4f}" for value in figures)))
    header = ("pairs", "log loss (nats)", "at the temperature", "ECE", "at the temperature")
    return table(header, rows)


def _bin_table(what: str, bins: Sequence[AccuracyBin], form: str) -> str:
    rows = []
    for b in bins:
        ends = interval(b.accuracy_low, b.accuracy_high)
        rows.append((interval(b.low, b.high, form), b.n, f"{b.accuracy:.3f}", ends))
    return table((what, "n", "accuracy", "95 %"), rows) if bins else ""


def _score_table(report: RewardReport) -> str:
    rows = []
    for name, summary in _named(report):
        for label in ("chosen", "rejected", "margin"):
            spread = getattr(summary, label)
            values = (spread["mean"], spread["std"], *spread["quantiles"].values())
            rows.append((name, label, *(f"{value:.3f}" for value in values)))
    header = ("pairs", "of", "mean", "s.d.", *report.overall.chosen["quantiles"])
    return table(header, rows)


def _pair_section(rank: int, pair: ScoredPair) -> str:
    facts = [
        f"chosen {pair.chosen_score:.3f}, rejected {pair.rejected_score:.3f}, "
        f"margin {pair.margin:.3f}",
        f"{pair.chosen_tokens} and {pair.rejected_tokens} tokens",
        f"subset {cell(pair.subset)}",
        cell(f"{pair.source_file}:{pair.source_line}"),
    ]
    if pair.disagreement is not None:
        facts.insert(1, f"disagreement {pair.disagreement:.3f}")
    texts = {"Asked": pair.last_turn, "Chosen": pair.chosen, "Rejected": pair.rejected}
    return example(f"{rank}. Pair {cell(pair.pair_id)}", facts, texts)


# The plots.


def _reliability(axes: plots.Axes, report: RewardReport) -> None:
    overall, temperature = report.overall, report.temperature.value
    raw = f"raw, ECE {overall.ece:.3f}"
    scaled = f"T = {temperature:.3g}, ECE {overall.ece_calibrated:.3f}"
    axes.plot([0.5, 1.0], [0.5, 1.0], color=plots.GREY, linewidth=0.8, label="calibrated")
    plots.draw_reliability(axes, report.reliability, plots.ORANGE, "o", raw)
    plots.draw_reliability(axes, report.reliability_calibrated, plots.BLUE, "s", scaled)
    axes.set(
        title="Reliability (area: share of pairs)",
        xlabel="mean confidence in the preferred response",
        ylabel="accuracy (ties count half)",
        xlim=(0.49, 1.01),
        ylim=(-0.02, 1.02),
    )
    axes.legend(loc="lower right")


def _margins(axes: plots.Axes, report: RewardReport) -> None:
    plots.draw_histograms(axes, {"": ([pair.margin for pair in report.test], plots.BLUE)})
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(
        title=f"Margins: accuracy {report.overall.accuracy:.3f}",
        xlabel="margin, chosen less rejected (raw score, nats)",
        ylabel="test pairs",
    )


def _scores(axes: plots.Axes, report: RewardReport) -> None:
    columns = {
        "chosen": ([pair.chosen_score for pair in report.test], plots.BLUE),
        "rejected": ([pair.rejected_score for pair in report.test], plots.ORANGE),
    }
    plots.draw_histograms(axes, columns, alpha=0.55)
    for values, colour in columns.values():
        axes.axvline(sum(values) / len(values), color=colour, linestyle="--", linewidth=1.2)
    axes.set(title="Scores", xlabel="score (raw, nats); dashed: mean", ylabel="test responses")
    axes.legend()


def _by_margin(axes: plots.Axes, report: RewardReport) -> None:
    unit = "mean absolute margin in the bin (raw score, nats)"
    _draw_accuracy(axes, report.overall.by_margin, report.overall.accuracy)
    axes.set(title="Accuracy by margin", xlabel=unit)


def _by_length(axes: plots.Axes, report: RewardReport) -> None:
    unit = "mean length of chosen less rejected in the bin (tokens)"
    _draw_accuracy(axes, report.overall.by_length_difference, report.overall.accuracy)
    axes.axvline(0.0, color=plots.GREY, linewidth=0.8)
    axes.set(title="Accuracy by length difference", xlabel=unit)


def _draw_accuracy(axes: plots.Axes, bins: Sequence[AccuracyBin], overall: float) -> None:
    means, accuracies = [b.mean for b in bins], [b.accuracy for b in bins]
    ends = [(b.accuracy_low, b.accuracy_high) for b in bins]
    style = {"fmt": "o-", "color": plots.BLUE, "label": "bin, 95 % interval"}
    plots.draw_intervals(axes, means, accuracies, ends, **style)
    plots.draw_line(axes, overall, "all test pairs")
    axes.axhline(0.5, color=plots.GREY, linestyle=":", linewidth=1.0, label="chance")
    axes.set(ylim=(-0.02, 1.02), ylabel="accuracy (ties count half)")
    axes.legend(loc="lower right")


_PLOTS: Final = {
    "reliability": _reliability,
    "margins": _margins,
    "scores": _scores,
    "accuracy_by_margin": _by_margin,
    "accuracy_by_length_difference": _by_length,
}
