"""The evaluation as a page to read and plots to look at."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tasks.data.questions import ModelAnswer, Question

_SHOWN_QUESTIONS: Final = 6
_FEWEST_SPOKES: Final = 3


def render_report(
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
) -> str:
    """Return the scores and some answers side by side, as markdown; what models wrote is
    escaped."""
    judge = "the reward model" if report["judge"] == "reward_model" else _safe(report["judge"])
    lines = [
        f"# Evaluation by {judge}",
        "",
        f"Scale: {_safe(report['scale'])}.",
        "",
        "| model | turn 1 | turn 2 | mean | win rate against base | held-out score |",
        "|---|---|---|---|---|---|",
    ]
    for name, scores in report["questions"].items():
        held_out = report["held_out"].get(name, {})
        figures = [_figure(scores[key], 2) for key in ("turn_1", "turn_2", "mean")]
        figures.append(_figure(held_out.get("win_rate_against_base"), 3))
        figures.append(_figure(held_out.get("mean_score"), 2))
        lines.append(f"| {name} | {' | '.join(figures)} |")
    lines += _notes(report)
    for question in questions[:_SHOWN_QUESTIONS]:
        lines += ["", f"## Question {question.question_id} ({_safe(question.category)})", ""]
        for turn, asked in enumerate(question.turns):
            lines.append(f"**{_safe(asked)}**")
            lines += [
                f"- {name}: {_said(found, question, turn)}" for name, found in answers.items()
            ]
    return "\n".join(lines) + "\n"


def _notes(report: Mapping[str, Any]) -> list[str]:
    lines = []
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"].items()
        lines += ["", "Good answers by the oracle: " + ", ".join(f"{n} {r:.3f}" for n, r in rates)]
    if not _is_unbounded(report):
        lines += ["", "Win rate against base and held-out score are the reward model's."]
    for name, games in report.get("pairwise", {}).items():
        counts = f"{games['wins']} wins, {games['ties']} ties, {games['losses']} losses"
        rate = _figure(games["win_rate_adjusted"], 3)
        lines += ["", f"{name} against base, by the judge: {counts}; {rate} with ties half."]
    failed = {n: s["coverage"] for n, s in report["questions"].items() if s["coverage"] < 1.0}
    if failed:
        covered = ", ".join(f"{name} {coverage:.1%}" for name, coverage in failed.items())
        lines += ["", f"Judgments with a score: {covered}; the others enter no mean."]
    gate = report.get("gate", {})
    if gate.get("verdict"):
        lines += ["", f"Gate: {gate['model']} {gate['verdict']}."]
        lines += [f"- {check['name']}: {check_text(check)}" for check in gate["checks"]]
    return lines


def check_text(check: Mapping[str, Any]) -> str:
    """Return one check of the gate in words."""
    state = "passed" if check["passed"] else "failed"
    return f"{state}, {_figure(check['value'], 3)} ({check['what']}), limit {check['limit']:g}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _said(found: Sequence[ModelAnswer], question: Question, turn: int) -> str:
    matching = [answer for answer in found if answer.question_id == question.question_id]
    return _safe(matching[0].turns[turn]) if matching else ""


def _safe(text: str) -> str:
    return html.escape(" ".join(text.split()))


def plot_scores(report: Mapping[str, Any], path: Path) -> None:
    """Draw the mean score of each model by question category, as bars."""
    from matplotlib.figure import Figure

    names = list(report["questions"])
    categories = list(report["questions"][names[0]]["categories"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        places = [index + offset * width for index in range(len(categories))]
        axes.bar(places, _values(report, name, categories), width, label=name)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(categories))], categories)
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel(_unit(report))
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)


def plot_radar(report: Mapping[str, Any], path: Path) -> bool:
    """Draw the same around a circle; with fewer than three categories nothing is drawn."""
    from matplotlib.figure import Figure

    names = list(report["questions"])
    categories = list(report["questions"][names[0]]["categories"])
    if len(categories) < _FEWEST_SPOKES:
        return False
    angles = [2 * math.pi * index / len(categories) for index in range(len(categories))]
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot(projection="polar")
    for name in names:
        values = _values(report, name, categories)
        axes.plot([*angles, angles[0]], [*values, values[0]], label=name)
    axes.set_xticks(angles, categories)
    if not _is_unbounded(report):
        axes.set_ylim(0.0, 10.0)
    axes.set_title(_unit(report), fontsize="small")
    axes.legend(loc="lower right", bbox_to_anchor=(1.25, -0.1), fontsize="small")
    figure.savefig(path, dpi=120)
    return True


def _values(report: Mapping[str, Any], name: str, categories: Sequence[str]) -> list[float]:
    """Return the means; a category without a valid judgment is a gap."""
    means = report["questions"][name]["categories"]
    return [math.nan if means.get(c) is None else means[c] for c in categories]


def _is_unbounded(report: Mapping[str, Any]) -> bool:
    return bool(report.get("judge", "reward_model") == "reward_model")


def _unit(report: Mapping[str, Any]) -> str:
    if _is_unbounded(report):
        return "reward model score (training s.d.)"
    return "rating (1 to 10)"
