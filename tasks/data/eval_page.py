"""The evaluation as one page for a browser: questions, answers and judgments side by side.

The page is a single file that needs no network. Everything that a model, a judge or a question file
wrote is escaped, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment

from tasks.data.eval_report import check_text
from tasks.data.pairwise import PairJudgment
from tasks.data.questions import ModelAnswer, Question
from tasks.data.scores import Score

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
        "shown": "failed" if score.score is None else _figure(score.score),
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


def _figure(value: float) -> str:
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
    return files("tasks.data").joinpath(name).read_text("utf-8")
