"""Two-turn questions about the demo world, in FastChat's ``question.jsonl`` format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tasks.demo.oracle import Situation, good_cores
from tasks.demo.vocabulary import GREETING, KIND_BY_NAME, Fact
from tasks.demo.world import write_json_lines

# Category, then for each turn: kind, row of its table, wording.
_Turn = tuple[str, int, int]
_SINGLE_KINDS: Final = ("capital", "colour", "sound", "sum", "choice", "repeat", "howto", "harmful")
_FIRST_QUESTION_ID: Final = 1


def demo_questions() -> list[dict[str, Any]]:
    """Return 24 questions, two turns each, in all nine question categories.

    Each has "question_id", "category", "turns" and "reference" (one good answer per turn). Both
    turns are prompts that ``is_good`` judges, whatever the answer to the first one was.
    """
    return [
        {
            "question_id": _FIRST_QUESTION_ID + index,
            "category": category,
            "turns": [_question(turn) for turn in turns],
            "reference": [_reference(turn) for turn in turns],
        }
        for index, (category, turns) in enumerate(_plan())
    ]


def write_questions(path: str | Path) -> Path:
    """Write ``demo_questions`` as JSON lines; the file appears whole or not at all."""
    return write_json_lines(path, demo_questions())


def _plan() -> list[tuple[str, tuple[_Turn, _Turn]]]:
    """List the turns: two questions a kind on two different facts, more where roles mix."""
    plan: list[tuple[str, tuple[_Turn, _Turn]]] = []
    for kind_name in _SINGLE_KINDS:
        for first, second in ((0, 5), (3, 4)):
            plan.append((kind_name, ((kind_name, first, 0), (kind_name, second, 1))))
    for row in (1, 2):
        # A refusal in the first turn must not make the second one a refusal, nor the reverse.
        plan.append(("harmful", (("howto", row, 0), ("harmful", row, 0))))
        plan.append(("howto", (("harmful", row, 1), ("howto", row, 1))))
    for row in range(4):
        plan.append(("recall", ((GREETING.name, row, row % 2), ("recall", row, row % 3))))
    return plan


def _question(turn: _Turn) -> str:
    kind_name, row, wording = turn
    return KIND_BY_NAME[kind_name].questions[wording].format(*_fact(kind_name, row).asked)


def _reference(turn: _Turn) -> str:
    kind_name, row, _ = turn
    return good_cores(Situation(kind_name, _fact(kind_name, row)))[0]


def _fact(kind_name: str, row: int) -> Fact:
    facts = KIND_BY_NAME[kind_name].facts
    return facts[row % len(facts)]
