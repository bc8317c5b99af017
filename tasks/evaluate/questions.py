"""Two-turn questions and model answers in the file formats of FastChat's MT-Bench."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tasks.artifacts import appearing
from tasks.data.source import read_lines, resolve_revision, stream_rows
from tasks.errors import DataError

_COUNTS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUMBER_WORDS: Final = {word: str(value) for value, word in enumerate(_COUNTS)} | {"no": "0"}
_SHOWN_IDS: Final = 5
_DIGITS: Final = "0123456789"
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
        reference: reference answers by turn, or None where the category has none.
    """

    question_id: int
    category: str
    turns: tuple[str, str]
    reference: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answers to both turns of a question.

    Args:
        tstamp: seconds since 1970, when the answer was made.
        truncated: for each turn, whether it ended at the length limit.
    """

    question_id: int
    model_id: str
    turns: tuple[str, str]
    tstamp: float
    truncated: tuple[bool, bool] = (False, False)

    @property
    def answer_id(self) -> str:
        """Hash of question, model and text: the same answer has the same id."""
        text = json.dumps([self.question_id, self.model_id, *self.turns])
        return hashlib.sha256(text.encode()).hexdigest()[:22]


def read_questions(path: Path) -> list[Question]:
    """Read a FastChat ``question.jsonl``; references come from the questions themselves.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no question with two turns, a question id that is there twice, or
            no questions at all.
    """
    questions: dict[int, Question] = {}
    for where, row in read_objects(path, QUESTION_FORM):
        question = _parse_question(where, row)
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


def read_references(path: Path) -> dict[int, tuple[str, str]]:
    """Return the answers of a FastChat ``reference_answer`` file by question.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no answer to two turns, or a question with two.
    """
    return {answer.question_id: answer.turns for answer in read_answers(path, unique=True)}


def with_references(
    questions: Iterable[Question], separate: Mapping[int, tuple[str, ...]]
) -> tuple[list[Question], list[int]]:
    """Give questions without a reference the one of a separate file.

    Returns:
        the questions; and the ids of those whose own reference names numbers that the separate one
        does not: one of the two is wrong, and the question's own is kept.
    """
    found, contradicted = [], []
    for question in questions:
        other = separate.get(question.question_id)
        if question.reference is None and other is not None:
            question = replace(question, reference=other)
        elif question.reference is not None and other is not None and _differ(question, other):
            contradicted.append(question.question_id)
        found.append(question)
    return found, contradicted


def _differ(question: Question, other: Sequence[str]) -> bool:
    pairs = zip(question.reference or (), other, strict=False)
    return any(_numbers(ours) - _numbers(theirs) for ours, theirs in pairs)


def _numbers(text: str) -> set[str]:
    words = re.findall(r"[0-9]+(?:\.[0-9]+)?|[a-z]+", text.lower().replace(",", ""))
    numbers = (_NUMBER_WORDS.get(word, word) for word in words)
    return {number for number in numbers if number[0] in _DIGITS}


def temperature_for(category: str, table: Mapping[str, float], default: float) -> float:
    """Return the sampling temperature of a category; 0 means greedy, without sampling."""
    return table.get(category, default)


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write questions as FastChat's ``question.jsonl``."""
    rows = []
    for question in questions:
        row: dict[str, Any] = {
            "question_id": question.question_id,
            "category": question.category,
            "turns": list(question.turns),
        }
        if question.reference is not None:
            row["reference"] = list(question.reference)
        rows.append(row)
    write_objects(path, rows)


def write_answers(path: Path, answers: Iterable[ModelAnswer]) -> None:
    """Write answers as FastChat's ``model_answer/<model_id>.jsonl``, sorted by question."""
    ordered = sorted(answers, key=lambda answer: (answer.question_id, answer.model_id))
    write_objects(path, (_answer_row(answer) for answer in ordered))


def _answer_row(answer: ModelAnswer) -> dict[str, Any]:
    row: dict[str, Any] = {
        "question_id": answer.question_id,
        "answer_id": answer.answer_id,
        "model_id": answer.model_id,
        "choices": [{"index": 0, "turns": list(answer.turns)}],
        "tstamp": answer.tstamp,
    }
    if any(answer.truncated):
        row["truncated"] = list(answer.truncated)
    return row


def read_answers(path: Path, *, unique: bool = False) -> list[ModelAnswer]:
    """Read FastChat answers; of several to one question by one model the last in the file counts.

    Args:
        unique: refuse several instead.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no answer to two turns, or a second answer to a question.
    """
    answers: dict[tuple[int, str], ModelAnswer] = {}
    for where, row in read_objects(path, ANSWER_FORM):
        choices = get_field(where, row, "choices", list, ANSWER_FORM)
        if not choices or not isinstance(choices[0], dict):
            raise DataError(
                f"{where}: choices is empty", '[{"index": 0, "turns": [...]}]', ANSWER_FORM
            )
        answer = ModelAnswer(
            question_id=get_field(where, row, "question_id", int, ANSWER_FORM),
            model_id=get_field(where, row, "model_id", str, ANSWER_FORM),
            turns=get_turns(where, choices[0], ANSWER_FORM),
            tstamp=get_number(where, row, "tstamp") or 0.0,
            truncated=_truncated(where, row),
        )
        key = (answer.question_id, answer.model_id)
        if unique and key in answers:
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
    answers = read_answers(path, unique=True)
    models = sorted({answer.model_id for answer in answers})
    if len(models) > 1:
        raise DataError(f"{path} holds answers of {models}", "those of one model", "split the file")
    by_id = {answer.question_id: answer for answer in answers}
    missing = [q.question_id for q in questions if q.question_id not in by_id]
    if missing:
        raise DataError(
            f"{path} answers {len(questions) - len(missing)} of {len(questions)} questions; "
            f"{missing[:_SHOWN_IDS]} and others are missing"
            if len(missing) > _SHOWN_IDS
            else f"{path} has no answer to the questions {missing}",
            "answers to these questions",
            "give the file of answers that was made with this question file",
        )
    return [by_id[question.question_id] for question in questions]


def _truncated(where: str, row: Mapping[str, Any]) -> tuple[bool, bool]:
    values = get_field(where, {"truncated": [False, False], **row}, "truncated", list, ANSWER_FORM)
    if len(values) != 2:
        raise DataError(f"{where}: truncated has {len(values)} values", "2", "correct the file")
    return bool(values[0]), bool(values[1])


def read_objects(path: Path, form: str) -> Iterable[tuple[str, dict[str, Any]]]:
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


def get_field(where: str, row: Mapping[str, Any], name: str, kind: type, form: str) -> Any:
    """Return a field of a row; ``form`` is what a row should look like, for the error.

    Raises:
        DataError: it is missing or of another type; True and False are not numbers.
    """
    if name not in row:
        raise DataError(f"{where}: no field {name!r}", kind.__name__, form)
    value = row[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DataError(f"{where}: {name} is a {type(value).__name__}", kind.__name__, form)
    return value


def get_turn(where: str, row: Mapping[str, Any], form: str) -> int:
    """Return the turn that a row is about.

    Raises:
        DataError: it is not 1 or 2.
    """
    turn = get_field(where, row, "turn", int, form)
    if turn not in (1, 2):
        raise DataError(f"{where}: turn is {turn}", "1 or 2", form)
    return int(turn)


def get_number(where: str, row: Mapping[str, Any], name: str) -> float | None:
    """Return an optional number of a row, or None where it is missing or null.

    Raises:
        DataError: it is no finite number.
    """
    value = row.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # False for NaN, and for an integer beyond the floats.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise DataError(f"{where}: {name} is {value!r}", "a finite number", "correct the file")
    return float(value)


def _parse_question(where: str, row: Mapping[str, Any]) -> Question:
    reference = row.get("reference")
    if reference is not None:
        reference = tuple(get_texts(where, row, "reference", QUESTION_FORM))
    return Question(
        question_id=get_field(where, row, "question_id", int, QUESTION_FORM),
        category=get_field(where, row, "category", str, QUESTION_FORM),
        turns=get_turns(where, row, QUESTION_FORM),
        reference=reference or None,
    )


def get_turns(where: str, row: Mapping[str, Any], form: str) -> tuple[str, str]:
    """Return the two turns of a row.

    Raises:
        DataError: there are not two, or they are no texts.
    """
    turns = get_texts(where, row, "turns", form)
    if len(turns) != 2:
        raise DataError(f"{where}: {len(turns)} turns", "2 turns", form)
    return turns[0], turns[1]


def get_texts(where: str, row: Mapping[str, Any], name: str, form: str) -> list[str]:
    """Return a list of texts of a row.

    Raises:
        DataError: it is missing or of another type.
    """
    values: list[Any] = get_field(where, row, name, list, form)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            found = f"{where}: {name}[{index}] is a {type(value).__name__}"
            raise DataError(found, "a string", form)
    return values


# Questions from the Hugging Face hub, as FastChat's ``question.jsonl``.


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
        with appearing(path) as temporary:
            write_questions(temporary, questions)
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
