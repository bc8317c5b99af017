"""Questions from the Hugging Face hub, as FastChat's ``question.jsonl``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.data.hub import resolve_revision, stream_rows
from tasks.data.questions import (
    QUESTION_FORM,
    Question,
    get_field,
    get_texts,
    get_turns,
    write_questions,
)
from tasks.errors import DataError


def download_questions(name: str, cache_dir: Path) -> Path:
    """Return a question file with the rows of a hub data set at its present commit.

    Raises:
        MissingInputError: no such data set, or the hub does not answer.
        DataError: its rows are no two-turn questions.
    """
    commit = resolve_revision(name, None)
    digest = hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()[:16]
    path = cache_dir / f"questions-{digest}.jsonl"
    if not path.exists():
        rows = stream_rows({"path": name, "revision": commit, "split": "train"})
        questions = list(questions_of(name, rows))
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write_questions(unfinished, questions)
        unfinished.replace(path)
    return path


def questions_of(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterable[Question]:
    """Yield the questions in rows of ``prompt_id``, ``category``, ``prompt`` and ``reference``, or
    with FastChat's names.

    Raises:
        DataError: a row that is no two-turn question, or no rows.
    """
    number = 0
    for number, row in enumerate(rows, start=1):
        where = f"{name}, row {number}"
        named: dict[str, Any] = {"question_id": row.get("prompt_id"), "turns": row.get("prompt")}
        named |= {**row, "reference": row.get("reference") or []}
        reference = tuple(get_texts(where, named, "reference", QUESTION_FORM))
        yield Question(
            get_field(where, named, "question_id", int, QUESTION_FORM),
            get_field(where, named, "category", str, QUESTION_FORM),
            get_turns(where, named, QUESTION_FORM),
            # Empty texts stand for no reference.
            reference if any(reference) else None,
        )
    if number == 0:
        raise DataError(f"{name} holds no questions", "at least one", "check the id")
