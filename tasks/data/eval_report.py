"""The evaluation as a page to read and a plot to look at."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.data.questions import ModelAnswer, Question

_SHOWN_QUESTIONS = 6


def render_report(
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
) -> str:
    """Return the scores and some answers side by side, as markdown; what models wrote is
    escaped."""
    lines = [
        "# Evaluation by the reward model",
        "",
        f"Scale: {report['scale']}.",
        "",
        "| model | turn 1 | turn 2 | mean | win rate against base | held-out score |",
        "|---|---|---|---|---|---|",
    ]
    for name, scores in report["questions"].items():
        held_out = report["held_out"][name]
        lines.append(
            f"| {name} | {scores['turn_1']:.2f} | {scores['turn_2']:.2f} | {scores['mean']:.2f} "
            f"| {held_out['win_rate_against_base']:.3f} | {held_out['mean_score']:.2f} |"
        )
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"].items()
        lines += ["", "Good answers by the oracle: " + ", ".join(f"{n} {r:.3f}" for n, r in rates)]
    for question in questions[:_SHOWN_QUESTIONS]:
        lines += ["", f"## Question {question.question_id} ({_safe(question.category)})", ""]
        for turn, asked in enumerate(question.turns):
            lines.append(f"**{_safe(asked)}**")
            lines += [
                f"- {name}: {_said(found, question, turn)}" for name, found in answers.items()
            ]
    return "\n".join(lines) + "\n"


def _said(found: Sequence[ModelAnswer], question: Question, turn: int) -> str:
    matching = [answer for answer in found if answer.question_id == question.question_id]
    return _safe(matching[0].turns[turn]) if matching else ""


def _safe(text: str) -> str:
    return html.escape(" ".join(text.split()))


def plot_scores(report: Mapping[str, Any], path: Path) -> None:
    """Draw the mean score of each model by question category."""
    from matplotlib.figure import Figure

    names = list(report["questions"])
    categories = list(report["questions"][names[0]]["categories"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        values = [report["questions"][name]["categories"][category] for category in categories]
        places = [index + offset * width for index in range(len(categories))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(categories))], categories)
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("reward model score (training s.d.)")
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.legend()
    figure.savefig(path, dpi=120)
