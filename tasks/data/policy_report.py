"""What offline PPO made of the base: the held-out comparison, the run's course, what guards did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from tasks.algorithms.resampling import Bootstrap, ClusteredMean
from tasks.algorithms.win_rates import (
    LengthControlledWinRate,
    PlainWinRate,
    PolicyComparison,
    ProbeKL,
    Side,
    compare_policies,
    plain_win_rate,
    win_credit,
)
from tasks.data.policy_samples import (
    ResponsePair,
    Sample,
    pick_samples,
    sample_rows,
    write_response_pairs,
    write_sample_table,
)
from tasks.data.run_history import FILE_NAME, write_history
from tasks.data.training_course import (
    MetricSummary,
    TrainingCourse,
    WeightSummary,
    event_record,
    summarize_metrics,
    summarize_weights,
)

SCHEMA_VERSION: Final = 1
TRAINED_ON_JUDGE: Final = "the reward model that it was trained on"

Verdict = Literal[
    "better", "better_not_at_equal_length", "better_length_unknown", "undecided", "worse"
]


@dataclass(frozen=True)
class HeldOut:
    """The policy against the base on prompts that nothing was trained on.

    Args:
        subsets: plain win rates by subset, where there are several.
        kl: None where it was not measured.
        judge: who scored, in words that follow "by".
    """

    pairs: Sequence[ResponsePair]
    comparison: PolicyComparison
    subsets: Mapping[str, PlainWinRate]
    kl: ProbeKL | None = None
    judge: str = TRAINED_ON_JUDGE


def compare_pairs(
    pairs: Sequence[ResponsePair],
    kl: ProbeKL | None = None,
    *,
    judge: str = TRAINED_ON_JUDGE,
    tie_tolerance: float = 0.0,
    bootstrap: Bootstrap | None = None,
) -> HeldOut:
    """Compare the responses of the policy with those of the base.

    Raises:
        DataError: no pairs.
        TrainingError: a score that is not finite.
    """
    ours = Side(*_columns([(pair.policy_score, pair.policy_tokens) for pair in pairs]))
    theirs = Side(*_columns([(pair.base_score, pair.base_tokens) for pair in pairs]))
    prompts = _prompt_index(pairs)
    compared = compare_policies(
        ours, theirs, prompts, tie_tolerance=tie_tolerance, bootstrap=bootstrap
    )
    credit = win_credit(ours.scores, theirs.scores, tie_tolerance=tie_tolerance)
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.subset, []).append(place)
    subsets = {
        name: plain_win_rate(credit[places[name]], prompts[places[name]], bootstrap)
        for name in sorted(places)
        if len(places) > 1
    }
    return HeldOut(pairs, compared, subsets, kl, judge)


def _columns(rows: Sequence[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    scores, lengths = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2).unbind(dim=1)
    return scores, lengths


def _prompt_index(pairs: Sequence[ResponsePair]) -> Tensor:
    index: dict[str, int] = {}
    return torch.tensor(
        [index.setdefault(pair.prompt_id, len(index)) for pair in pairs], dtype=torch.long
    )


@dataclass(frozen=True)
class ReportRecord:
    """What ``report.json`` holds; an interval is a list of low and high.

    Args:
        summary: the verdict in words, as the page begins with it.
        last_step: the last step with metrics.
        n_prompts, n_pairs: of the held-out comparison.
        kl_bound: where the guard of the probe KL acts, nats per token.
        metrics: by name; one without a finite value is left out.
        facts: other figures of the policy.
        samples: rows of group, rank, prompt, both responses, both scores and lengths.
    """

    schema_version: int
    verdict: Verdict
    summary: list[str]
    judge: str
    last_step: int
    n_prompts: int
    n_pairs: int
    win_rate: PlainWinRate
    length_controlled_win_rate: LengthControlledWinRate
    score_difference: ClusteredMean
    length_difference_tokens: ClusteredMean
    subsets: Mapping[str, PlainWinRate]
    kl_probe: ProbeKL | None
    kl_bound: float | None
    guard_events: list[dict[str, Any]]
    metrics: Mapping[str, MetricSummary]
    weights: WeightSummary | None
    facts: Mapping[str, float]
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class PolicyReport:
    """A trained policy.

    Args:
        facts: other figures that belong beside the verdict, all finite.
        samples: pairs to read.
    """

    course: TrainingCourse
    held_out: HeldOut
    samples: Sequence[Sample]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Whether the win rates lie above or below one half with their whole intervals."""
        found = self.held_out.comparison
        if found.plain.interval.high < 0.5:
            return "worse"
        if found.plain.interval.low <= 0.5:
            return "undecided"
        controlled = found.length_controlled.known
        if controlled is None:
            return "better_length_unknown"
        return "better" if controlled[1].low > 0.5 else "better_not_at_equal_length"

    def metrics(self) -> dict[str, float]:
        """Return flat figures with stable names, all finite."""
        found = self.held_out.comparison
        rate = found.plain
        flat = {
            "held_out_win_rate": rate.value,
            "held_out_win_rate_low": rate.interval.low,
            "held_out_win_rate_high": rate.interval.high,
            "held_out_score_difference": found.score_difference.value,
            "held_out_length_difference_tokens": found.length_difference.value,
            "guard_firings": float(len(self.course.events)),
        }
        if found.length_controlled.known is not None:
            controlled, interval = found.length_controlled.known
            flat["held_out_win_rate_length_controlled"] = controlled
            flat["held_out_win_rate_length_controlled_low"] = interval.low
            flat["held_out_win_rate_length_controlled_high"] = interval.high
        if self.held_out.kl is not None:
            flat["held_out_kl_probe"] = self.held_out.kl.k1.value
            flat["held_out_kl_probe_k3"] = self.held_out.kl.k3.value
            if self.held_out.kl.k1.standard_error is not None:
                flat["held_out_kl_probe_error"] = self.held_out.kl.k1.standard_error
        for subset, part in self.held_out.subsets.items():
            flat[f"held_out_win_rate.{subset}"] = part.value
        return flat

    def record(self) -> ReportRecord:
        """Return what ``report.json`` holds."""
        from tasks.data.policy_page import summarize_policy

        found = self.held_out.comparison
        return ReportRecord(
            schema_version=SCHEMA_VERSION,
            verdict=self.verdict,
            summary=summarize_policy(self),
            judge=self.held_out.judge,
            last_step=self.course.last_step,
            n_prompts=found.plain.n_prompts,
            n_pairs=found.plain.n,
            win_rate=found.plain,
            length_controlled_win_rate=found.length_controlled,
            score_difference=found.score_difference,
            length_difference_tokens=found.length_difference,
            subsets=self.held_out.subsets,
            kl_probe=self.held_out.kl,
            kl_bound=self.course.kl_bound,
            guard_events=[event_record(event) for event in self.course.events],
            metrics=summarize_metrics(self.course),
            weights=summarize_weights(self.course.final_weights),
            facts=dict(self.facts),
            samples=sample_rows(self.samples),
        )


def policy_report(
    course: TrainingCourse,
    held_out: HeldOut,
    *,
    facts: Mapping[str, float] | None = None,
    n_samples: int = 10,
    seed: int = 0,
) -> PolicyReport:
    """Put the report together and pick the pairs that it shows."""
    samples = pick_samples(held_out.pairs, n_samples, seed)
    return PolicyReport(course, held_out, samples, dict(facts or {}))


def write_policy_report(report: PolicyReport, directory: Path) -> list[Path]:
    """Write pages, plots and tables; return the files.

    ``report.json`` (`ReportRecord`), ``report.md``, ``samples.md``, ``samples.json`` (a table as
    MLflow keeps it), ``held_out_pairs.parquet``, ``history.jsonl``, and the plots.
    """
    from tasks.data.policy_page import render_policy_report, render_samples
    from tasks.data.policy_plots import draw_plots

    directory.mkdir(parents=True, exist_ok=True)
    names = ("report.json", "report.md", "samples.md", "samples.json", "held_out_pairs.parquet")
    record, page, samples, table, pairs = (directory / name for name in names)
    text = json.dumps(asdict(report.record()), indent=2, allow_nan=False)
    record.write_text(text + "\n", encoding="utf-8")
    page.write_text(render_policy_report(report), encoding="utf-8")
    samples.write_text(render_samples(report.samples), encoding="utf-8")
    write_sample_table(table, report.samples)
    write_response_pairs(pairs, report.held_out.pairs)
    write_history(directory / FILE_NAME, report.course.history)
    return [
        record,
        page,
        samples,
        table,
        pairs,
        directory / FILE_NAME,
        *draw_plots(report, directory),
    ]
