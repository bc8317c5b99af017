"""The evaluation as a page to read and plots to look at."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from tasks.algorithms.statistics import label_agreement
from tasks.errors import DataError
from tasks.evaluate.gate import BASELINE
from tasks.evaluate.judgments import (
    PairJudgment,
    Score,
    compare,
    compare_scores,
    score_model,
    summarize_pairs,
)
from tasks.evaluate.questions import ModelAnswer, Question
from tasks.report import plots
from tasks.report.page import cell, interval, join, render_html, table

K = TypeVar("K")
T = TypeVar("T")
_SHOWN_QUESTIONS: Final = 6
_FEWEST_SPOKES: Final = 3


def render_report(
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
) -> str:
    """Return the scores and some answers side by side, as markdown; what models wrote is
    escaped."""
    rows = []
    for name, scores in report["questions"].items():
        held_out = report["held_out"].get(name, {})
        figures = [_figure(scores[key], 2) for key in ("turn_1", "turn_2", "mean")]
        rate, score = held_out.get("win_rate_against_base"), held_out.get("mean_score")
        rows.append((name, *figures, _figure(rate, 3), _figure(score, 2)))
    header = ("model", "turn 1", "turn 2", "mean", "win rate against base", "held-out score")
    sections = [
        f"# Evaluation by {cell(_judge_of(report))}",
        f"Scale: {cell(report['scale'])}.",
        table(header, rows),
        *_notes(report),
    ]
    for question in questions[:_SHOWN_QUESTIONS]:
        sections.append(f"## Question {question.question_id} ({cell(question.category)})")
        for turn, asked in enumerate(question.turns):
            said = [f"- {name}: {_said(a, question, turn)}" for name, a in answers.items()]
            sections.append("\n".join([f"**{cell(asked)}**", *said]))
    return join(sections)


def _judge_of(report: Mapping[str, Any]) -> str:
    return "the reward model" if _is_unbounded(report) else str(report["judge"])


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"].items()
        notes.append("Good answers by the oracle: " + ", ".join(f"{n} {r:.3f}" for n, r in rates))
    if not _is_unbounded(report):
        notes.append("Win rate against base and held-out score are the reward model's.")
    for name, games in report.get("pairwise", {}).items():
        counts = f"{games['wins']} wins, {games['ties']} ties, {games['losses']} losses"
        rate = _figure(games["win_rate_adjusted"], 3)
        notes.append(f"{name} against base, by the judge: {counts}; {rate} with ties half.")
    failed = {n: s["coverage"] for n, s in report["questions"].items() if s["coverage"] < 1.0}
    if failed:
        covered = ", ".join(f"{name} {coverage:.1%}" for name, coverage in failed.items())
        notes.append(f"Judgments with a score: {covered}; the others enter no mean.")
    gate = report.get("gate", {})
    if gate.get("verdict"):
        checks = [f"- {check['name']}: {check_text(check)}" for check in gate["checks"]]
        notes.append("\n".join([f"Gate: {gate['model']} {gate['verdict']}.", *checks]))
    return notes


def check_text(check: Mapping[str, Any]) -> str:
    """Return one check of the gate in words."""
    state = "passed" if check["passed"] else "failed"
    return f"{state}, {_figure(check['value'], 3)} ({check['what']}), limit {check['limit']:g}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _said(found: Sequence[ModelAnswer], question: Question, turn: int) -> str:
    matching = [answer for answer in found if answer.question_id == question.question_id]
    return cell(matching[0].turns[turn]) if matching else ""


def plot_scores(report: Mapping[str, Any], path: Path) -> None:
    """Draw the mean score of each model by question category, as bars."""
    means, categories = _means(report), _categories(report)
    width = 0.8 / len(means)
    figure = plots.new_figure(9, 4)
    axes = figure.subplots()
    for offset, (name, values) in enumerate(means.items()):
        places = [index + offset * width for index in range(len(categories))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(categories))], categories)
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel(_unit(report))
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plots.save(figure, path)


def plot_radar(report: Mapping[str, Any], path: Path) -> bool:
    """Draw the same around a circle; with fewer than three categories nothing is drawn."""
    categories = _categories(report)
    if len(categories) < _FEWEST_SPOKES:
        return False
    angles = [2 * math.pi * index / len(categories) for index in range(len(categories))]
    figure = plots.new_figure(6, 5)
    axes = figure.add_subplot(projection="polar")
    for name, values in _means(report).items():
        axes.plot([*angles, angles[0]], [*values, values[0]], label=name)
    axes.set_xticks(angles, categories)
    if not _is_unbounded(report):
        axes.set_ylim(0.0, 10.0)
    axes.set_title(_unit(report), fontsize="small")
    axes.legend(loc="lower right", bbox_to_anchor=(1.25, -0.1), fontsize="small")
    plots.save(figure, path)
    return True


def _categories(report: Mapping[str, Any]) -> list[str]:
    first = next(iter(report["questions"].values()))
    return list(first["categories"])


def _means(report: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the means of each model; a category without a valid judgment is a gap."""
    return {
        name: [
            math.nan if (mean := section["categories"].get(category)) is None else mean
            for category in _categories(report)
        ]
        for name, section in report["questions"].items()
    }


def _is_unbounded(report: Mapping[str, Any]) -> bool:
    return bool(report["judge"] == "reward_model")


def _unit(report: Mapping[str, Any]) -> str:
    return "reward model score (training s.d.)" if _is_unbounded(report) else "rating (1 to 10)"


# The evaluation as one page for a browser: questions, answers and judgments side by side.

_COLUMNS: Final = {
    "turn 1": ("questions", "turn_1"),
    "turn 2": ("questions", "turn_2"),
    "mean": ("questions", "mean"),
    "95 %": ("questions", "interval"),
    "coverage": ("questions", "coverage"),
    "cut": ("questions", "truncated"),
    "held-out reward score": ("held_out", "mean_score"),
    "reward win rate against base": ("held_out", "win_rate_against_base"),
    "judged win rate against base": ("pairwise", "win_rate_adjusted"),
}


def render_page(
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    scores: Sequence[Score],
    pairs: Sequence[PairJudgment] = (),
    images: Mapping[str, Path] | None = None,
) -> str:
    """Return the page.

    Args:
        images: PNG files by what they show.
    """
    given = {name: {a.question_id: a for a in found} for name, found in answers.items()}
    judged = _grouped(scores, lambda score: (score.question_id, score.turn, score.model_id))
    games = _grouped(pairs, lambda pair: (pair.question_id, pair.turn))

    def side(question_id: int, turn: int, name: str) -> dict[str, Any]:
        answer = given[name].get(question_id)
        return {
            "model": name,
            "answer": answer.turns[turn - 1] if answer else "",
            "truncated": bool(answer and answer.truncated[turn - 1]),
            "scores": judged.get((question_id, turn, name), []),
        }

    def turn_of(question: Question, turn: int) -> dict[str, Any]:
        return {
            "asked": question.turns[turn - 1],
            "reference": (*(question.reference or ()), "", "")[turn - 1],
            "sides": [side(question.question_id, turn, name) for name in answers],
            "games": games.get((question.question_id, turn), []),
        }

    return render_html(
        "tasks.evaluate",
        "eval_page",
        title=f"Evaluation by {_judge_of(report)}",
        scale=report["scale"],
        gate=report.get("gate", {}),
        check_text=check_text,
        models=list(answers),
        categories=sorted({question.category for question in questions}),
        columns=list(_COLUMNS),
        rows={
            name: [
                _cell(key, report.get(section, {}).get(name, {}).get(key))
                for section, key in _COLUMNS.values()
            ]
            for name in answers
        },
        images={
            alt: base64.b64encode(path.read_bytes()).decode()
            for alt, path in (images or {}).items()
        },
        questions=[
            {
                "id": question.question_id,
                "category": question.category,
                "turns": [turn_of(question, turn) for turn in (1, 2)],
            }
            for question in questions
        ],
        winner=_winner,
    )


def _grouped(found: Sequence[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return groups


def _winner(pair: PairJudgment) -> str:
    outcome = {"A": f"{pair.model_1} wins", "B": f"{pair.model_2} wins", "tie": "tie"}
    return "failed" if pair.winner is None else outcome[pair.winner]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "interval":
        return interval(value[0], value[1], ".2f")
    if key == "coverage":
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


# What an evaluation found, as the plain values of ``report.json``.

_SHOWN_CHARACTERS: Final = 80
# Of a subset's name, and what its rate is called.
_RATES: Final = {"helpful": "helpfulness", "harmless": "harmlessness"}


@dataclass(frozen=True)
class HeldOut:
    """One model's responses to the held-out prompts.

    Args:
        scores: by the reward model; None where a response cannot be scored.
        components: the same by component of the reward model.
        subsets: subset of each prompt.
    """

    texts: Sequence[str]
    scores: Sequence[float | None]
    components: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    subsets: Sequence[str] = ()


def questions_section(
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    scores: Sequence[Score],
) -> dict[str, Any]:
    """Return means, intervals and coverage of each model."""
    category_of = {question.question_id: question.category for question in questions}
    section = {}
    for name, given in answers.items():
        found = score_model([s for s in scores if s.model_id == name], category_of).as_json()
        del found["model"], found["judge"]
        section[name] = found | {"truncated": sum(sum(answer.truncated) for answer in given)}
    return section


def differences_section(models: Sequence[str], scores: Sequence[Score]) -> dict[str, Any]:
    """Return each model's paired difference from the base; a model that shares no judged question
    with it has none."""
    base = [score for score in scores if score.model_id == BASELINE]
    section: dict[str, Any] = {}
    for name in models:
        if name == BASELINE:
            continue
        try:
            found = compare([score for score in scores if score.model_id == name], base).as_json()
        except DataError:
            continue
        section[name] = {key: found[key] for key in ("difference", "interval", "n")}
    return section


def pairwise_section(models: Sequence[str], pairs: Sequence[PairJudgment]) -> dict[str, Any]:
    """Return wins, ties and losses of each model against the base."""
    section = {}
    for name in models:
        if name == BASELINE:
            continue
        games = [pair for pair in pairs if name in (pair.model_1, pair.model_2)]
        summary = summarize_pairs(games, name)
        rate = summary.rate
        repeats: dict[tuple[int, int], list[str]] = {}
        for game in games:
            winner = game.winner_for(name)
            if winner is not None:
                repeats.setdefault((game.question_id, game.turn), []).append(winner)
        agreed = label_agreement(list(repeats.values()))
        section[name] = {
            "wins": rate.wins if rate else 0,
            "ties": rate.ties if rate else 0,
            "losses": rate.losses if rate else 0,
            "win_rate": rate.strict if rate else None,
            "win_rate_adjusted": rate.adjusted if rate else None,
            "orders_agree": summary.consistent,
            "coverage": summary.coverage,
            "agreement": asdict(agreed) if agreed else None,
        }
    return section


def held_out_section(heard: Mapping[str, HeldOut]) -> dict[str, Any]:
    """Return what the reward model says of the responses to held-out prompts."""
    base = heard[BASELINE].scores
    section: dict[str, Any] = {}
    for name, found in heard.items():
        known = [score for score in found.scores if score is not None]
        both = [
            (ours, theirs)
            for ours, theirs in zip(found.scores, base, strict=True)
            if ours is not None and theirs is not None
        ]
        rate = compare_scores([a for a, _ in both], [b for _, b in both]) if both else None
        section[name] = {
            "mean_score": fmean(known) if known else None,
            "win_rate_against_base": rate.adjusted if rate else None,
            "mean_characters": fmean(map(len, found.texts)),
            "scored": len(known),
            **subset_rates(found),
        }
    return section


def subset_rates(found: HeldOut) -> dict[str, float]:
    """Return helpfulness and harmlessness rates, where the prompts have such subsets.

    A rate is the share of the responses to prompts of subsets named helpful (harmless) that score
    above the mean training response, by the reward component of that name or else by all.
    """
    rates = {}
    for word, name in _RATES.items():
        component = next((c for c in found.components if word in c), None)
        scores = found.scores if component is None else found.components[component]
        known = [
            score
            for score, subset in zip(scores, found.subsets, strict=False)
            if word in subset and score is not None
        ]
        if known:
            rates[f"{name}_rate"] = fmean(score > 0.0 for score in known)
    return rates


def failure_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Return how many judgments failed for which reason, the most frequent first."""
    reasons = [score.failure[:_SHOWN_CHARACTERS] for score in scores if score.score is None]
    return dict(Counter(reasons).most_common())


def flat_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that runs are compared by; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for name, section in report["questions"].items():
        found[f"{name}_question_score"] = section["mean"]
        found[f"{name}_judgment_coverage"] = section["coverage"]
    for name, section in report["held_out"].items():
        found[f"{name}_win_rate_against_base"] = section["win_rate_against_base"]
        found[f"{name}_held_out_score"] = section["mean_score"]
        found |= {f"{name}_{key}": v for key, v in section.items() if key.endswith("_rate")}
    for name, section in report.get("pairwise", {}).items():
        found[f"{name}_judged_win_rate"] = section["win_rate_adjusted"]
    for name, section in report["differences"].items():
        found[f"{name}_score_difference"] = section["difference"]
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"]
        found |= {f"{name}_oracle_good_rate": rate for name, rate in rates.items()}
        found["reward_accuracy_clean"] = report["demo"]["reward_accuracy_clean"]
    if report["gate"]["verdict"] is not None:
        found["gate_passed"] = float(report["gate"]["verdict"] == "passed")
    return {name: value for name, value in found.items() if value is not None}
