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
from typing import Any, Final, Literal

from tasks.data.hh import Message
from tasks.errors import DataError
from tasks.evaluate.questions import Question, get_field, read_objects

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
OWN: Final = "own"

_BASE_NAMES: Final[Mapping[tuple[Kind, bool], str]] = {
    ("single", False): "single-v1",
    ("single", True): "single-math-v1",
    ("pair", False): "pair-v2",
    ("pair", True): "pair-math-v1",
}
_SECOND_TURN: Final = "-multi-turn"
_ALL_NAMES: Final = tuple(
    name + suffix for name in _BASE_NAMES.values() for suffix in ("", _SECOND_TURN)
)
_FIX: Final = 'rows with "name", "system_prompt" and "prompt_template", as in FastChat'


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """One template.

    Args:
        name: as it is recorded in judgments.
        template: with fields such as ``{question}`` and ``{answer}`` in braces.
    """

    name: str
    system: str
    template: str


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
            raise DataError(f"The judge prompts lack {name}", f"it beside {known}", _FIX)
        return self.by_name[name]


def template_name(kind: Kind, turn: int, with_reference: bool) -> str:
    """Return FastChat's name of the template of one judgment."""
    return _BASE_NAMES[kind, with_reference] + (_SECOND_TURN if turn == 2 else "")


def load_judge_prompts(source: str) -> JudgePrompts:
    """Return the project's own wording, or that of a file.

    Raises:
        MissingInputError: no such file.
        DataError: no template of a known name, or one with a field that is not known.
    """
    if source == OWN:
        own = [JudgePrompt(f"rlhf-flows-{n}", s, t) for n, (s, t) in OWN_TEMPLATES.items()]
        return JudgePrompts(dict(zip(OWN_TEMPLATES, own, strict=True)))
    path = Path(source).expanduser()
    found: dict[str, JudgePrompt] = {}
    for where, row in read_objects(path, _FIX):
        name = get_field(where, row, "name", str, _FIX)
        if name in _ALL_NAMES:
            found[name] = _parse(where, row, name)
    if not found:
        raise DataError(f"{path} holds no judge prompt", f"one of {', '.join(_ALL_NAMES)}", _FIX)
    return JudgePrompts(found)


def _parse(where: str, row: Mapping[str, Any], name: str) -> JudgePrompt:
    template = get_field(where, row, "prompt_template", str, _FIX)
    try:
        fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise DataError(f"{where}: prompt_template: {error}", "text with {fields}", _FIX) from error
    kind: Kind = "pair" if name.startswith("pair") else "single"
    known = set(_values(kind, 2 if name.endswith(_SECOND_TURN) else 1, _EMPTY, (_NO_ANSWER,) * 2))
    if fields - known:
        raise DataError(
            f"{where}: prompt_template has the unknown fields {sorted(fields - known)}",
            f"only {sorted(known)}",
            "correct the template; literal braces are doubled",
        )
    return JudgePrompt(name, get_field(where, row, "system_prompt", str, _FIX), template)


def judge_messages(
    prompt: JudgePrompt, kind: Kind, turn: int, question: Question, answers: Sequence[Turns]
) -> tuple[Message, ...]:
    """Fill in a template.

    Args:
        question: with the reference to show, if any.
        answers: both turns of one answer, or of the answers in places A and B.
    """
    content = prompt.template.format(**_values(kind, turn, question, answers))
    system = (Message("system", prompt.system),) if prompt.system else ()
    return (*system, Message("user", content))


Turns = tuple[str, str]
_NO_ANSWER: Final[Turns] = ("", "")
_EMPTY: Final = Question(0, "", ("", ""), ("", ""))


def _values(kind: Kind, turn: int, question: Question, answers: Sequence[Turns]) -> dict[str, str]:
    reference = (*(question.reference or ()), "", "")[:2]
    values = {"ref_answer_1": reference[0], "ref_answer_2": reference[1]}
    sides = ("",) if kind == "single" else ("_a", "_b")
    if turn == 1:
        values["question"] = question.turns[0]
        return values | {
            f"answer{side}": turns[0] for side, turns in zip(sides, answers[:2], strict=False)
        }
    values |= {"question_1": question.turns[0], "question_2": question.turns[1]}
    for side, turns in zip(sides, answers, strict=False):
        values |= {f"answer{side}_1": turns[0], f"answer{side}_2": turns[1]}
    return values
