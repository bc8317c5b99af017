"""A rule engine over training metrics that says when to go back, slow down or stop.

The engine keeps what it has seen in step with the run, not with the weights: after a rollback it
remembers the cool-downs, the best values and the number of rollbacks, because an engine that
forgot them together with the weights would fire for ever. Its state belongs into every checkpoint
for resuming a run, and is left alone when a rollback restores one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Literal, NoReturn, TypeVar, get_args

from tasks.errors import ConfigError, DataError, TrainingError

# What a guard may ask the training loop to do, and how several wishes become one.

RollbackTarget = Literal["good", "best", "start"]
# From the most to the least trusted, once the judge of the others is in doubt.
_TARGETS_BY_TRUST: Final[tuple[RollbackTarget, ...]] = ("start", "best", "good")


@dataclass(frozen=True)
class Action:
    """Base of what a rule may ask the training loop to do."""

    kind: ClassVar[str]

    def describe(self) -> str:
        """Return what is done, for people."""
        return self.kind.replace("_", " ")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-plain fields with the kind."""
        return {"action": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Rollback(Action):
    """Restore weights and optimizers of an earlier point.

    Attributes:
        to: good = the newest checkpoint whose probe passed; best = the one with the best probe;
            start = the policy that training began with, the only one that a reward under
            suspicion had no say in.
    """

    to: RollbackTarget
    kind: ClassVar[str] = "rollback"

    def __post_init__(self) -> None:
        targets = get_args(RollbackTarget)
        require(self.to in targets, f"a rollback to {self.to!r}", f"one of {', '.join(targets)}")

    def describe(self) -> str:
        """Return what is done, for people."""
        if self.to == "start":
            return "roll back to the start"
        return f"roll back to the {'last good' if self.to == 'good' else 'best'} checkpoint"


@dataclass(frozen=True)
class ScaleLearningRate(Action):
    """Multiply the learning rate.

    Attributes:
        factor: above 0, below 1.
        minimum: lowest share of the configured rate that is left, from 0 to 1.
    """

    factor: float
    minimum: float = 0.0
    kind: ClassVar[str] = "scale_learning_rate"

    def __post_init__(self) -> None:
        _check_shrinking("learning rate factor", self.factor)
        require(
            0.0 <= self.minimum <= 1.0,
            f"minimum learning rate share is {self.minimum}",
            "a share from 0 to 1",
        )

    def apply(self, share: float) -> float:
        """Return the new share of the configured rate; never above the present one."""
        return min(share, max(share * self.factor, self.minimum))

    def describe(self) -> str:
        """Return what is done, for people."""
        return (
            f"multiply the learning rate by {self.factor:g}, not below {self.minimum:g} of the "
            "configured one"
        )


@dataclass(frozen=True)
class GrowBatch(Action):
    """Multiply the prompts of a step.

    Attributes:
        factor: above 1.
        maximum: prompts, at least 1.
    """

    factor: float
    maximum: int
    kind: ClassVar[str] = "grow_batch"

    def __post_init__(self) -> None:
        require(1.0 < self.factor < math.inf, f"batch factor is {self.factor}", "a number above 1")
        require(self.maximum >= 1, f"maximum batch is {self.maximum}", "at least 1 prompt")

    def apply(self, prompts: int) -> int:
        """Return the new number of prompts; never below the present one."""
        return max(prompts, min(int(prompts * self.factor), self.maximum))

    def describe(self) -> str:
        """Return what is done, for people."""
        return f"multiply the batch by {self.factor:g}, up to {self.maximum} prompts"


@dataclass(frozen=True)
class LowerTokenBudget(Action):
    """Multiply the token budget of a micro-batch.

    Attributes:
        factor: above 0, below 1.
        minimum: tokens, at least 1; what the longest row needs.
    """

    factor: float
    minimum: int = 1
    kind: ClassVar[str] = "lower_token_budget"

    def __post_init__(self) -> None:
        _check_shrinking("token budget factor", self.factor)
        require(self.minimum >= 1, f"minimum token budget is {self.minimum}", "at least 1 token")

    def apply(self, tokens: int) -> int:
        """Return the new budget; never above the present one."""
        return min(tokens, max(int(tokens * self.factor), self.minimum))

    def describe(self) -> str:
        """Return what is done, for people."""
        return (
            f"multiply tokens per micro-batch by {self.factor:g}, not below {self.minimum} tokens"
        )


@dataclass(frozen=True)
class EnableGradientCheckpointing(Action):
    """Recompute activations in the backward pass instead of keeping them."""

    kind: ClassVar[str] = "enable_gradient_checkpointing"


@dataclass(frozen=True)
class Reanchor(Action):
    """Take a new snapshot of the current policy as the proximal one."""

    kind: ClassVar[str] = "reanchor"


@dataclass(frozen=True)
class ResetSampler(Action):
    """Draw the data in a new order from here on."""

    kind: ClassVar[str] = "reset_sampler"


@dataclass(frozen=True)
class Warn(Action):
    """Report only."""

    kind: ClassVar[str] = "warn"


@dataclass(frozen=True)
class Stop(Action):
    """End the run.

    Attributes:
        reason: filled in when a rule fires.
    """

    reason: str = ""
    kind: ClassVar[str] = "stop"

    def describe(self) -> str:
        """Return what is done, for people."""
        return f"stop ({self.reason})" if self.reason else "stop"


_A = TypeVar("_A", bound=Action)


def merge_actions(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Merge what several rules ask for, whatever their order.

    The result holds at most one action of each kind, to be carried out in this order: Rollback
    (restores the optimizer, so it comes before the scale), ScaleLearningRate, GrowBatch,
    LowerTokenBudget, EnableGradientCheckpointing, Reanchor, ResetSampler, Warn.

    - Rollback: to start wins over best, best over good
    - ScaleLearningRate: factors multiply, the highest minimum holds
    - GrowBatch: the largest factor, the smallest maximum
    - LowerTokenBudget: the smallest factor, the highest minimum
    - Stop wins over everything but a rollback, which then says with which weights the run ends:
      ``(Rollback, Stop)`` or ``(Stop,)``; reasons are joined
    """
    rollbacks = {action.to for action in _of(Rollback, actions)}
    merged: list[Action] = []
    merged += [Rollback(to) for to in _TARGETS_BY_TRUST if to in rollbacks][:1]
    if stops := _of(Stop, actions):
        reasons = sorted({action.reason for action in stops if action.reason})
        return (*merged, Stop("; ".join(reasons)))
    if scales := _of(ScaleLearningRate, actions):
        # Sorted, because a product of floats depends on its order in the last bit.
        factor = math.prod(sorted(action.factor for action in scales))
        merged.append(ScaleLearningRate(factor, max(action.minimum for action in scales)))
    if growths := _of(GrowBatch, actions):
        largest = max(action.factor for action in growths)
        merged.append(GrowBatch(largest, min(action.maximum for action in growths)))
    if budgets := _of(LowerTokenBudget, actions):
        smallest = min(action.factor for action in budgets)
        merged.append(LowerTokenBudget(smallest, max(action.minimum for action in budgets)))
    for kind in (EnableGradientCheckpointing, Reanchor, ResetSampler, Warn):
        merged += _of(kind, actions)[:1]
    return tuple(merged)


def require(holds: bool, found: str, expected: str) -> None:
    """Refuse a setting of a rule (ConfigError)."""
    if not holds:
        raise ConfigError(found, expected, "change it in the rule")


def _of(kind: type[_A], actions: Sequence[Action]) -> list[_A]:
    return [action for action in actions if isinstance(action, kind)]


def _check_shrinking(name: str, factor: float) -> None:
    require(0.0 < factor < 1.0, f"{name} is {factor}", "a number above 0 and below 1")


# What a guard watches: conditions on metrics, their text form, and rules.

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


HISTORY_OBSERVATIONS: Final = 20
_MESSAGE_OBSERVATIONS: Final = 4


@dataclass(frozen=True)
class Firing:
    """One rule that fired.

    Attributes:
        step: of the observation.
        rule: name of the rule.
        condition: its text form.
        metric: name of the watched metric.
        value: of the metric.
        reading: what was compared with the threshold, e.g. the drop; not a number where ``value``
            is not finite.
        threshold: of the condition.
        actions: what the rule asks for; with Stop filled in where the run must end.
        history: the metric's last (step, value), oldest first, this one last.
    """

    step: int
    rule: str
    condition: str
    metric: str
    value: float
    reading: float
    threshold: float
    actions: tuple[Action, ...]
    history: tuple[tuple[int, float], ...]

    @property
    def message(self) -> str:
        """Return one sentence on what was seen and one on what is done."""
        earlier = ", ".join(
            f"{value:.4g}" for _, value in self.history[:-1][-_MESSAGE_OBSERVATIONS:]
        )
        seen = f"{self.metric} is {self.value:.4g}"
        if math.isfinite(self.value) and self.reading != self.value:
            seen += f", the reading {self.reading:.4g}"
        if earlier:
            seen += f"; before: {earlier}"
        done = "; ".join(action.describe() for action in self.actions)
        return f"Guard {self.rule} at step {self.step}: {self.condition} ({seen}). Action: {done}."

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-plain fields; a number that is not finite becomes its text."""
        return {
            "step": self.step,
            "rule": self.rule,
            "condition": self.condition,
            "metric": self.metric,
            "value": _plain(self.value),
            "reading": _plain(self.reading),
            "threshold": self.threshold,
            "actions": [action.to_dict() for action in self.actions],
            "history": [[step, _plain(value)] for step, value in self.history],
            "message": self.message,
        }


def merged_actions(firings: Sequence[Firing]) -> tuple[Action, ...]:
    """Return what all firings of one observation ask for, as `merge_actions` orders it."""
    return merge_actions([action for firing in firings for action in firing.actions])


@dataclass
class _Watch:
    """What the engine remembers for one rule; only finite values enter it."""

    streak: int = 0
    cooldown_left_steps: int = 0
    holds: bool = False
    first: float | None = None
    best: float | None = None
    window: list[float] = field(default_factory=list)

    def read(self, condition: Condition, value: float) -> float | None:
        """Take the value in and return the reading; None = too few observations."""
        first = self.first = value if self.first is None else self.first
        best = self.best = value if self.best is None else max(self.best, value)
        match condition.reading:
            case "value":
                return value
            case "drop_from_best":
                return best - value
            case "drop_from_start":
                return first - value
            case "rise_from_start":
                return _relative(value - first, first)
            case "jump":
                return self._jump(condition.window, value)

    def _jump(self, window: int, value: float) -> float | None:
        before, self.window = self.window, [*self.window, value][-window:]
        if len(before) < window:
            return None
        # Divided first, so that no sum of large values overflows.
        mean = math.fsum(earlier / window for earlier in before)
        return abs(_relative(value - mean, mean))

    def restart(self) -> None:
        """Forget what the weights that are gone had begun; best and start stay."""
        self.streak, self.holds, self.window = 0, False, []

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "window": list(self.window)}


class GuardEngine:
    """Evaluate rules on every observation of a run."""

    def __init__(self, rules: Sequence[Rule], *, max_rollbacks: int) -> None:
        """Start with nothing seen.

        Args:
            rules: names are unique; their order decides nothing but the order of firings.
            max_rollbacks: rollbacks of the whole run, at least 0; the next one stops it.

        Raises:
            ConfigError: a name that occurs twice, or a negative limit.
        """
        names = [rule.name for rule in rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"several rules are named {', '.join(twice)}", "unique names")
        require(max_rollbacks >= 0, f"max_rollbacks is {max_rollbacks}", "at least 0")
        self.rules = tuple(rules)
        self.max_rollbacks = max_rollbacks
        self._watches = {name: _Watch() for name in names}
        self._histories: dict[str, list[tuple[int, float]]] = {}
        self._last_step: int | None = None
        self._n_rollbacks = 0
        self._condemned = False

    @property
    def n_rollbacks(self) -> int:
        """Return how many rollbacks were asked for, without one that ended the run."""
        return self._n_rollbacks

    @property
    def passing(self) -> bool:
        """Return whether the policy is beyond doubt, so that a checkpoint may be called good.

        False while a condition of a rule that rolls back or stops was true when it was last
        evaluated, although the rule may still wait for more observations or cool down; and from
        the observation that asks for a rollback or a stop until the next one, because it is about
        the weights that are to go.
        """
        holding = (self._watches[rule.name].holds for rule in self.rules if rule.doubts_policy)
        return not (self._condemned or any(holding))

    @property
    def unobserved_metrics(self) -> tuple[str, ...]:
        """Return metrics that rules watch and no observation held, sorted: rules that sleep."""
        watched = {rule.condition.metric for rule in self.rules}
        return tuple(sorted(watched - set(self._histories)))

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """Evaluate the rules whose metric is present, and return those that fire.

        A rule whose metric is absent keeps its streak. A metric that is not finite fires every
        rule that watches it, at once and in spite of a cool-down, and enters no best, start or
        window. When a rollback is among the actions, the streaks and windows of all rules restart
        (best, start and cool-downs stay); when it would be one too many, the firing ends with
        Stop, and the rollback before it leads to the best checkpoint (or the start, if asked).

        Args:
            step: optimizer steps done. Several observations may share a step; a step below the
                last one means that the loop went back, and counts as one step of cool-down.
            metrics: by name, any number of them.

        Returns:
            firings in the order of the rules; `merged_actions` gives what to do.
        """
        self._advance(step)
        for metric in {rule.condition.metric for rule in self.rules} & set(metrics):
            history = self._histories.setdefault(metric, [])
            history.append((step, float(metrics[metric])))
            del history[:-HISTORY_OBSERVATIONS]
        present = [rule for rule in self.rules if rule.condition.metric in metrics]
        firings = [self._evaluate(step, rule) for rule in present]
        limited = self._limit_rollbacks([firing for firing in firings if firing is not None])
        self._condemned = any(isinstance(a, Rollback | Stop) for f in limited for a in f.actions)
        return limited

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-plain state from which `load_state_dict` goes on exactly."""
        return {
            "readings": {rule.name: rule.condition.read_as for rule in self.rules},
            "watches": {name: watch.to_dict() for name, watch in self._watches.items()},
            "histories": {
                metric: [[step, _plain(value)] for step, value in history]
                for metric, history in self._histories.items()
            },
            "last_step": self._last_step,
            "n_rollbacks": self._n_rollbacks,
            "condemned": self._condemned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. Thresholds and actions may differ, readings may not.

        Raises:
            DataError: a state of other rules, or a torn one. The engine is then left as it was.
        """
        own = self.state_dict()
        if set(state) != set(own) or state["readings"] != own["readings"]:
            raise DataError(
                f"a guard state of {state.get('readings')}",
                f"the rules and readings {own['readings']}",
                "resume with the rules of the first run, or start anew",
            )
        try:
            watches = {name: _watch_of(state["watches"][name]) for name in self._watches}
            histories = {
                metric: [(int(step), float(value)) for step, value in history]
                for metric, history in state["histories"].items()
            }
            n_rollbacks, condemned = int(state["n_rollbacks"]), bool(state["condemned"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"a torn guard state ({type(error).__name__}: {error})",
                "what state_dict returned",
                "start from an earlier checkpoint",
            ) from error
        self._watches, self._histories = watches, histories
        self._last_step, self._n_rollbacks = state["last_step"], n_rollbacks
        self._condemned = condemned

    def _advance(self, step: int) -> None:
        if self._last_step is not None and step != self._last_step:
            passed = step - self._last_step if step > self._last_step else 1
            for watch in self._watches.values():
                watch.cooldown_left_steps = max(0, watch.cooldown_left_steps - passed)
        self._last_step = step

    def _evaluate(self, step: int, rule: Rule) -> Firing | None:
        watch, condition = self._watches[rule.name], rule.condition
        value = self._histories[condition.metric][-1][1]
        reading = watch.read(condition, value) if math.isfinite(value) else math.nan
        if reading is None:
            return None
        watch.holds = condition.holds(reading)
        at_once = math.isnan(reading)
        if watch.cooldown_left_steps and not at_once:
            return None
        watch.streak = watch.streak + 1 if watch.holds else 0
        if watch.streak < rule.for_observations and not at_once:
            return None
        watch.streak, watch.cooldown_left_steps = 0, rule.cooldown_steps
        reason = f"{rule.name}: {condition}, {condition.metric} is {value:.4g}"
        return Firing(
            step=step,
            rule=rule.name,
            condition=str(condition),
            metric=condition.metric,
            value=value,
            reading=reading,
            threshold=condition.threshold,
            actions=tuple(Stop(reason) if isinstance(a, Stop) else a for a in rule.actions),
            history=tuple(self._histories[condition.metric]),
        )

    def _limit_rollbacks(self, firings: list[Firing]) -> list[Firing]:
        wanted = [action for firing in firings for action in firing.actions]
        if not any(isinstance(action, Rollback) for action in wanted):
            return firings
        for watch in self._watches.values():
            watch.restart()
        if any(isinstance(action, Stop) for action in wanted):
            return firings
        if self._n_rollbacks < self.max_rollbacks:
            self._n_rollbacks += 1
            return firings
        return [self._last_of_run(firing) for firing in firings]

    def _last_of_run(self, firing: Firing) -> Firing:
        targets = {action.to for action in firing.actions if isinstance(action, Rollback)}
        if not targets:
            return firing
        stop = Stop(f"{firing.rule} asks for a rollback after {self.max_rollbacks} of them")
        final = Rollback("start" if "start" in targets else "best")
        return replace(firing, actions=(final, stop))


@dataclass(frozen=True)
class MemorySettings:
    """What an out-of-memory error can change.

    Attributes:
        tokens_per_micro_batch: tokens of one micro-batch per rank, padding included.
        gradient_checkpointing: whether activations are recomputed.
    """

    tokens_per_micro_batch: int
    gradient_checkpointing: bool


@dataclass(frozen=True)
class OomLadder:
    """Choose what to change after each out-of-memory error: smaller micro-batches down to the
    minimum, then gradient checkpointing, then nothing more.

    Attributes:
        minimum_tokens: what the longest row needs, at least 1.
        factor: of the token budget at each step down, above 0 and below 1.
    """

    minimum_tokens: int
    factor: float = 0.5

    def __post_init__(self) -> None:
        LowerTokenBudget(self.factor, self.minimum_tokens)

    def on_oom(self, settings: MemorySettings) -> LowerTokenBudget | EnableGradientCheckpointing:
        """Return the next action.

        Args:
            settings: with which memory ran out.

        Raises:
            TrainingError: nothing is left to change.
        """
        if settings.tokens_per_micro_batch > self.minimum_tokens:
            return LowerTokenBudget(self.factor, self.minimum_tokens)
        if not settings.gradient_checkpointing:
            return EnableGradientCheckpointing()
        raise TrainingError(
            f"memory ran out with {settings.tokens_per_micro_batch} tokens per micro-batch and "
            "gradient checkpointing",
            f"room for one row of {self.minimum_tokens} tokens",
            "lower rendering.max_prompt_tokens or max_response_tokens, set runtime.offload, use "
            "more ranks or a smaller model",
        )

    def after(
        self, settings: MemorySettings, action: LowerTokenBudget | EnableGradientCheckpointing
    ) -> MemorySettings:
        """Return the settings with the action carried out."""
        if isinstance(action, EnableGradientCheckpointing):
            return replace(settings, gradient_checkpointing=True)
        return replace(
            settings, tokens_per_micro_batch=action.apply(settings.tokens_per_micro_batch)
        )


def _relative(change: float, base: float) -> float:
    """Return change / |base|, infinite where only the base is 0."""
    if base == 0.0:
        return 0.0 if change == 0.0 else math.copysign(math.inf, change)
    return change / abs(base)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _watch_of(state: Mapping[str, Any]) -> _Watch:
    if set(state) != set(vars(_Watch())):
        raise ValueError(f"fields {sorted(state)}")
    return _Watch(**{**state, "window": [float(value) for value in state["window"]]})
