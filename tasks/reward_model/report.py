"""What a reward model is worth on pairs it was not trained on: accuracy, calibration, examples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from matplotlib.figure import Figure
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
from tasks.algorithms.masking import check_finite
from tasks.data.hh import Pair
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError
from tasks.report.page import block, cell, table

_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
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
    return [_scored_pair(texts[row.pair_id], row, (c, r), d) for row, c, r, d in columns]


def _scored_pair(
    pair: Pair, row: RenderedPair, scores: tuple[float, float], disagreement: float | None
) -> ScoredPair:
    return ScoredPair(
        pair_id=pair.pair_id,
        subset=pair.subset,
        chosen_score=scores[0],
        rejected_score=scores[1],
        chosen_tokens=len(row.chosen_ids),
        rejected_tokens=len(row.rejected_ids),
        last_turn=pair.prompt[-1].content if pair.prompt else "",
        chosen=pair.chosen,
        rejected=pair.rejected,
        source_file=pair.source_file,
        source_line=pair.source_line,
        disagreement=disagreement,
    )


@dataclass(frozen=True)
class Distribution:
    """Spread of n values.

    Args:
        std: unbiased; 0 for one value.
        quantiles: by name, ``p05`` to ``p95``, interpolated linearly between values.
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    quantiles: Mapping[str, float]


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
    chosen: Distribution
    rejected: Distribution
    margin: Distribution
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
            "test_margin_mean": self.overall.margin.mean,
            "test_margin_std": self.overall.margin.std,
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


def reward_report(
    validation: Sequence[ScoredPair], test: Sequence[ScoredPair], n_worst: int = _WORST_PAIRS
) -> RewardReport:
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
        worst=sorted(test, key=lambda pair: (pair.margin, pair.pair_id))[:n_worst],
        test=test,
    )


def margins_of(pairs: Sequence[ScoredPair]) -> Tensor:
    """Return the (P,) margins in fp64."""
    return _column([pair.margin for pair in pairs])


def summarize_pairs(pairs: Sequence[ScoredPair], temperature: float) -> PairSummary:
    """Return the figures of some pairs, at least one."""
    margins = margins_of(pairs)
    accuracy = pair_accuracy(margins)
    extra = _column([float(pair.extra_tokens) for pair in pairs])
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
        margin=_distribution(margins.tolist()),
        by_margin=accuracy_bins(margins.abs(), margins),
        by_length_difference=accuracy_bins(extra, margins),
        by_disagreement=accuracy_bins(_column(apart), margins) if complete else [],
    )


def accuracy_bins(
    values: Tensor, margins: Tensor, n_bins: int = _ACCURACY_BINS
) -> list[AccuracyBin]:
    """Return the accuracy of pairs by a quantity, in up to ``n_bins`` bins of about equal size.

    Pairs of equal quantity are never torn apart, so there may be fewer bins.

    Args:
        values: ``(P,)``, the quantity.
        margins: ``(P,)``.
    """
    check_finite("values", values)
    ordered = values.double().sort().values
    cuts = [ordered[len(ordered) * k // n_bins] for k in range(1, n_bins)]
    place = torch.bucketize(values.double(), torch.stack(cuts), right=True)
    bins = []
    for k in sorted(set(place.tolist())):
        members = values[place == k].double()
        found = pair_accuracy(margins[place == k])
        low, high, mean = float(members.min()), float(members.max()), float(members.mean())
        bins.append(AccuracyBin(low, high, found.n, mean, found.value, found.low, found.high))
    return bins


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _distribution(values: Sequence[float]) -> Distribution:
    column = _column(values)
    ordered = column.sort().values.tolist()
    return Distribution(
        mean=float(column.mean()),
        std=float(column.std()) if len(values) > 1 else 0.0,
        minimum=ordered[0],
        maximum=ordered[-1],
        quantiles={f"p{round(100 * q):02d}": _interpolated(ordered, q) for q in _QUANTILES},
    )


def _interpolated(ordered: Sequence[float], q: float) -> float:
    # torch.quantile refuses more than 16 million values.
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def write_reward_report(report: RewardReport, directory: Path) -> list[Path]:
    """Write ``report.json``, ``report.md`` and the plots; return what was written."""

    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "report.json"
    record.write_text(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n")
    page = directory / "report.md"
    page.write_text(render_reward_report(report), encoding="utf-8")
    return [record, page, *draw_plots(report, directory)]


# The reward model's report as a page of Markdown.

_OUTCOMES: Final = {
    "fitted": "",
    "all_right": "no validation pair is ranked wrong, so no temperature is the best and 1 is kept",
    "not_better_than_chance": "the mean validation margin is not above 0, so every confidence is "
    "set to one half",
    "all_tied": "all validation pairs are ties, so 1 is kept",
}


def render_reward_report(report: RewardReport) -> str:
    """Return tables and the worst-ranked pairs; what people and models wrote is kept inert."""
    overall = report.overall
    sections = [
        "# Reward model",
        f"{overall.n} test pairs; the temperature is from {report.n_validation} validation pairs. "
        "Scores are raw: the difference of two is the log odds of the better one.",
        "![](overview.png)",
        "## Accuracy",
        "Share of pairs whose chosen response scores higher; ties count half. The interval is "
        "Wilson's, 95 %.",
        _accuracy_table(report),
        "## Calibration",
        _temperature_line(report),
        _calibration_table(report),
        "## Where it is right",
        *_binned(overall),
        "## Scores",
        _score_table(report),
        f"## The {len(report.worst)} worst-ranked pairs",
        "The largest rejected less chosen first.",
        *(_pair_section(rank, pair) for rank, pair in enumerate(report.worst, start=1)),
    ]
    return "\n\n".join(sections) + "\n"


def _named(report: RewardReport) -> list[tuple[str, PairSummary]]:
    """Return all pairs first, then the subsets where there are several."""
    subsets = list(report.subsets.items()) if len(report.subsets) > 1 else []
    return [("all", report.overall), *((cell(name), summary) for name, summary in subsets)]


def _accuracy_table(report: RewardReport) -> str:
    header = ("pairs", "n", "ties", "accuracy", "95 %", "longer wins", "shorter wins")
    rows = [
        (name, s.n, s.n_ties, f"{s.accuracy:.3f}", _interval(s), *_shares(s))
        for name, s in _named(report)
    ]
    return table(header, rows)


def _interval(found: PairSummary | AccuracyBin) -> str:
    return f"{found.accuracy_low:.3f} to {found.accuracy_high:.3f}"


def _shares(summary: PairSummary) -> tuple[str, str]:
    return f"{summary.longer_wins:.3f}", f"{summary.shorter_wins:.3f}"


def _temperature_line(report: RewardReport) -> str:
    remark = _OUTCOMES[report.temperature.outcome]
    ending = f": {remark}." if remark else "; margins are divided by it."
    return f"Temperature {report.temperature.value:.4g}{ending}"


def _calibration_table(report: RewardReport) -> str:
    header = ("pairs", "log loss (nats)", "at the temperature", "ECE", "at the temperature")
    rows = [
        (
            name,
            f"{s.log_loss:.4f}",
            f"{s.log_loss_calibrated:.4f}",
            f"{s.ece:.4f}",
            f"{s.ece_calibrated:.4f}",
        )
        for name, s in _named(report)
    ]
    return table(header, rows)


def _binned(summary: PairSummary) -> list[str]:
    tables = [
        _bin_table("absolute margin", summary.by_margin, ".3f"),
        _bin_table("tokens of chosen less rejected", summary.by_length_difference, ".0f"),
    ]
    if summary.by_disagreement:
        tables.append(_bin_table("disagreement of members", summary.by_disagreement, ".3f"))
    return tables


def _bin_table(what: str, bins: Sequence[AccuracyBin], digits: str) -> str:
    rows = [
        (f"{b.low:{digits}} to {b.high:{digits}}", b.n, f"{b.accuracy:.3f}", _interval(b))
        for b in bins
    ]
    return table((what, "n", "accuracy", "95 %"), rows)


def _score_table(report: RewardReport) -> str:
    rows = []
    for name, summary in _named(report):
        for label in ("chosen", "rejected", "margin"):
            spread = getattr(summary, label)
            values = (spread.mean, spread.std, *spread.quantiles.values())
            rows.append((name, label, *(f"{value:.3f}" for value in values)))
    header = ("pairs", "of", "mean", "s.d.", *report.overall.chosen.quantiles)
    return table(header, rows)


def _pair_section(rank: int, pair: ScoredPair) -> str:
    place = f"{pair.source_file}:{pair.source_line}"
    facts = [
        f"chosen {pair.chosen_score:.3f}, rejected {pair.rejected_score:.3f}, "
        f"margin {pair.margin:.3f}",
        f"{pair.chosen_tokens} and {pair.rejected_tokens} tokens",
        f"subset {cell(pair.subset)}",
        cell(place),
    ]
    if pair.disagreement is not None:
        facts.insert(1, f"disagreement {pair.disagreement:.3f}")
    texts = (("Asked", pair.last_turn), ("Chosen", pair.chosen), ("Rejected", pair.rejected))
    blocks = [f"{name}:\n\n{block(text)}" for name, text in texts]
    return "\n\n".join([f"### {rank}. Pair {cell(pair.pair_id)}", "; ".join(facts), *blocks])


# Plots of the reward model's report: one figure with all of them, and each as a file.

_BLUE: Final = "#0072B2"
_ORANGE: Final = "#D55E00"
_GREY: Final = "#666666"
_HISTOGRAM_BINS: Final = 30
_DPI: Final = 120
# The area of a marker, in square points, where all pairs are in one bin.
_LARGEST_MARKER: Final = 400.0

Draw = Callable[[Any, RewardReport], None]


def draw_plots(report: RewardReport, directory: Path) -> list[Path]:
    """Write ``overview.png`` and one file for each plot; return them."""
    files = [directory / "overview.png"]
    overview = Figure(figsize=(14, 8))
    places = overview.subplots(2, 3).flat
    # Fixed margins: a computed layout takes several times as long as the drawing.
    overview.subplots_adjust(left=0.06, right=0.98, top=0.95, bottom=0.08, wspace=0.25, hspace=0.3)
    for name, draw in _PLOTS.items():
        draw(next(places), report)
        single = Figure(figsize=(6, 4.5))
        draw(single.subplots(), report)
        single.subplots_adjust(left=0.13, right=0.96, top=0.92, bottom=0.12)
        files.append(directory / f"{name}.png")
        single.savefig(files[-1], dpi=_DPI)
    for unused in places:
        unused.set_visible(False)
    overview.savefig(files[0], dpi=_DPI)
    return files


def _reliability(axes: Any, report: RewardReport) -> None:
    axes.plot([0.5, 1.0], [0.5, 1.0], color=_GREY, linewidth=0.8, label="calibrated")
    _draw_reliability(axes, report.reliability, _ORANGE, "o", f"raw, ECE {report.overall.ece:.3f}")
    after = f"T = {report.temperature.value:.3g}, ECE {report.overall.ece_calibrated:.3f}"
    _draw_reliability(axes, report.reliability_calibrated, _BLUE, "s", after)
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("mean confidence in the preferred response")
    axes.set_ylabel("accuracy (ties count half)")
    axes.set_title("Reliability (area: share of pairs)")
    axes.legend(loc="lower right")


def _draw_reliability(
    axes: Any, bins: Sequence[ReliabilityBin], colour: str, marker: str, label: str
) -> None:
    confidence = [b.confidence for b in bins]
    accuracy = [b.accuracy for b in bins]
    total = sum(b.count for b in bins)
    sizes = [max(8.0, _LARGEST_MARKER * b.count / total) for b in bins]
    axes.plot(confidence, accuracy, color=colour, linewidth=1.2, marker=marker, ms=3, label=label)
    axes.scatter(confidence, accuracy, s=sizes, color=colour, alpha=0.35, marker=marker)


def _margins(axes: Any, report: RewardReport) -> None:
    axes.hist([pair.margin for pair in report.test], bins=_HISTOGRAM_BINS, color=_BLUE)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("margin, chosen less rejected (raw score, nats)")
    axes.set_ylabel("test pairs")
    axes.set_title(f"Margins: accuracy {report.overall.accuracy:.3f}")


def _scores(axes: Any, report: RewardReport) -> None:
    columns = {
        "chosen": ([pair.chosen_score for pair in report.test], _BLUE),
        "rejected": ([pair.rejected_score for pair in report.test], _ORANGE),
    }
    low = min(min(values) for values, _ in columns.values())
    high = max(max(values) for values, _ in columns.values())
    for name, (values, colour) in columns.items():
        span = (low, high) if high > low else None
        style = {"color": colour, "alpha": 0.55, "label": name}
        axes.hist(values, bins=_HISTOGRAM_BINS, range=span, **style)
        axes.axvline(sum(values) / len(values), color=colour, linestyle="--", linewidth=1.2)
    axes.set_xlabel("score (raw, nats); dashed: mean")
    axes.set_ylabel("test responses")
    axes.set_title("Scores")
    axes.legend()


def _by_margin(axes: Any, report: RewardReport) -> None:
    _draw_accuracy(axes, report.overall.by_margin, report.overall.accuracy)
    axes.set_xlabel("mean absolute margin in the bin (raw score, nats)")
    axes.set_title("Accuracy by margin")


def _by_length(axes: Any, report: RewardReport) -> None:
    _draw_accuracy(axes, report.overall.by_length_difference, report.overall.accuracy)
    axes.axvline(0.0, color=_GREY, linewidth=0.8)
    axes.set_xlabel("mean length of chosen less rejected in the bin (tokens)")
    axes.set_title("Accuracy by length difference")


def _draw_accuracy(axes: Any, bins: Sequence[AccuracyBin], overall: float) -> None:
    below = [b.accuracy - b.accuracy_low for b in bins]
    above = [b.accuracy_high - b.accuracy for b in bins]
    axes.errorbar(
        [b.mean for b in bins],
        [b.accuracy for b in bins],
        yerr=[below, above],
        fmt="o-",
        color=_BLUE,
        capsize=3,
        label="bin, 95 % interval",
    )
    axes.axhline(overall, color=_ORANGE, linestyle="--", linewidth=1.0, label="all test pairs")
    axes.axhline(0.5, color=_GREY, linestyle=":", linewidth=1.0, label="chance")
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("accuracy (ties count half)")
    axes.legend(loc="lower right")


_PLOTS: Final[Mapping[str, Draw]] = {
    "reliability": _reliability,
    "margins": _margins,
    "scores": _scores,
    "accuracy_by_margin": _by_margin,
    "accuracy_by_length_difference": _by_length,
}
