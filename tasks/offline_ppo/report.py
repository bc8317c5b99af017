"""What offline PPO made of the base: the held-out comparison, the run's course, what guards did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from tasks.algorithms.importance import effective_sample_size
from tasks.algorithms.statistics import (
    ClusteredMean,
    Interval,
    LengthControlledWinRate,
    PlainWinRate,
)
from tasks.data.history import FILE_NAME, write_history
from tasks.report import plots
from tasks.report.page import cell, interval, join, table, with_error, write_report
from tasks.report.pairs import (
    HeldOut,
    Samples,
    pick_samples,
    render_samples,
    sample_rows,
    write_response_pairs,
    write_sample_table,
)

SCHEMA_VERSION: Final = 1

Verdict = Literal[
    "better", "better_not_at_equal_length", "better_length_unknown", "undecided", "worse"
]


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
    history: Sequence[tuple[int, float]] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> GuardEvent:
        """Read what a guard recorded."""
        history = [(step, float(value)) for step, value in record["history"]]
        return cls(record["step"], record["rule"], record["message"], history)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; a number that is not finite becomes its text."""
        history = [[step, v if math.isfinite(v) else str(v)] for step, v in self.history]
        return {**asdict(self), "history": history}


@dataclass(frozen=True)
class PolicyReport:
    """A trained policy.

    Args:
        held_out: the policy beside the base.
        history: metrics by step.
        events: firings of the guards, in order.
        final_weights: (N,) importance weights of the last steps; None where there are none.
        bounds: metric name to the value at which a guard acts.
        facts: other figures that belong beside the verdict, all finite.
        seed: of the choice of pairs to read.
    """

    held_out: HeldOut
    history: Sequence[tuple[int, Mapping[str, float]]]
    events: Sequence[GuardEvent] = ()
    final_weights: Tensor | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

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

    @property
    def samples(self) -> Samples:
        """Pairs to read."""
        return pick_samples(self.held_out.pairs, seed=self.seed)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and finite values of a metric."""
        points = [(step, metrics[name]) for step, metrics in self.history if name in metrics]
        return [(step, value) for step, value in points if math.isfinite(value)]

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
            "guard_firings": float(len(self.events)),
        }
        if found.length_controlled.known is not None:
            controlled, ends = found.length_controlled.known
            flat["held_out_win_rate_length_controlled"] = controlled
            flat["held_out_win_rate_length_controlled_low"] = ends.low
            flat["held_out_win_rate_length_controlled_high"] = ends.high
        if self.held_out.kl is not None:
            flat["held_out_kl_probe"] = self.held_out.kl.k1.value
            flat["held_out_kl_probe_k3"] = self.held_out.kl.k3.value
            if self.held_out.kl.k1.standard_error is not None:
                flat["held_out_kl_probe_error"] = self.held_out.kl.k1.standard_error
        for subset, part in self.held_out.subsets.items():
            flat[f"held_out_win_rate.{subset}"] = part.value
        return flat

    def as_json(self) -> dict[str, Any]:
        """Return what ``report.json`` holds; an interval is a list of low and high."""
        found = self.held_out.comparison
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "summary": summarize_policy(self),
            "judge": self.held_out.judge,
            # The last step that has metrics.
            "last_step": self.history[-1][0] if self.history else 0,
            "n_prompts": found.plain.n_prompts,
            "n_pairs": found.plain.n,
            "win_rate": asdict(found.plain),
            "length_controlled_win_rate": asdict(found.length_controlled),
            "score_difference": asdict(found.score_difference),
            "length_difference_tokens": asdict(found.length_difference),
            "subsets": {name: asdict(rate) for name, rate in self.held_out.subsets.items()},
            "kl_probe": self.held_out.kl and asdict(self.held_out.kl),
            "kl_bound": self.bounds.get("kl_probe"),
            "guard_events": [event.as_json() for event in self.events],
            "metrics": summarize_metrics(self),
            "weights": summarize_weights(self.final_weights),
            "facts": dict(self.facts),
            "samples": sample_rows(self.samples),
        }


def guards_fired(events: Sequence[GuardEvent]) -> dict[str, int]:
    """Return how often each rule fired, the most frequent first."""
    return dict(Counter(event.rule for event in events).most_common())


def summarize_metrics(report: PolicyReport) -> dict[str, dict[str, Any]]:
    """Return, of every metric that has finite values, how many these are and how many are not, the
    first, the last, the lowest and the highest with their steps."""
    counts = Counter(name for _, metrics in report.history for name in metrics)
    found = {}
    for name in sorted(counts):
        points = report.curve(name)
        if points:
            lowest, highest = min(points, key=itemgetter(1)), max(points, key=itemgetter(1))
            found[name] = {
                "n": len(points),
                "n_not_finite": counts[name] - len(points),
                "first": points[0][1],
                "last": points[-1][1],
                "minimum": lowest[1],
                "minimum_step": lowest[0],
                "maximum": highest[1],
                "maximum_step": highest[0],
            }
    return found


def summarize_weights(weights: Tensor | None) -> dict[str, float] | None:
    """Return figures of (N,) weights, finite since `importance` checks the ratios: the effective
    sample size over n, and the share of weights within a thousandth of the largest, among others;
    None where there are none."""
    if weights is None or weights.numel() == 0:
        return None
    values = weights.detach().cpu().double()
    top = float(values.max())
    return {
        "n": len(values),
        "mean": float(values.mean()),
        "maximum": top,
        "ess_share": float(effective_sample_size(values)) / len(values),
        "at_maximum_share": float((values >= top * (1 - 1e-3)).double().mean()),
    }


def write_policy_report(report: PolicyReport, directory: Path) -> list[Path]:
    """Write pages, plots and tables; return the files.

    ``report.json``, ``report.md``, ``samples.md``, ``samples.json`` (a table as MLflow keeps it),
    ``held_out_pairs.parquet``, ``history.jsonl``, and the plots.
    """
    files = write_report(directory, report.as_json(), render_policy_report(report))
    names = ("samples.md", "samples.json", "held_out_pairs.parquet", FILE_NAME)
    page, samples, pairs, history = (directory / name for name in names)
    page.write_text(render_samples(report.samples), encoding="utf-8")
    write_sample_table(samples, report.samples)
    write_response_pairs(pairs, report.held_out.pairs)
    write_history(history, report.history)
    drawn = {name: partial(draw, report=report) for name, draw in _PLOTS.items()}
    return [*files, page, samples, pairs, history, *plots.draw_plots(drawn, directory)]


# The page: the verdict first, then figures.

_SHOWN_EVENTS: Final = 40
_SHOWN_HISTORY: Final = 5
_WEIGHT_BINS: Final = 40
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


def render_policy_report(report: PolicyReport) -> str:
    """Return the report; what people and models wrote is kept inert."""
    verdict, *rest = map(cell, summarize_policy(report))
    facts = [(cell(name), f"{value:.5g}") for name, value in report.facts.items()]
    left_out = len(report.events) - _SHOWN_EVENTS
    return join(
        [
            f"# {verdict}",
            *rest,
            "![](overview.png)",
            "## Held-out prompts",
            _rate_table(report.held_out),
            _mean_table(report.held_out),
            *(["## Other figures", table(("figure", "value"), facts)] if facts else []),
            "## Guards",
            _event_table(report.events[:_SHOWN_EVENTS]),
            f"{left_out} more are in report.json." if left_out > 0 else "",
            "## Metrics",
            _metric_table(report),
            "Responses side by side are in [samples.md](samples.md).",
        ]
    )


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
        f"It wins {rate.value:.1%} of {prompts} (95 % interval {_ends(rate.interval, '.1%')}"
        f"{ties}). " + _length_sentence(found.length_controlled),
        f"Score, policy less base: {_mean(found.score_difference, '+.3f')}; tokens, policy less "
        f"base: {_mean(found.length_difference, '+.1f')} (mean and standard error).",
        _kl_sentence(report),
        _guard_sentence(report.events),
    ]


def _ends(ends: Interval, form: str = ".3f") -> str:
    return interval(ends.low, ends.high, form)


def _mean(mean: ClusteredMean, form: str) -> str:
    return with_error(mean.value, mean.standard_error, form)


def _length_sentence(found: LengthControlledWinRate) -> str:
    remark = _LENGTH_REMARKS.get(found.outcome)
    if found.known is None:
        return f"At equal length it is unknown: {remark}."
    rate, ends = found.known
    remarks = [remark] if remark else []
    if found.is_extrapolated:
        remarks.append(
            "no length difference was 0 or on the other side of it, so this is extrapolated"
        )
    text = f"At equal length it wins {rate:.1%} ({_ends(ends, '.1%')})"
    return f"{text}: {'; '.join(remarks)}." if remarks else f"{text}."


def _kl_sentence(report: PolicyReport) -> str:
    kl, bound = report.held_out.kl, report.bounds.get("kl_probe")
    if kl is None:
        return "Its KL from the base was not measured."
    text = (
        f"Its KL from the base, on its own responses, is {_mean(kl.k1, '+.4f')} nats per token (k3 "
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


def _rate_table(held_out: HeldOut) -> str:
    rows = [_rate_row("all", held_out.comparison.plain)]
    if held_out.comparison.length_controlled.known is not None:
        rate, ends = held_out.comparison.length_controlled.known
        rows.append(("all, at equal length", *[""] * 5, f"{rate:.3f}", "", _ends(ends)))
    rows += [_rate_row(cell(name), part) for name, part in held_out.subsets.items()]
    header = ("pairs", "n", "prompts", "won", "tied", "lost", "win rate")
    return table((*header, "95 % (Wilson)", "95 % (bootstrap)"), rows)


def _rate_row(name: str, found: PlainWinRate) -> tuple[object, ...]:
    counts = (found.n, found.n_prompts, found.n_wins, found.n_ties, found.n_losses)
    rate = (f"{found.value:.3f}", _ends(found.wilson), _ends(found.bootstrap))
    return (name, *counts, *rate)


def _mean_table(held_out: HeldOut) -> str:
    found, kl = held_out.comparison, held_out.kl
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


def _event_table(events: Sequence[GuardEvent]) -> str:
    if not events:
        return "No guard fired."
    rows = []
    for event in events:
        before = ", ".join(f"{value:.4g}" for _, value in event.history[-_SHOWN_HISTORY:])
        rows.append((event.step, cell(event.rule), cell(event.message), before))
    return table(("step", "rule", "what was seen and done", "metric before, oldest first"), rows)


def _metric_table(report: PolicyReport) -> str:
    rows = [
        (
            cell(name),
            m["n"],
            f"{m['first']:.5g}",
            f"{m['last']:.5g}",
            f"{m['minimum']:.5g} (step {m['minimum_step']})",
            f"{m['maximum']:.5g} (step {m['maximum_step']})",
            m["n_not_finite"] or "",
        )
        for name, m in summarize_metrics(report).items()
    ]
    header = ("metric", "values", "first", "last", "lowest", "highest", "not finite")
    return table(header, rows) if rows else "No step was recorded."


# The plots, over steps but for the weights.


def _reward(axes: plots.Axes, report: PolicyReport) -> None:
    _draw_curve(axes, report, "reward_mean", "batch (stored responses)", plots.GREY)
    _draw_curve(axes, report, "probe_reward", "probe (own responses)", plots.BLUE)
    _finish(axes, report, "Reward", "mean reward (training s.d.)")


def _kl(axes: plots.Axes, report: PolicyReport) -> None:
    _draw_curve(axes, report, "kl_data", "data, weighted", plots.GREY)
    _draw_curve(axes, report, "kl_probe", "probe (own responses)", plots.BLUE)
    _draw_bound(axes, report, "kl_probe")
    _finish(axes, report, "KL from the base", "nats per token")


def _effective_sample_size(axes: plots.Axes, report: PolicyReport) -> None:
    _draw_curve(axes, report, "ess_share_raw", "raw ratios", plots.GREY)
    _draw_curve(axes, report, "ess_share", "weights used", plots.BLUE)
    _draw_bound(axes, report, "ess_share")
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, report, "Effective sample size", "share of the batch")


def _drift(axes: plots.Axes, report: PolicyReport) -> None:
    axes.axhline(0.0, color="black", linewidth=0.8)
    _draw_curve(axes, report, "chosen_logprob_drift", "chosen", plots.BLUE)
    _draw_curve(axes, report, "rejected_logprob_drift", "rejected", plots.ORANGE)
    _finish(axes, report, "Log-probability against the base", "nats per response")


def _schedule(axes: plots.Axes, report: PolicyReport) -> None:
    """Draw learning rate on the left axis and batch size on the right one."""
    _draw_curve(axes, report, "learning_rate", "learning rate", plots.BLUE)
    sizes = report.curve("batch_prompts")
    if sizes:
        right = axes.twinx()
        style = {"color": plots.ORANGE, "linewidth": 1.2, "drawstyle": "steps-post"}
        right.plot(*zip(*sizes, strict=True), **style)
        right.set_ylim(0, 1.15 * max(size for _, size in sizes) or 1.0)
        right.set_ylabel("prompts per step", color=plots.ORANGE)
        # The left axes lie on top: theirs are the legend and the names of firings.
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot([], [], color=plots.ORANGE, label="batch")
    _finish(axes, report, "Learning rate and batch", "learning rate")


def _weights(axes: plots.Axes, report: PolicyReport) -> None:
    found = summarize_weights(report.final_weights)
    title = "Importance weights at the end"
    if found is None or report.final_weights is None:
        axes.set_title(title)
        plots.add_legend(axes)
        return
    # Weights that are equal but for rounding have no width to be put into bins.
    span = (0.0, max(1.05 * found["maximum"], 1e-6))
    values = report.final_weights.detach().cpu().double().numpy()
    axes.hist(values, _WEIGHT_BINS, range=span, color=plots.BLUE)
    mean = found["mean"]
    axes.axvline(mean, color=plots.ORANGE, linestyle="--", label=f"mean {mean:.3g}")
    title += f"\nESS {found['ess_share']:.2f} of {found['n']} responses, "
    title += f"{found['at_maximum_share']:.0%} at the largest"
    axes.set(title=title, xlabel="weight", ylabel="responses (logarithmic)", yscale="log")
    axes.legend(loc="upper right")


def _draw_curve(
    axes: plots.Axes, report: PolicyReport, metric: str, label: str, colour: str
) -> None:
    plots.draw_curve(axes, report.curve(metric), label, colour)


def _draw_bound(axes: plots.Axes, report: PolicyReport, metric: str) -> None:
    if metric in report.bounds:
        plots.draw_line(axes, report.bounds[metric], f"guard at {report.bounds[metric]:g}")


def _finish(axes: plots.Axes, report: PolicyReport, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="step", ylabel=unit)
    # Below the axes, where it covers no curve and no name.
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
    plots.add_legend(axes, ncols=3, fontsize="small", **below)
    plots.draw_events(axes, [(event.step, event.rule) for event in report.events])


_PLOTS: Final = {
    "reward": _reward,
    "kl": _kl,
    "effective_sample_size": _effective_sample_size,
    "weights": _weights,
    "logprob_drift": _drift,
    "schedule": _schedule,
}
