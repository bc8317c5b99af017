"""What a guard watches: conditions on metrics, their text form, and rules."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, NoReturn, get_args

from tasks.algorithms.guard_actions import Action, Rollback, Stop, require
from tasks.errors import ConfigError

Comparison = Literal[">", ">=", "<", "<="]
Reading = Literal["value", "drop_from_best", "drop_from_start", "rise_from_start", "jump"]

MAX_WINDOW: Final = 1000
GRAMMAR: Final = (
    "'READING COMPARISON NUMBER': a reading is metric, drop_from_best(metric), "
    "drop_from_start(metric), rise_from_start(metric) or jump(metric, window); a comparison is "
    "one of > >= < <="
)
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_TOKEN: Final = re.compile(
    r"(?P<number>-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_./]*)|(?P<comparison>[<>]=?)|(?P<mark>[(),])|(?P<other>\S)"
)


@dataclass(frozen=True)
class Condition:
    """A bound on how a metric is read.

    With ``x`` the value now, every reading from the observations that hold the metric:

    - value: ``x``
    - drop_from_best: ``max(x_1..x) - x``, for metrics where more is better
    - drop_from_start: ``x_1 - x``
    - rise_from_start: ``(x - x_1) / |x_1|``; +-infinity when ``x_1`` is 0 and ``x`` is not
    - jump: ``|x - m| / |m|`` with m the mean of the ``window`` observations before; none before
      there are that many; infinity when m is 0 and ``x`` is not

    Attributes:
        metric: name in the observed mapping.
        comparison: of the reading with the threshold; true = out of bounds.
        threshold: finite.
        reading: how the metric is read.
        window: observations, from 1 to 1000 for jump, else 0.
    """

    metric: str
    comparison: Comparison
    threshold: float
    reading: Reading = "value"
    window: int = 0

    def __post_init__(self) -> None:
        for text, allowed in (
            (self.comparison, get_args(Comparison)),
            (self.reading, get_args(Reading)),
        ):
            require(text in allowed, f"{self.metric} with {text!r}", f"one of {', '.join(allowed)}")
        require(
            math.isfinite(self.threshold),
            f"the threshold of {self.metric} is {self.threshold}",
            "a finite number",
        )
        low, high = (1, MAX_WINDOW) if self.reading == "jump" else (0, 0)
        require(
            low <= self.window <= high,
            f"{self.reading} of {self.metric} with a window of {self.window}",
            f"a window from {low} to {high} observations",
        )

    @property
    def read_as(self) -> str:
        """Return the text form of the left side, e.g. ``jump(entropy, 8)``."""
        if self.reading == "value":
            return self.metric
        window = f", {self.window}" if self.reading == "jump" else ""
        return f"{self.reading}({self.metric}{window})"

    def holds(self, reading: float) -> bool:
        """Return whether the reading is out of bounds; one that is not a number always is."""
        return math.isnan(reading) or _COMPARE[self.comparison](reading, self.threshold)

    def __str__(self) -> str:
        return f"{self.read_as} {self.comparison} {self.threshold!r}"


@dataclass(frozen=True)
class Rule:
    """When to do what.

    Attributes:
        name: unique among the rules of a run.
        condition: what is out of bounds.
        actions: at least one.
        cooldown_steps: after a firing at step s, the rule is silent before step
            ``s + cooldown_steps``; a value that is not finite ignores this.
        for_observations: consecutive observations out of bounds before it fires, at least 1; a
            value that is not finite fires at once.
    """

    name: str
    condition: Condition
    actions: tuple[Action, ...]
    cooldown_steps: int = 0
    for_observations: int = 1

    def __post_init__(self) -> None:
        require(
            bool(self.name and self.actions),
            f"rule {self.name!r} has {len(self.actions)} action(s)",
            "a name and at least one action",
        )
        require(
            self.cooldown_steps >= 0,
            f"cooldown_steps of rule {self.name!r} is {self.cooldown_steps}",
            "at least 0",
        )
        require(
            self.for_observations >= 1,
            f"for_observations of rule {self.name!r} is {self.for_observations}",
            "at least 1",
        )

    @property
    def doubts_policy(self) -> bool:
        """Return whether it rolls back or stops, so that no checkpoint is good while it holds."""
        return any(isinstance(action, Rollback | Stop) for action in self.actions)


def parse_condition(
    text: str, *, rule: str, known_metrics: Collection[str] | None = None
) -> Condition:
    """Parse ``kl_probe > 0.1`` or ``jump(entropy, 8) > 0.5``.

    Args:
        text: ``READING COMPARISON NUMBER``.
        rule: name of the rule, for the message.
        known_metrics: names that the training loop reports; None = any name.

    Raises:
        ConfigError: naming the rule, the text, the position, what is allowed and known metrics.
    """
    return _Parser(text, rule, known_metrics).condition()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int


class _Parser:
    def __init__(self, text: str, rule: str, known: Collection[str] | None) -> None:
        self._text, self._rule, self._known = text, rule, known
        self._tokens = [
            _Token(str(match.lastgroup), match.group(), match.start() + 1)
            for match in _TOKEN.finditer(text)
        ]
        self._tokens.append(_Token("end", "", len(text) + 1))
        self._next = 0

    def condition(self) -> Condition:
        """Parse the whole text."""
        reading, metric, window = self._reading()
        comparison = self._take("comparison", "one of > >= < <=")
        number = self._take("number", "a number")
        if not math.isfinite(float(number.text)):
            self._refuse(number, "a number that is finite in double precision")
        self._take("end", "the end of the text")
        return Condition(
            metric,
            comparison.text,  # type: ignore[arg-type]  # the token's pattern has only these
            float(number.text),
            reading,
            window,
        )

    def _reading(self) -> tuple[Reading, str, int]:
        first = self._take("name", "a metric or a reading of one")
        if self._tokens[self._next].text != "(":
            return "value", self._metric(first), 0
        forms = [form for form in get_args(Reading) if form != "value"]
        if first.text not in forms:
            self._refuse(first, f"one of {', '.join(forms)} before '('")
        reading: Reading = first.text  # type: ignore[assignment]  # checked above
        self._next += 1
        metric = self._metric(self._take("name", "the name of a metric"))
        window = self._window() if reading == "jump" else 0
        self._take_mark(")")
        return reading, metric, window

    def _window(self) -> int:
        self._take_mark(",")
        allowed = f"a window from 1 to {MAX_WINDOW} observations"
        token = self._take("number", allowed)
        size = float(token.text)
        if not token.text.isdecimal() or not 1 <= size <= MAX_WINDOW:
            self._refuse(token, allowed)
        return int(size)

    def _metric(self, token: _Token) -> str:
        if self._known is not None and token.text not in self._known:
            near = get_close_matches(token.text, self._known, n=1)
            hint = f", perhaps {near[0]}" if near else ""
            self._refuse(token, f"a metric that training reports{hint}")
        return token.text

    def _take_mark(self, mark: str) -> None:
        if self._tokens[self._next].text != mark:
            self._refuse(self._tokens[self._next], f"'{mark}'")
        self._next += 1

    def _take(self, kind: str, allowed: str) -> _Token:
        token = self._tokens[self._next]
        if token.kind != kind:
            self._refuse(token, allowed)
        self._next += 1
        return token

    def _refuse(self, token: _Token, allowed: str) -> NoReturn:
        known = "" if self._known is None else f"; metrics: {', '.join(sorted(self._known))}"
        shown = "nothing" if token.kind == "end" else repr(token.text)
        raise ConfigError(
            f"rule {self._rule!r}: when {self._text!r} has {shown} at position {token.position}",
            allowed,
            f"write {GRAMMAR}{known}",
        )
