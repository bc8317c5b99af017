"""Two-turn questions and answers to them, in the file formats of FastChat's MT-Bench.

A file is JSON Lines. The classes say what a line must hold: pydantic checks a line against them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AliasPath,
    AllowInfNan,
    BeforeValidator,
    Field,
    Strict,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from tasks.artifacts import appearing
from tasks.config.messages import message_of
from tasks.data.source import read_lines, resolve_revision, stream_rows
from tasks.errors import DataError

T = TypeVar("T")
Number = Annotated[float, Strict(), AllowInfNan(False)]
Timestamp = Annotated[Number, BeforeValidator(lambda value: 0.0 if value is None else value)]

_COUNTS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUMBER_WORDS: Final = {word: str(value) for value, word in enumerate(_COUNTS)} | {"no": "0"}
_SHOWN_IDS: Final = 5
# What a line of each kind of file looks like, for who gave another kind.
QUESTION_FORM: Final = (
    'questions, one object per line: {"question_id": 81, "category": "writing", "turns": ["", ""]}'
)
ANSWER_FORM: Final = (
    'answers, one object per line: {"question_id": 81, "model_id": "", '
    '"choices": [{"index": 0, "turns": ["", ""]}]}'
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its follow-up.

    Args:
        reference: reference answers by turn; empty where the category has none.
    """

    question_id: StrictInt
    category: str
    turns: tuple[str, str]
    reference: Annotated[tuple[str, ...], BeforeValidator(lambda texts: texts or ())] = ()


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answers to both turns of a question.

    Args:
        tstamp: seconds since 1970, when the answer was made.
        truncated: for each turn, whether it ended at the length limit.
    """

    question_id: StrictInt
    model_id: str
    turns: Annotated[tuple[str, str], Field(validation_alias=AliasPath("choices", 0, "turns"))]
    tstamp: Timestamp = 0.0
    truncated: tuple[bool, bool] = (False, False)

    @property
    def answer_id(self) -> str:
        """Hash of question, model and text: the same answer has the same id."""
        text = json.dumps([self.question_id, self.model_id, *self.turns])
        return hashlib.sha256(text.encode()).hexdigest()[:22]


_QUESTION: Final = TypeAdapter(Question)
_ANSWER: Final = TypeAdapter(ModelAnswer)


def read_objects(path: Path, form: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object of a JSON-Lines file after "file, line N".

    Args:
        form: what a line should look like, for the error.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no JSON object.
    """
    for line in read_lines(path):
        where = f"{path}, line {line.number}"
        try:
            row = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}", "a JSON object", form) from error
        if not isinstance(row, dict):
            raise DataError(f"{where} holds a {type(row).__name__}", "a JSON object", form)
        yield where, row


def parse(where: str, row: Any, kind: TypeAdapter[T], form: str) -> T:
    """Return what a row holds; fields that its kind does not have are left out.

    Raises:
        DataError: a field is missing or of another type; True and False are not numbers.
    """
    try:
        return kind.validate_python(row)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        found = "; ".join(map(_found, problems))
        raise DataError(f"{where}: {found}", message_of(problems[0]), form) from None


def _found(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"no field {name!r}"
    return f"{name} is {problem['input']!r:.80}"


def write_objects(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines in UTF-8; a value that is not finite is refused.

    Raises:
        DataError: a value that JSON cannot hold.
    """
    try:
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        content = "".join(lines).encode()
    except ValueError as error:
        raise DataError(
            f"{path.name} cannot hold a value: {error}",
            "finite numbers and valid text",
            "correct it",
        ) from error
    path.write_bytes(content)


# Questions, from a file or from the Hugging Face hub.


def read_questions(path: Path) -> list[Question]:
    """Read a FastChat ``question.jsonl``; references come from the questions themselves.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no question with two turns, a question id that is there twice, or
            no questions at all.
    """
    questions: dict[int, Question] = {}
    for where, row in read_objects(path, QUESTION_FORM):
        question = parse(where, row, _QUESTION, QUESTION_FORM)
        if question.question_id in questions:
            raise DataError(
                f"{where}: question_id {question.question_id} is there a second time",
                "unique ids",
                "renumber or remove one of them",
            )
        questions[question.question_id] = question
    if not questions:
        raise DataError(f"{path} holds no questions", "at least one", QUESTION_FORM)
    return list(questions.values())


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write questions as FastChat's ``question.jsonl``."""
    rows = map(asdict, questions)
    write_objects(path, ({k: v for k, v in row.items() if v != ()} for row in rows))


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
        questions = [_hub_question(f"{name}, row {n}", row) for n, row in enumerate(rows, start=1)]
        if not questions:
            raise DataError(f"{name} holds no questions", "at least one", "check the id")
        cache_dir.mkdir(parents=True, exist_ok=True)
        with appearing(path) as temporary:
            write_questions(temporary, questions)
    return path


def _hub_question(where: str, row: Mapping[str, Any]) -> Question:
    """Return the question of a row with the names of the hub's data set, or with FastChat's."""
    named = {"question_id": row.get("prompt_id"), "turns": row.get("prompt"), **row}
    question = parse(where, named, _QUESTION, QUESTION_FORM)
    # Empty texts stand for no reference.
    return question if any(question.reference) else replace(question, reference=())


# References: a question's own, or those of a separate file.


def read_references(path: Path) -> dict[int, tuple[str, str]]:
    """Return the answers of a FastChat ``reference_answer`` file by question.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no answer to two turns, or a question with two.
    """
    return {answer.question_id: answer.turns for answer in read_answers(path)}


def with_references(
    questions: Iterable[Question], separate: Mapping[int, tuple[str, ...]]
) -> tuple[list[Question], list[int]]:
    """Give questions without a reference the one of a separate file.

    Returns:
        the questions; and the ids of those whose own reference names numbers that the separate one
        does not: one of the two is wrong, and the question's own is kept.
    """
    completed, contradicted = [], []
    for question in questions:
        other = separate.get(question.question_id, ())
        pairs = zip(question.reference, other, strict=False)
        if any(_numbers(own) - _numbers(theirs) for own, theirs in pairs):
            contradicted.append(question.question_id)
        completed.append(replace(question, reference=question.reference or other))
    return completed, contradicted


def _numbers(text: str) -> set[str]:
    words = re.findall(r"[0-9]+(?:\.[0-9]+)?|[a-z]+", text.lower().replace(",", ""))
    numbers = (_NUMBER_WORDS.get(word, word) for word in words)
    return {number for number in numbers if number[0] in "0123456789"}


# Answers.


def write_answers(path: Path, answers: Iterable[ModelAnswer]) -> None:
    """Write answers as FastChat's ``model_answer/<model_id>.jsonl``, sorted by question."""
    rows = []
    for answer in sorted(answers, key=lambda answer: (answer.question_id, answer.model_id)):
        row: dict[str, Any] = {
            "question_id": answer.question_id,
            "answer_id": answer.answer_id,
            "model_id": answer.model_id,
            "choices": [{"index": 0, "turns": list(answer.turns)}],
            "tstamp": answer.tstamp,
        }
        rows.append(row | ({"truncated": answer.truncated} if any(answer.truncated) else {}))
    write_objects(path, rows)


def read_answers(path: Path) -> list[ModelAnswer]:
    """Read FastChat answers.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no answer to two turns, or a model's second one to a question.
    """
    answers: dict[tuple[int, str], ModelAnswer] = {}
    for where, row in read_objects(path, ANSWER_FORM):
        answer = parse(where, row, _ANSWER, ANSWER_FORM)
        key = (answer.question_id, answer.model_id)
        if key in answers:
            raise DataError(
                f"{where}: {answer.model_id} answers question {answer.question_id} a second time",
                "one answer to each question",
                "remove one of them",
            )
        answers[key] = answer
    return list(answers.values())


def answers_to(path: Path, questions: Sequence[Question]) -> list[ModelAnswer]:
    """Read the answers of one model to these questions, in their order.

    Raises:
        MissingInputError: no such file.
        DataError: a question with two answers or none, answers of several models, or answers to
            other questions only.
    """
    answers = read_answers(path)
    models = sorted({answer.model_id for answer in answers})
    if len(models) > 1:
        raise DataError(f"{path} holds answers of {models}", "those of one model", "split the file")
    by_id = {answer.question_id: answer for answer in answers}
    missing = [q.question_id for q in questions if q.question_id not in by_id]
    if missing:
        others = " and others" if len(missing) > _SHOWN_IDS else ""
        raise DataError(
            f"{path} answers {len(questions) - len(missing)} of {len(questions)} questions; it has "
            f"no answer to the questions {missing[:_SHOWN_IDS]}{others}",
            "answers to these questions",
            "give the file of answers that was made with this question file",
        )
    return [by_id[question.question_id] for question in questions]
