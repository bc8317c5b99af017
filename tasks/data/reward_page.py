"""The reward model's report as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tasks.data.markdown import block, cell, table
from tasks.data.reward_report import AccuracyBin, PairSummary, RewardReport, ScoredPair

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
