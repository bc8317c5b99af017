"""A rule engine over training metrics that says when to go back, slow down or stop.

The engine keeps what it has seen in step with the run, not with the weights: after a rollback it
remembers the cool-downs, the best values and the number of rollbacks, because an engine that
forgot them together with the weights would fire for ever. Its state belongs into every checkpoint
for resuming a run, and is left alone when a rollback restores one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tasks.algorithms.guard_actions import (
    Action,
    EnableGradientCheckpointing,
    LowerTokenBudget,
    Rollback,
    Stop,
    merge_actions,
    require,
)
from tasks.algorithms.guard_rules import Condition, Rule
from tasks.errors import DataError, TrainingError

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
