"""The project's own words to a judge: system prompt and template by FastChat's name of its use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
