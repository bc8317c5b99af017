"""The policy's report as pages of Markdown: the verdict first, then figures, then texts to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from tasks.algorithms.resampling import ClusteredMean, Interval
from tasks.algorithms.win_rates import LengthControlledWinRate, PlainWinRate
from tasks.data.markdown import block, cell, table
from tasks.data.policy_report import PolicyReport, Verdict
from tasks.data.policy_samples import Sample
from tasks.data.training_course import GuardEvent, TrainingCourse, guards_fired, summarize_metrics

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
