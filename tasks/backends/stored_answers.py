"""Answers that outlive the run that asked for them: only what a store lacks is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tasks.backends.answering import Answered, Answerer, AnswerPlan, Asked, Said
from tasks.backends.speaking import Prompt
from tasks.context import RunLog
from tasks.data.line_store import LineStore
from tasks.data.questions import Question


def answer_questions(
    name: str,
    answerer: Answerer,
    plan: AnswerPlan,
    store: LineStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Answered]:
    """Answer the questions that the store lacks, each stored once both its turns are there.

    Raises:
        RlhfError: the backend cannot go on; what was answered stays in the store.
    """
    known = _known(name, plan.questions, store)

    def take(found: Answered) -> None:
        if found.question.question_id in known:
            return
        store.append(_row(name, found.question.question_id, found.said, found.tstamp))
        if not found.failure:
            known[found.question.question_id] = found
            progress(len(known), len(plan.questions))

    progress(len(known), len(plan.questions))
    for batch in plan.batches() if answerer.draws_together else [list(plan.questions)]:
        missing = [question for question in batch if question.question_id not in known]
        if missing:
            answerer.converse(batch if answerer.draws_together else missing, plan, take)
    return [known[question.question_id] for question in plan.questions]


def answer_prompts(
    name: str, answerer: Answerer, prompts: Sequence[Prompt], plan: AnswerPlan, store: LineStore
) -> list[Said]:
    """Answer held-out prompts, in their order; what the store has from a server is not asked again.

    Raises:
        RlhfError: the backend cannot go on; what a server answered stays in the store.
    """
    found = {index: said for index, ((said,), _) in _stored(name, store).items()}

    def take(one: Asked, said: Said) -> None:
        # What is drawn together is drawn again in one go, with the same result.
        if not answerer.draws_together:
            store.append(_row(name, one.key, (said,), time.time()))
        if not said.failure:
            found[one.key] = said

    asked = [
        Asked(index, prompt, plan.default_temperature)
        for index, prompt in enumerate(prompts)
        if index not in found
    ]
    if asked:
        answerer.answer(asked, plan.seed, take)
    return [found[index] for index in range(len(prompts))]


class ResponseCount:
    """Tells how many responses of all models are there; stored ones count when their model is
    through."""

    def __init__(self, log: RunLog, per_model: int, n_models: int) -> None:
        self._log, self._per_model, self._total = log, per_model, per_model * n_models
        self._done = self._limit = 0
        self._name = ""

    def begin(self, index: int, name: str) -> None:
        """Go on with a model, by its place."""
        self._done, self._limit = index * self._per_model, (index + 1) * self._per_model
        self._name = name
        self(0)

    def __call__(self, n_new: int) -> None:
        """Count new responses."""
        self._done = min(self._done + n_new, self._limit, self._total)
        self._log.progress(self._done, self._total, f"answers, {self._name}")


def _row(name: str, key: int, said: Sequence[Said], tstamp: float) -> dict[str, Any]:
    """Return a row of a store.

    Args:
        key: the question's id, or the place of a held-out prompt.
    """
    return {
        "model_id": name,
        "question_id": key,
        "turns": [one.text for one in said],
        "token_ids": [None if one.token_ids is None else list(one.token_ids) for one in said],
        "truncated": [one.truncated for one in said],
        "shortened": [one.shortened for one in said],
        "failure": next((one.failure for one in said if one.failure), ""),
        "requests": sum(one.requests for one in said),
        "tokens": sum(one.tokens for one in said),
        "tstamp": tstamp,
    }


def _stored(name: str, store: LineStore) -> dict[int, tuple[tuple[Said, ...], float]]:
    """Return what a store has of a model by key, without what was left without an answer."""
    found = {}
    for row in store.rows:
        if row["model_id"] != name or row.get("failure"):
            continue
        said = tuple(
            Said(text, None if ids is None else tuple(ids), truncated, shortened)
            for text, ids, truncated, shortened in zip(
                row["turns"], row["token_ids"], row["truncated"], row["shortened"], strict=True
            )
        )
        found[int(row["question_id"])] = (said, float(row["tstamp"]))
    return found


def _known(name: str, questions: Sequence[Question], store: LineStore) -> dict[int, Answered]:
    stored = _stored(name, store)
    found = {}
    for question in questions:
        if question.question_id in stored:
            (first, second), tstamp = stored[question.question_id]
            found[question.question_id] = Answered(question, (first, second), tstamp)
    return found
