"""Grading of answers by a judge: which judgments are wanted, which are there already, the rest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tasks.algorithms.ratings import Verdict, parse_rating, parse_verdict
from tasks.backends.judging import Judge, JudgeOutcome, JudgeTask
from tasks.data.judge_prompts import JudgePrompts, Kind, Turns, judge_messages
from tasks.data.line_store import LineStore
from tasks.data.pairwise import PairJudgment
from tasks.data.questions import ModelAnswer, Question
from tasks.data.scores import Score
from tasks.errors import ClusterError

TURNS: Final = (1, 2)
_NOT_ASKED: Final = "not asked"


@dataclass(frozen=True)
class GradingPlan:
    """What to judge.

    Args:
        questions: with the references to show.
        answers: of each model, one per question.
        reference_categories: categories that are judged with the reference, where there is one.
        baseline: model that all others are compared with in pairs; None compares none.
    """

    questions: Sequence[Question]
    answers: Mapping[str, Sequence[ModelAnswer]]
    prompts: JudgePrompts
    reference_categories: Sequence[str]
    repeats: int = 1
    baseline: str | None = None
    seed: int = 0

    @property
    def without_reference(self) -> list[int]:
        """Questions of categories with references that have none."""
        return [
            question.question_id
            for question in self.questions
            if question.category in self.reference_categories and not question.reference
        ]


@dataclass(frozen=True)
class Graded:
    """All judgments of a plan.

    Args:
        scores: single-answer grading, failed judgments included.
        pairs: of both orders.
        reused: judgments that were there before.
        requests, tokens: what all of them cost.
    """

    scores: list[Score]
    pairs: list[PairJudgment]
    reused: int
    requests: int
    tokens: int


@dataclass(frozen=True)
class _Wanted:
    """A judgment: of one answer, or of two in one order.

    Args:
        models: the one that is graded, or those in places A and B.
    """

    task: JudgeTask
    question_id: int
    models: tuple[str, ...]
    turn: int
    repeat: int
    prompt_name: str


def grade(
    judge: Judge,
    plan: GradingPlan,
    store: LineStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Graded:
    """Make the judgments that the store lacks, each stored as it arrives, and return all.

    Raises:
        ClusterError: judgments were lost with the connection: a mean over the others would pass for
            the whole.
        RlhfError: the judge cannot go on.

    Whatever is raised, what arrived stays in the store.
    """
    wanted = _wanted(judge.name, plan)
    known = outcomes_in(store)
    missing = [w.task for w in wanted if w.task.task_id not in known]
    reused = len(wanted) - len(missing)
    n_done = reused
    by_id = {w.task.task_id: w for w in wanted}

    def done(task: JudgeTask, outcome: JudgeOutcome) -> None:
        nonlocal n_done
        store.append(_row(by_id[task.task_id], judge.name, outcome))
        known[task.task_id] = store.rows[-1]
        n_done += 1
        progress(n_done, len(wanted))

    progress(n_done, len(wanted))
    if missing:
        judge.judge(missing, done)
    _check_complete(wanted, store)
    rows = {w.task.task_id: known.get(w.task.task_id, {}) for w in wanted}
    return Graded(
        scores=[_score(w, judge.name, rows[w.task.task_id]) for w in wanted if len(w.models) == 1],
        pairs=_pairs([w for w in wanted if len(w.models) == 2], judge.name, rows),
        reused=reused,
        requests=sum(int(row.get("requests", 0)) for row in store.rows),
        tokens=sum(int(row.get("tokens", 0)) for row in store.rows),
    )


def outcomes_in(store: LineStore) -> dict[str, dict[str, Any]]:
    """Return the judgments of a store by id, without those that the connection lost."""
    latest = {str(row["task_id"]): row for row in store.rows}
    return {key: row for key, row in latest.items() if not row.get("is_lost")}


def _check_complete(wanted: Sequence[_Wanted], store: LineStore) -> None:
    found = outcomes_in(store)
    lost = {w.task.task_id for w in wanted} - found.keys()
    if not lost:
        return
    failures = [row["failure"] for row in store.rows if row["task_id"] in lost]
    raise ClusterError(
        f"{len(lost)} of {len(wanted)} judgments were lost; the last failure: "
        f"{failures[-1] if failures else _NOT_ASKED}",
        "a judgment of each answer, or a refusal of the request itself",
        "run the same command again once the judge answers: what was judged is stored, and only "
        "what is missing is asked",
    )


def _wanted(judge: str, plan: GradingPlan) -> list[_Wanted]:
    by_model = {
        name: {answer.question_id: answer.turns for answer in answers}
        for name, answers in plan.answers.items()
    }
    groups: list[tuple[Kind, tuple[str, ...]]] = [("single", (name,)) for name in by_model]
    for name in by_model:
        if plan.baseline is not None and name != plan.baseline:
            groups += [("pair", (name, plan.baseline)), ("pair", (plan.baseline, name))]
    return [
        _want(judge, plan, kind, _Case(question, turn, repeat, models), by_model)
        for kind, models in groups
        for repeat in range(plan.repeats)
        for turn in TURNS
        for question in plan.questions
    ]


@dataclass(frozen=True)
class _Case:
    question: Question
    turn: int
    repeat: int
    models: tuple[str, ...]


def _want(
    judge: str,
    plan: GradingPlan,
    kind: Kind,
    case: _Case,
    answers: Mapping[str, Mapping[int, Turns]],
) -> _Wanted:
    question = case.question
    has_reference = question.category in plan.reference_categories and bool(question.reference)
    prompt = plan.prompts.select(kind, case.turn, has_reference)
    shown = [answers[name][question.question_id] for name in case.models]
    messages = judge_messages(prompt, kind, case.turn, question, shown)
    identity = [judge, prompt.name, [[m.role, m.content] for m in messages], case.repeat]
    # The same text by two models is still two judgments.
    identity += [list(case.models), question.question_id, case.turn]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    seed = plan.seed + 1000 * case.repeat
    return _Wanted(
        JudgeTask(digest[:32], kind, messages, seed),
        question.question_id,
        case.models,
        case.turn,
        case.repeat,
        prompt.name,
    )


def _row(wanted: _Wanted, judge: str, outcome: JudgeOutcome) -> dict[str, Any]:
    return {
        "task_id": wanted.task.task_id,
        "question_id": wanted.question_id,
        "models": list(wanted.models),
        "turn": wanted.turn,
        "repeat": wanted.repeat,
        "judge": [judge, wanted.prompt_name],
        "text": outcome.text,
        "failure": outcome.failure,
        "is_lost": outcome.is_lost,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "tstamp": time.time(),
    }


def _score(wanted: _Wanted, judge: str, row: Mapping[str, Any]) -> Score:
    value = parse_rating(row["text"]) if row and not row["failure"] else None
    return Score(
        question_id=wanted.question_id,
        model_id=wanted.models[0],
        turn=wanted.turn,
        score=value,
        judge=(judge, wanted.prompt_name),
        judgment=row.get("text", ""),
        tstamp=row.get("tstamp", 0.0),
        repeat=wanted.repeat,
        failure="" if value is not None else row.get("failure") or _NOT_ASKED,
    )


def _pairs(
    wanted: Sequence[_Wanted], judge: str, rows: Mapping[str, Mapping[str, Any]]
) -> list[PairJudgment]:
    """Join the two orders of each comparison; the first order met has model_1 in place A."""
    first: dict[tuple[int, frozenset[str], int, int], PairJudgment] = {}
    joined = []
    for w in wanted:
        row = rows[w.task.task_id]
        key = (w.question_id, frozenset(w.models), w.turn, w.repeat)
        verdict: Verdict | None = None
        if row and not row["failure"]:
            verdict = parse_verdict(row["text"])
        text, tstamp = row.get("text", ""), row.get("tstamp", 0.0)
        if key not in first:
            first[key] = PairJudgment(
                w.question_id,
                w.models[0],
                w.models[1],
                w.turn,
                verdict,
                None,
                (judge, w.prompt_name),
                (text, ""),
                tstamp,
                w.repeat,
            )
            continue
        game = first.pop(key)
        texts = (game.texts[0], text)
        tstamp = max(tstamp, game.tstamp)
        joined.append(replace(game, swapped=verdict, texts=texts, tstamp=tstamp))
    return joined
