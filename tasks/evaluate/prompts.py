"""What a judge is asked: one template per kind of grading, turn, and with or without a reference.

Files are in FastChat's ``judge_prompts.jsonl`` format, under its names (``single-v1``,
``single-math-v1-multi-turn``, ``pair-v2``, ...); the project's own wording has names of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from tasks.data.hh import Message
from tasks.errors import DataError
from tasks.evaluate.questions import Question, parse, read_objects

# The project's own words to a judge: system prompt and template by FastChat's name of its use.

_SCALE: Final = (
    "Say in a few sentences what is good and what is not. Then close with the rating as a whole or "
    "half number from 1 (useless) to 10 (could not be better), on a line of its own and in double "
    "brackets, like this: Rating: [[6]]"
)
_CHOICE: Final = (
    "Say in a few sentences where they differ. Neither their order, their length nor their style "
    "is a merit. Then close with your verdict on a line of its own: [[A]] if A is better, [[B]] if "
    "B is better, [[C]] if neither is."
)
_RATE: Final = (
    "You grade answers of an AI assistant: how well they do what the user asked for, how correct, "
    "complete and clear they are, and no more than that. "
)
_COMPARE: Final = (
    "You compare the answers of two AI assistants, A and B, to the same user: which one does "
    "better what was asked for, and is more correct, complete and clear. "
)
_BY_REFERENCE: Final = (
    "The reference is right: check each result and each step against it before you decide. "
)
_SECOND: Final = "Grade the second answer; the first one is there to be understood by. "
_SECOND_PAIR: Final = "Decide by the second answers; the first ones are there to be understood by. "

_QUESTION: Final = "<question>\n{question}\n</question>\n\n"
_REFERENCE: Final = "<reference>\n{ref_answer_1}\n</reference>\n\n"
_REFERENCES: Final = (
    "<reference turn=1>\n{ref_answer_1}\n</reference>\n"
    "<reference turn=2>\n{ref_answer_2}\n</reference>\n\n"
)


def _answer(place: str, field: str) -> str:
    name = f"answer {place}".strip()
    return f"<{name}>\n{{{field}}}\n</{name}>"


def _dialogue(place: str, side: str) -> str:
    name = f"conversation {place}".strip()
    turns = [
        f"<question turn={turn}>\n{{question_{turn}}}\n</question>\n"
        f"<answer turn={turn}>\n{{answer{side}_{turn}}}\n</answer>"
        for turn in (1, 2)
    ]
    return f"<{name}>\n" + "\n".join(turns) + f"\n</{name}>"


_ONE: Final = _answer("", "answer")
_TWO: Final = _answer("A", "answer_a") + "\n\n" + _answer("B", "answer_b")
_ONE_DIALOGUE: Final = _dialogue("", "")
_TWO_DIALOGUES: Final = _dialogue("A", "_a") + "\n\n" + _dialogue("B", "_b")

OWN_TEMPLATES: Final[Mapping[str, tuple[str, str]]] = {
    "single-v1": (_RATE + _SCALE, _QUESTION + _ONE),
    "single-math-v1": (_RATE + _BY_REFERENCE + _SCALE, _QUESTION + _REFERENCE + _ONE),
    "single-v1-multi-turn": (_RATE + _SECOND + _SCALE, _ONE_DIALOGUE),
    "single-math-v1-multi-turn": (
        _RATE + _SECOND + _BY_REFERENCE + _SCALE,
        _REFERENCES + _ONE_DIALOGUE,
    ),
    "pair-v2": (_COMPARE + _CHOICE, _QUESTION + _TWO),
    "pair-math-v1": (_COMPARE + _BY_REFERENCE + _CHOICE, _QUESTION + _REFERENCE + _TWO),
    "pair-v2-multi-turn": (_COMPARE + _SECOND_PAIR + _CHOICE, _TWO_DIALOGUES),
    "pair-math-v1-multi-turn": (
        _COMPARE + _SECOND_PAIR + _BY_REFERENCE + _CHOICE,
        _REFERENCES + _TWO_DIALOGUES,
    ),
}

Kind = Literal["single", "pair"]
Turns = tuple[str, str]
OWN: Final = "own"
_FORM: Final = 'rows with "name", "system_prompt" and "prompt_template", as in FastChat'


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """One template.

    Args:
        name: as it is recorded in judgments.
        template: with fields such as ``{question}`` and ``{answer}`` in braces.
    """

    name: str
    system: Annotated[str, Field(validation_alias="system_prompt")]
    template: Annotated[str, Field(validation_alias="prompt_template")]

    def messages(
        self, turn: int, question: Question, answers: Sequence[Turns]
    ) -> tuple[Message, ...]:
        """Fill in the template.

        Args:
            question: with the reference to show, if any.
            answers: both turns of one answer, or of the answers in places A and B.
        """
        content = self.template.format(**_fields(turn, question, answers))
        system = (Message("system", self.system),) if self.system else ()
        return (*system, Message("user", content))


_PROMPT: Final = TypeAdapter(JudgePrompt)


@dataclass(frozen=True)
class JudgePrompts:
    """The templates of one wording.

    Args:
        by_name: by FastChat's name.
    """

    by_name: Mapping[str, JudgePrompt]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names and texts."""
        texts = {key: [p.name, p.system, p.template] for key, p in self.by_name.items()}
        return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()

    def select(self, kind: Kind, turn: int, with_reference: bool) -> JudgePrompt:
        """Return the template of one judgment.

        Raises:
            DataError: the file lacks it.
        """
        name = template_name(kind, turn, with_reference)
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise DataError(f"The judge prompts lack {name}", f"it beside {known}", _FORM)
        return self.by_name[name]


def template_name(kind: Kind, turn: int, with_reference: bool) -> str:
    """Return FastChat's name of the template of one judgment."""
    version = "v2" if kind == "pair" and not with_reference else "v1"
    return f"{kind}{'-math' * with_reference}-{version}{'-multi-turn' * (turn == 2)}"


def load_judge_prompts(source: str) -> JudgePrompts:
    """Return the project's own wording, or that of a file.

    Raises:
        MissingInputError: no such file.
        DataError: no template of a known name, or one with a field that is not known.
    """
    if source == OWN:
        own = {n: JudgePrompt(f"rlhf-flows-{n}", s, t) for n, (s, t) in OWN_TEMPLATES.items()}
        return JudgePrompts(own)
    path = Path(source).expanduser()
    by_name: dict[str, JudgePrompt] = {}
    for where, row in read_objects(path, _FORM):
        if row.get("name") in list(OWN_TEMPLATES):
            prompt = parse(where, row, _PROMPT, _FORM)
            _check_fields(where, prompt)
            by_name[prompt.name] = prompt
    if not by_name:
        known = ", ".join(OWN_TEMPLATES)
        raise DataError(f"{path} holds no judge prompt", f"one of {known}", _FORM)
    return JudgePrompts(by_name)


def _check_fields(where: str, prompt: JudgePrompt) -> None:
    try:
        fields = {
            field for _, field, _, _ in Formatter().parse(prompt.template) if field is not None
        }
    except ValueError as error:
        found = f"{where}: prompt_template: {error}"
        raise DataError(found, "text with {fields}", _FORM) from error
    turn = 2 if prompt.name.endswith("-multi-turn") else 1
    n_answers = 2 if prompt.name.startswith("pair") else 1
    known = set(_fields(turn, Question(0, "", ("", "")), [("", "")] * n_answers))
    if fields - known:
        raise DataError(
            f"{where}: prompt_template has the unknown fields {sorted(fields - known)}",
            f"only {sorted(known)}",
            "correct the template; literal braces are doubled",
        )


def _fields(turn: int, question: Question, answers: Sequence[Turns]) -> dict[str, str]:
    """Return the values of a template's fields."""
    reference = (*question.reference, "", "")
    fields = {"ref_answer_1": reference[0], "ref_answer_2": reference[1]}
    places = ("answer",) if len(answers) == 1 else ("answer_a", "answer_b")
    if turn == 1:
        fields["question"] = question.turns[0]
        return fields | {place: turns[0] for place, turns in zip(places, answers, strict=True)}
    fields |= {"question_1": question.turns[0], "question_2": question.turns[1]}
    for place, turns in zip(places, answers, strict=True):
        fields |= {f"{place}_1": turns[0], f"{place}_2": turns[1]}
    return fields
