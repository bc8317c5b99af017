"""The evaluation as a page to read and plots to look at."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from jinja2 import Environment

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


#
# The evaluation as one page for a browser: questions, answers and judgments side by side.
#
# The page is a single file that needs no network. Everything that a model, a judge or a question
# file wrote is escaped, and the page's policy lets no script run but its own.

_UNSHOWN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
_COLUMNS: Final = {
    "turn 1": "turn_1",
    "turn 2": "turn_2",
    "mean": "mean",
    "95 %": "interval",
    "coverage": "coverage",
    "cut": "truncated",
}
_HELD_OUT: Final = {
    "held-out reward score": "mean_score",
    "reward win rate against base": "win_rate_against_base",
}
_PAIRWISE: Final = {"judged win rate against base": "win_rate_adjusted"}


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
    script = _resource("eval_page.js").strip()
    template = Environment(autoescape=True).from_string(_resource("eval_page.html"))
    judge = "the reward model" if report["judge"] == "reward_model" else report["judge"]
    table = _Table(answers, scores, pairs)
    page = template.render(
        policy=_policy(script),
        title=f"Evaluation by {judge}",
        scale=report["scale"],
        gate=_gate(report),
        models=list(answers),
        categories=sorted({question.category for question in questions}),
        columns=[*_COLUMNS, *_HELD_OUT, *_PAIRWISE],
        rows=[_row(report, name) for name in answers],
        images=[_image(alt, path) for alt, path in (images or {}).items()],
        questions=[table.question(question) for question in questions],
        script=script,
    )
    return _UNSHOWN.sub("\ufffd", page)


class _Table:
    """Answers and judgments by question and turn."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[ModelAnswer]],
        scores: Sequence[Score],
        pairs: Sequence[PairJudgment],
    ) -> None:
        self.answers = {
            name: {answer.question_id: answer for answer in given}
            for name, given in answers.items()
        }
        self.scores: dict[tuple[int, int, str], list[Score]] = {}
        for score in scores:
            key = (score.question_id, score.turn, score.model_id)
            self.scores.setdefault(key, []).append(score)
        self.pairs: dict[tuple[int, int], list[PairJudgment]] = {}
        for pair in pairs:
            self.pairs.setdefault((pair.question_id, pair.turn), []).append(pair)

    def question(self, question: Question) -> dict[str, Any]:
        return {
            "id": question.question_id,
            "category": question.category,
            "turns": [self._turn(question, turn) for turn in (1, 2)],
        }

    def _turn(self, question: Question, turn: int) -> dict[str, Any]:
        reference = (*(question.reference or ()), "", "")[turn - 1]
        return {
            "asked": question.turns[turn - 1],
            "reference": reference,
            "sides": [self._side(question.question_id, turn, name) for name in self.answers],
            "games": [_game(pair) for pair in self.pairs.get((question.question_id, turn), [])],
        }

    def _side(self, question_id: int, turn: int, name: str) -> dict[str, Any]:
        answer = self.answers[name].get(question_id)
        return {
            "model": name,
            "answer": answer.turns[turn - 1] if answer else "",
            "truncated": bool(answer and answer.truncated[turn - 1]),
            "scores": [_judged(s) for s in self.scores.get((question_id, turn, name), [])],
        }


def _judged(score: Score) -> dict[str, Any]:
    return {
        "valid": score.score is not None,
        "shown": "failed" if score.score is None else _page_figure(score.score),
        "judgment": score.judgment,
        "failure": score.failure,
    }


def _game(pair: PairJudgment) -> dict[str, Any]:
    outcome = {"A": f"{pair.model_1} wins", "B": f"{pair.model_2} wins", "tie": "tie"}
    winner = pair.winner
    shown = "failed" if winner is None else outcome[winner]
    return {
        "title": f"{pair.model_1} against {pair.model_2}, both orders: {shown}",
        "texts": [text for text in pair.texts if text],
    }


def _row(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = report["questions"][name]
    held_out = report["held_out"].get(name, {})
    cells = [_cell(key, section.get(key)) for key in _COLUMNS.values()]
    cells += [_cell(key, held_out.get(key)) for key in _HELD_OUT.values()]
    games = report.get("pairwise", {}).get(name, {})
    cells += [_cell(key, games.get(key)) for key in _PAIRWISE.values()]
    return {"name": name, "cells": cells}


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "interval":
        return f"{value[0]:.2f} to {value[1]:.2f}"
    if key == "coverage":
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _page_figure(value: float) -> str:
    return f"{value:.4g}"


def _gate(report: Mapping[str, Any]) -> dict[str, Any] | None:
    gate = report.get("gate", {})
    if not gate.get("verdict"):
        return None
    checks = [f"{check['name']}: {check_text(check)}" for check in gate["checks"]]
    return {"model": gate["model"], "verdict": gate["verdict"], "checks": checks}


def _image(alt: str, path: Path) -> dict[str, str]:
    return {"alt": alt, "content": base64.b64encode(path.read_bytes()).decode()}


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return files("tasks.evaluate").joinpath(name).read_text("utf-8")


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
