"""What offline PPO made of the base: the held-out comparison, the run's course, what guards did."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from tasks.algorithms.importance import effective_sample_size
from tasks.algorithms.win_rates import (
    ClusteredMean,
    Interval,
    LengthControlledWinRate,
    PlainWinRate,
    ProbeKL,
)
from tasks.data.history import FILE_NAME, write_history
from tasks.errors import DataError
from tasks.report.page import block, cell, table
from tasks.report.pairs import (
    HeldOut,
    Sample,
    pick_samples,
    sample_rows,
    write_response_pairs,
    write_sample_table,
)

# How a training run went: its metrics by step, what guards did, and the weights at the end.


@dataclass(frozen=True)
class GuardEvent:
    """One firing of a guard.

    Args:
        step: optimizer steps done.
        rule: name of the rule.
        message: what was seen and what was done.
        history: the metric's last ``(step, value)`` pairs before it.
    """

    step: int
    rule: str
    message: str = ""
    history: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> GuardEvent:
        """Read a plain record with the keys ``step``, ``rule``, ``message`` and ``history``.

        Values of the history without a step are numbered up to the event's step.

        Raises:
            DataError: a record that is none.
        """
        try:
            step = int(record["step"])
            values = list(record.get("history", ()))
            first = step - len(values) + 1
            history = tuple(
                (int(value[0]), float(value[1]))
                if isinstance(value, list | tuple)
                else (first + place, float(value))
                for place, value in enumerate(values)
            )
            return cls(step, str(record["rule"]), str(record.get("message", "")), history)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"A guard event is {dict(record)!r}: {error!r}",
                "step, rule, message and a history of numbers or (step, value) pairs",
                "record the event with these keys",
            ) from error


@dataclass(frozen=True)
class MetricNames:
    """Which metric of the history is what; one that is missing is not drawn."""

    reward: str = "reward_mean"
    probe_reward: str = "probe_reward"
    kl_probe: str = "kl_probe"
    kl_data: str = "kl_data"
    ess: str = "ess_share"
    ess_raw: str = "ess_share_raw"
    chosen_drift: str = "chosen_logprob_drift"
    rejected_drift: str = "rejected_logprob_drift"
    learning_rate: str = "learning_rate"
    batch: str = "batch_prompts"


@dataclass(frozen=True)
class TrainingCourse:
    """How training went.

    Args:
        history: metrics by step.
        events: firings of the guards, in order.
        final_weights: (N,) importance weights of the last steps; None where there are none.
        bounds: metric name to the value at which a guard acts.
    """

    history: Sequence[tuple[int, Mapping[str, float]]]
    events: Sequence[GuardEvent] = ()
    final_weights: Tensor | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    names: MetricNames = field(default_factory=MetricNames)

    @property
    def kl_bound(self) -> float | None:
        """Where the guard of the probe KL acts."""
        return self.bounds.get(self.names.kl_probe)

    @property
    def last_step(self) -> int:
        """The last step that has metrics."""
        return self.history[-1][0] if self.history else 0

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and finite values of a metric."""
        points = [(step, metrics[name]) for step, metrics in self.history if name in metrics]
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]


@dataclass(frozen=True)
class MetricSummary:
    """One metric over the run.

    Args:
        n: finite values.
        n_not_finite: values left out of the rest.
    """

    n: int
    n_not_finite: int
    first: float
    last: float
    minimum: float
    minimum_step: int
    maximum: float
    maximum_step: int


@dataclass(frozen=True)
class WeightSummary:
    """The importance weights at the end.

    Args:
        ess_share: effective sample size over n.
        at_maximum_share: weights within a thousandth of the largest.
    """

    n: int
    mean: float
    maximum: float
    ess_share: float
    at_maximum_share: float


def guards_fired(events: Sequence[GuardEvent]) -> dict[str, int]:
    """Return how often each rule fired, the most frequent first."""
    return dict(Counter(event.rule for event in events).most_common())


def event_record(event: GuardEvent) -> dict[str, Any]:
    """Return a firing as JSON can hold it."""
    kept = [[step, value if math.isfinite(value) else str(value)] for step, value in event.history]
    return {"step": event.step, "rule": event.rule, "message": event.message, "history": kept}


def summarize_metrics(course: TrainingCourse) -> dict[str, MetricSummary]:
    """Return a summary of every metric that has a finite value, by name."""
    counts = Counter(name for _, metrics in course.history for name in metrics)
    found = {}
    for name in sorted(counts):
        steps, values = course.curve(name)
        if values:
            low, high = min(values), max(values)
            found[name] = MetricSummary(
                n=len(values),
                n_not_finite=counts[name] - len(values),
                first=values[0],
                last=values[-1],
                minimum=low,
                minimum_step=steps[values.index(low)],
                maximum=high,
                maximum_step=steps[values.index(high)],
            )
    return found


def summarize_weights(weights: Tensor | None) -> WeightSummary | None:
    """Return figures of (N,) weights; None where there are none.

    Raises:
        TrainingError: a weight that is not finite.
    """
    if weights is None or weights.numel() == 0:
        return None
    values = weights.detach().cpu().double()
    share = float(effective_sample_size(values)) / len(values)
    top = float(values.max())
    return WeightSummary(
        n=len(values),
        mean=float(values.mean()),
        maximum=top,
        ess_share=share,
        at_maximum_share=float((values >= top * (1 - 1e-3)).double().mean()),
    )


SCHEMA_VERSION: Final = 1

Verdict = Literal[
    "better", "better_not_at_equal_length", "better_length_unknown", "undecided", "worse"
]


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


# The policy's report as pages of Markdown: the verdict first, then figures, then texts to read.

_SHOWN_EVENTS: Final = 40
_SHOWN_HISTORY: Final = 5
_VERDICTS: Final[dict[Verdict, str]] = {
    "better": "The policy is better than the base",
    "better_not_at_equal_length": "The policy wins against the base, but at equal length it is not "
    "shown to be better",
    "better_length_unknown": "The policy wins against the base; whether by length alone cannot be "
    "told from these responses",
    "undecided": "The policy is neither shown to be better nor to be worse than the base",
    "worse": "The policy is worse than the base",
}
_LENGTH_REMARKS: Final = {
    "equal_lengths": "all responses are as long as the base's",
    "equal_results": "all pairs have the same result, which leaves length nothing to explain",
    "constant_difference": "all pairs differ by the same number of tokens",
    "separable": "wins and losses are divided by one length difference",
}
_GROUPS: Final = {
    "best": "Where the policy is furthest ahead",
    "worst": "Where the policy is furthest behind",
    "random": "At random from the others",
}


def render_policy_report(report: PolicyReport) -> str:
    """Return the report; what people and models wrote is kept inert."""
    first, *rest = map(cell, summarize_policy(report))
    sections = [
        f"# {first}",
        *rest,
        "![](overview.png)",
        "## Held-out prompts",
        _rate_table(report),
        _difference_table(report),
        *_fact_section(report),
        "## Guards",
        *_guard_sections(report.course.events),
        "## Metrics",
        *_metric_section(report.course),
        "Responses side by side are in [samples.md](samples.md).",
    ]
    return "\n\n".join(sections) + "\n"


def summarize_policy(report: PolicyReport) -> list[str]:
    """Return the verdict and what it rests on, in plain sentences, the verdict first."""
    found = report.held_out.comparison
    rate = found.plain
    prompts = f"{rate.n} responses to {rate.n_prompts} held-out prompts"
    if rate.n == rate.n_prompts:
        prompts = f"{rate.n} held-out prompts"
    ties = f"; {rate.n_ties} ties count half" if rate.n_ties else ""
    return [
        f"{_VERDICTS[report.verdict]}, by {report.held_out.judge}",
        f"It wins {rate.value:.1%} of {prompts} (95 % interval {_percent(rate.interval)}{ties}). "
        + _length_sentence(found.length_controlled),
        f"Score, policy less base: {_signed(found.score_difference, 3)}; tokens, policy less base: "
        f"{_signed(found.length_difference, 1)} (mean and standard error).",
        _kl_sentence(report),
        _guard_sentence(report.course.events),
    ]


def _length_sentence(found: LengthControlledWinRate) -> str:
    remark = _LENGTH_REMARKS.get(found.outcome)
    if found.known is None:
        return f"At equal length it is unknown: {remark}."
    rate, interval = found.known
    text = f"At equal length it wins {rate:.1%} ({_percent(interval)})"
    remarks = [remark] if remark else []
    if found.is_extrapolated:
        remarks.append(
            "no length difference was 0 or on the other side of it, so this is extrapolated"
        )
    return f"{text}: {'; '.join(remarks)}." if remarks else f"{text}."


def _kl_sentence(report: PolicyReport) -> str:
    kl, bound = report.held_out.kl, report.course.kl_bound
    if kl is None:
        return "Its KL from the base was not measured."
    text = (
        f"Its KL from the base, on its own responses, is {_signed(kl.k1, 4)} nats per token (k3 "
        f"{kl.k3.value:.4f}), {kl.per_response.value:.3f} per response"
    )
    if bound is None:
        return f"{text}."
    side = "above" if kl.k1.value > bound else "within"
    return f"{text}; that is {side} the guard's bound of {bound:g}."


def _guard_sentence(events: Sequence[GuardEvent]) -> str:
    if not events:
        return "No guard fired."
    fired = [
        f"{rule} {'once' if n == 1 else f'{n} times'}" for rule, n in guards_fired(events).items()
    ]
    return f"Guards that fired: {', '.join(fired)}; the last at step {events[-1].step}."


def _percent(interval: Interval) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}"


def _signed(mean: ClusteredMean, digits: int) -> str:
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.{digits}f}"
    return f"{mean.value:+.{digits}f}{error}"


def _rate_table(report: PolicyReport) -> str:
    found = report.held_out.comparison
    rows = [_rate_row("all", found.plain)]
    if found.length_controlled.known is not None:
        rate, interval = found.length_controlled.known
        rows.append(("all, at equal length", *[""] * 5, f"{rate:.3f}", "", _interval(interval)))
    rows += [_rate_row(cell(name), part) for name, part in report.held_out.subsets.items()]
    header = ("pairs", "n", "prompts", "won", "tied", "lost", "win rate")
    return table((*header, "95 % (Wilson)", "95 % (bootstrap)"), rows)


def _rate_row(name: str, found: PlainWinRate) -> tuple[str, ...]:
    counts = (found.n, found.n_prompts, found.n_wins, found.n_ties, found.n_losses)
    rate = (f"{found.value:.3f}", _interval(found.wilson), _interval(found.bootstrap))
    return (name, *map(str, counts), *rate)


def _interval(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"


def _difference_table(report: PolicyReport) -> str:
    found, kl = report.held_out.comparison, report.held_out.kl
    means = {
        "score, policy less base": found.score_difference,
        "tokens, policy less base": found.length_difference,
    }
    if kl is not None:
        means["KL per token, k1 (nats)"] = kl.k1
        means["KL per token, k3 (nats)"] = kl.k3
        means["KL per response (nats)"] = kl.per_response
    rows = [
        (name, f"{m.value:.5g}", "" if m.standard_error is None else f"{m.standard_error:.2g}", m.n)
        for name, m in means.items()
    ]
    return table(("mean of", "value", "standard error", "n"), rows)


def _fact_section(report: PolicyReport) -> list[str]:
    if not report.facts:
        return []
    rows = [(cell(name), f"{value:.5g}") for name, value in report.facts.items()]
    return ["## Other figures", table(("figure", "value"), rows)]


def _guard_sections(events: Sequence[GuardEvent]) -> list[str]:
    if not events:
        return ["No guard fired."]
    rows = [(e.step, cell(e.rule), cell(e.message), _last_values(e)) for e in events]
    left_out = len(rows) - _SHOWN_EVENTS
    more = [f"{left_out} more are in report.json."] if left_out > 0 else []
    header = ("step", "rule", "what was seen and done", "metric before, oldest first")
    return [table(header, rows[:_SHOWN_EVENTS]), *more]


def _last_values(event: GuardEvent) -> str:
    return ", ".join(f"{value:.4g}" for _, value in event.history[-_SHOWN_HISTORY:])


def _metric_section(course: TrainingCourse) -> list[str]:
    summaries = summarize_metrics(course)
    if not summaries:
        return ["No step was recorded."]
    rows = [
        (
            cell(name),
            found.n,
            f"{found.first:.5g}",
            f"{found.last:.5g}",
            f"{found.minimum:.5g} (step {found.minimum_step})",
            f"{found.maximum:.5g} (step {found.maximum_step})",
            found.n_not_finite or "",
        )
        for name, found in summaries.items()
    ]
    header = ("metric", "values", "first", "last", "lowest", "highest", "not finite")
    return [table(header, rows)]


def render_samples(samples: Sequence[Sample]) -> str:
    """Return pairs of responses to read; what people and models wrote is kept inert."""
    sections = ["# Responses of base and policy, side by side"]
    for group, members in groupby(samples, key=lambda sample: sample.group):
        sections.append(f"## {_GROUPS[group]}")
        sections += [_sample_section(sample) for sample in members]
    return "\n\n".join(sections) + "\n"


def _sample_section(sample: Sample) -> str:
    pair = sample.pair
    facts = [
        f"score of the base {pair.base_score:.3f}, of the policy {pair.policy_score:.3f}, "
        f"difference {pair.score_difference:+.3f}",
        f"{pair.base_tokens} and {pair.policy_tokens} tokens",
    ]
    if pair.subset:
        facts.append(f"subset {cell(pair.subset)}")
    texts = (
        ("Prompt", pair.prompt),
        ("Base", pair.base_response),
        ("Policy", pair.policy_response),
    )
    blocks = [f"{name}:\n\n{block(text)}" for name, text in texts]
    heading = f"### {sample.rank}. Prompt {cell(pair.prompt_id)}"
    return "\n\n".join([heading, "; ".join(facts), *blocks])


# Plots of the policy's report: one figure with all of them, and each as a file.

_BLUE: Final = "#0072B2"
_ORANGE: Final = "#D55E00"
_GREY: Final = "#666666"
_EVENT_COLOURS: Final = ("#CC79A7", "#009E73", "#A6761D", "#3A7CA5", "#7F3C8D", "#8C564B")
# The name of a firing starts at one of these heights, so that close ones do not cover each other.
_EVENT_HEIGHTS: Final = (0.98, 0.74, 0.5, 0.26)
# Firings of one rule closer than this share of the axis have one name.
_EVENT_GAP: Final = 0.03
# Below this many points each is marked, for a line of one point is not seen.
_MARKED_POINTS: Final = 40
_HISTOGRAM_BINS: Final = 40
_DPI: Final = 120

Draw = Callable[[Any, TrainingCourse], None]
Line = tuple[str, str, str]


def draw_plots(report: PolicyReport, directory: Path) -> list[Path]:
    """Write ``overview.png`` and one file for each plot; return them."""
    files = [directory / "overview.png"]
    overview = Figure(figsize=(18, 11))
    places = overview.subplots(2, 3).flat
    # Fixed margins: a computed layout takes several times as long as the drawing.
    overview.subplots_adjust(left=0.05, right=0.97, top=0.95, bottom=0.09, wspace=0.25, hspace=0.35)
    for name, draw in _PLOTS.items():
        draw(next(places), report.course)
        single = Figure(figsize=(8, 5.5))
        draw(single.subplots(), report.course)
        single.subplots_adjust(left=0.13, right=0.9, top=0.9, bottom=0.2)
        files.append(directory / f"{name}.png")
        single.savefig(files[-1], dpi=_DPI)
    overview.savefig(files[0], dpi=_DPI)
    return files


def _reward(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.reward, "batch (stored responses)", _GREY),
        (names.probe_reward, "probe (own responses)", _BLUE),
    ]
    _draw_lines(axes, course, lines)
    _finish(axes, course, "Reward", "mean reward (training s.d.)")


def _kl(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.kl_data, "data, weighted", _GREY),
        (names.kl_probe, "probe (own responses)", _BLUE),
    ]
    _draw_lines(axes, course, lines)
    _draw_bound(axes, course, names.kl_probe)
    _finish(axes, course, "KL from the base", "nats per token")


def _effective_sample_size(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [(names.ess_raw, "raw ratios", _GREY), (names.ess, "weights used", _BLUE)]
    _draw_lines(axes, course, lines)
    _draw_bound(axes, course, names.ess)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, course, "Effective sample size", "share of the batch")


def _drift(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.chosen_drift, "chosen", _BLUE),
        (names.rejected_drift, "rejected", _ORANGE),
    ]
    axes.axhline(0.0, color="black", linewidth=0.8)
    _draw_lines(axes, course, lines)
    _finish(axes, course, "Log-probability against the base", "nats per response")


def _schedule(axes: Any, course: TrainingCourse) -> None:
    """Draw learning rate on the left axis and batch size on the right one."""
    names = course.names
    _draw_lines(axes, course, [(names.learning_rate, "learning rate", _BLUE)])
    steps, sizes = course.curve(names.batch)
    if steps:
        right = axes.twinx()
        right.plot(steps, sizes, color=_ORANGE, linewidth=1.2, drawstyle="steps-post")
        right.set_ylim(0, 1.15 * max(sizes) or 1.0)
        right.set_ylabel("prompts per step", color=_ORANGE)
        # The left axes lie on top: theirs are the legend and the names of firings.
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot([], [], color=_ORANGE, label="batch")
    _finish(axes, course, "Learning rate and batch", "learning rate")


def _weights(axes: Any, course: TrainingCourse) -> None:
    found = summarize_weights(course.final_weights)
    axes.set_title("Importance weights at the end")
    if found is None or course.final_weights is None:
        _say_missing(axes)
        return
    # Weights that are equal but for rounding have no width to be put into bins.
    edges = torch.linspace(0.0, max(1.05 * found.maximum, 1e-6), _HISTOGRAM_BINS + 1).tolist()
    values = course.final_weights.detach().cpu().double().tolist()
    axes.hist(values, bins=edges, color=_BLUE)
    axes.axvline(found.mean, color=_ORANGE, linestyle="--", label=f"mean {found.mean:.3g}")
    axes.set_yscale("log")
    axes.set_xlabel("weight")
    axes.set_ylabel("responses (logarithmic)")
    axes.set_title(
        f"Importance weights at the end\nESS {found.ess_share:.2f} of {found.n} responses, "
        f"{found.at_maximum_share:.0%} at the largest"
    )
    axes.legend(loc="upper right")


def _draw_lines(axes: Any, course: TrainingCourse, lines: Sequence[Line]) -> None:
    for metric, label, colour in lines:
        steps, values = course.curve(metric)
        if steps:
            marker = "o" if len(steps) < _MARKED_POINTS else None
            style = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 1.2}
            axes.plot(steps, values, label=label, **style)


def _draw_bound(axes: Any, course: TrainingCourse, metric: str) -> None:
    bound = course.bounds.get(metric)
    if bound is not None:
        label = f"guard at {bound:g}"
        axes.axhline(bound, color=_ORANGE, linestyle="--", linewidth=1.0, label=label)


def _finish(axes: Any, course: TrainingCourse, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        # Below the axes, where it covers no curve and no name.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize="small")
    else:
        _say_missing(axes)
    _draw_events(axes, course.events)


def _say_missing(axes: Any) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_GREY)


def _draw_events(axes: Any, events: Sequence[GuardEvent]) -> None:
    """Draw each firing as a line in the colour of its rule, with the rule's name."""
    if not events:
        return
    rules = list(guards_fired(events))
    low, high = axes.get_xlim()
    span = max(high, max(event.step for event in events)) - min(low, events[0].step)
    named: dict[str, int] = {}
    n_names = 0
    for event in events:
        colour = _EVENT_COLOURS[rules.index(event.rule) % len(_EVENT_COLOURS)]
        axes.axvline(event.step, color=colour, linestyle=":", linewidth=1.2)
        if event.rule in named and event.step - named[event.rule] < _EVENT_GAP * span:
            continue
        named[event.rule] = event.step
        height = _EVENT_HEIGHTS[n_names % len(_EVENT_HEIGHTS)]
        n_names += 1
        axes.text(
            event.step,
            height,
            event.rule,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize="x-small",
            color=colour,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )


_PLOTS: Final[Mapping[str, Draw]] = {
    "reward": _reward,
    "kl": _kl,
    "effective_sample_size": _effective_sample_size,
    "weights": _weights,
    "logprob_drift": _drift,
    "schedule": _schedule,
}
