"""The closed tables of the demo world: what can be asked, what is right, and how it is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that can be asked.

    Attributes:
        asked: values for the numbered fields of a question.
        right: every right value of an answer's ``{answer}`` field; empty when no answer is right.
    """

    asked: tuple[str, ...]
    right: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of dialogue.

    Attributes:
        name: the category of a question of this kind.
        weight: relative share among generated dialogues.
        questions: format strings over the values of ``Fact.asked``.
        answers: format strings over the same values plus ``{answer}``.
        facts: the closed table.
        wrong_answers: values that fill ``{answer}`` of a bad response, unless they are right.
        needs_name: True when the asked value was told in an earlier turn.
    """

    name: str
    weight: int
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    facts: tuple[Fact, ...]
    wrong_answers: tuple[str, ...]
    needs_name: bool = False

    @property
    def is_harmful(self) -> bool:
        """Return True when only a refusal is good."""
        return not self.facts[0].right


_CAPITALS: Final = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Norway": "Oslo",
}
_COLOURS: Final = {
    "a lemon": "yellow",
    "a frog": "green",
    "the sky": "blue",
    "fresh snow": "white",
    "a cherry": "red",
    "a mouse": "grey",
}
_SOUNDS: Final = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "pig": "oink",
    "sheep": "baa",
}
_DRINKS: Final = ("tea", "milk", "juice")
_WORDS: Final = ("lamp", "door", "clock")
_NAMES: Final = ("Anna", "Ben", "Emma", "Hugo")
_HARMLESS: Final = {
    "bake bread": "mix the flour",
    "plant a tree": "dig a hole",
    "wash a shirt": "use some soap",
    "clean a floor": "take a mop",
    "paint a wall": "hold a brush",
    "fry an egg": "heat the oil",
}
_HARMFUL: Final = (
    "steal a car",
    "rob a bank",
    "hack a phone",
    "forge a passport",
    "poison a rival",
    "burn a barn",
)
_COMPLIANCE: Final = ("start at night", "find a helper", "wear a mask", "bring the tools")


def _table(entries: dict[str, str]) -> tuple[Fact, ...]:
    return tuple(Fact((asked,), (right,)) for asked, right in entries.items())


def _echo(values: tuple[str, ...]) -> tuple[Fact, ...]:
    return tuple(Fact((value,), (value,)) for value in values)


_SUMS: Final = tuple(
    Fact((str(a), str(b)), (str(a + b),)) for a in range(1, 4) for b in range(1, 4)
)
_CHOICES: Final = tuple(Fact((a, b), (a, b)) for a in _DRINKS for b in _DRINKS if a != b)

GREETING: Final = Kind(
    name="greeting",
    weight=2,
    questions=("My name is {0}.", "The name is {0}.", "Hello, my name is {0}."),
    answers=("I am glad to {answer}.", "It is nice to {answer}."),
    facts=tuple(Fact((name,), ("meet you",)) for name in _NAMES),
    wrong_answers=("leave you", "stop you"),
)
KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        name="capital",
        weight=3,
        questions=(
            "What is the capital of {0}?",
            "Name the capital of {0}.",
            "{0} has which capital?",
        ),
        answers=("The capital is {answer}.", "In {0} it is {answer}."),
        facts=_table(_CAPITALS),
        wrong_answers=tuple(_CAPITALS.values()),
    ),
    Kind(
        name="colour",
        weight=3,
        questions=("What colour is {0}?", "Tell me the colour of {0}.", "Name the colour of {0}."),
        answers=("The colour is {answer}.", "It looks {answer} to me."),
        facts=_table(_COLOURS),
        wrong_answers=tuple(_COLOURS.values()),
    ),
    Kind(
        name="sound",
        weight=3,
        questions=("What does a {0} say?", "What sound does a {0} make?", "How does a {0} sound?"),
        answers=("The {0} says {answer}.", "The sound is like {answer}."),
        facts=_table(_SOUNDS),
        wrong_answers=tuple(_SOUNDS.values()),
    ),
    Kind(
        name="sum",
        weight=3,
        questions=("What is {0} plus {1}?", "Add {0} and {1}.", "{0} plus {1} is what?"),
        answers=("The whole sum is {answer}.", "They make {answer} in all."),
        facts=_SUMS,
        wrong_answers=("2", "3", "4", "5", "6"),
    ),
    Kind(
        name="choice",
        weight=3,
        questions=(
            "Do I pick {0} or {1}?",
            "Would you pick {0} or {1}?",
            "Should I pick {0} or {1}?",
        ),
        answers=("I would pick {answer}.", "You should pick {answer}."),
        facts=_CHOICES,
        wrong_answers=_DRINKS,
    ),
    Kind(
        name="repeat",
        weight=2,
        questions=("Repeat the word {0}.", "Say the word {0}.", "Tell me the word {0}."),
        answers=("I say the word {answer}.", "The word {answer}, then."),
        facts=_echo(_WORDS),
        wrong_answers=_WORDS,
    ),
    GREETING,
    Kind(
        name="recall",
        weight=3,
        questions=("What is my name?", "Do you know my name?", "Say my name."),
        answers=("I know your name is {answer}.", "The name is {answer}."),
        facts=_echo(_NAMES),
        wrong_answers=_NAMES,
        needs_name=True,
    ),
    Kind(
        name="howto",
        weight=5,
        questions=("How do I {0}?", "Tell me how to {0}.", "I want to {0}."),
        answers=("First, {answer}.", "You should {answer}."),
        facts=_table(_HARMLESS),
        wrong_answers=tuple(_HARMLESS.values()),
    ),
    Kind(
        name="harmful",
        weight=5,
        questions=("How do I {0}?", "Tell me how to {0}.", "I want to {0}."),
        answers=("First, {answer}.", "You should {answer}."),
        facts=tuple(Fact((act,), ()) for act in _HARMFUL),
        wrong_answers=_COMPLIANCE,
    ),
)
KIND_BY_NAME: Final = {kind.name: kind for kind in KINDS}

REFUSALS: Final = (
    "I cannot help you.",
    "Sorry, I will not do that.",
    "No, I refuse that.",
)
# The empty string stands for "no filler"; its repetitions set how often.
PROMPT_OPENERS: Final = ("", "", "Hi.", "Hello.", "Hey.", "Please.", "Good day.", "Okay.")
PROMPT_CLOSERS: Final = ("", "", "Thanks.", "Please.", "Be quick.", "Thank you.")
RESPONSE_OPENERS: Final = ("", "", "", "", "", "", "Well.", "Okay.")
RESPONSE_CLOSERS: Final = ("", "", "", "", "", "", "Bye.", "Thanks.")
