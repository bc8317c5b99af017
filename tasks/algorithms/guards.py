"""Guards: rules over training metrics that say when to go back, slow down or stop.

The engine keeps what it has seen in step with the run, not with the weights: after a rollback it
remembers the cool-downs, the best values and the number of rollbacks, because an engine that
forgot them together with the weights would fire for ever. Its state belongs into every checkpoint
for resuming a run, and is left alone when a rollback restores one.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from tasks.errors import ConfigError, DataError, TrainingError

HISTORY_OBSERVATIONS: Final = 20
MAX_WINDOW: Final = 1000
GRAMMAR: Final = (
    "'READING COMPARISON NUMBER': a reading is metric, drop_from_best(metric), "
    "drop_from_start(metric), rise_from_start(metric) or jump(metric, window); a comparison is "
    "one of > >= < <="
)
_COMPARE: Final = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_WHEN: Final = re.compile(
    r"""\s*
    (?: (?P<reading> drop_from_best | drop_from_start | rise_from_start | jump ) \s* \( \s* )?
    (?P<metric> [A-Za-z_][A-Za-z0-9_./]* ) \s*
    (?(reading) (?: , \s* (?P<window> [0-9]+ ) \s* )? \) ) \s*
    (?P<comparison> [<>]=? ) \s*
    (?P<threshold> -? (?: [0-9]+ \.? [0-9]* | \.[0-9]+ ) (?: [eE][+-]?[0-9]+ )? ) \s*""",
    re.VERBOSE,
)


class Condition(NamedTuple):
    """A bound on how a metric is read.

    With ``x`` the value now, every reading from the observations that hold the metric:

    - value: ``x``
    - drop_from_best: ``max(x_1..x) - x``, for metrics where more is better
    - drop_from_start: ``x_1 - x``
    - rise_from_start: ``(x - x_1) / |x_1|``; +-infinity when ``x_1`` is 0 and ``x`` is not
    - jump: ``|x - m| / |m|`` with m the mean of the ``window`` observations before; none before
      there are that many; infinity when m is 0 and ``x`` is not
    """

    metric: str
    comparison: str
    threshold: float
    reading: str = "value"
    window: int = 0

    @property
    def read_as(self) -> str:
        """Return the text form of the left side, e.g. ``jump(entropy, 8)``."""
        window = f", {self.window}" if self.window else ""
        return self.metric if self.reading == "value" else f"{self.reading}({self.metric}{window})"

    def __str__(self) -> str:
        return f"{self.read_as} {self.comparison} {self.threshold!r}"


def parse_condition(text: str, *, rule: str) -> Condition:
    """Parse ``kl_probe > 0.1`` or ``jump(entropy, 8) > 0.5``.

    Raises:
        ConfigError: naming the rule, the text and what is allowed.
    """
    match = _WHEN.fullmatch(text)
    if match is not None:
        metric, reading = match["metric"], match["reading"] or "value"
        window, threshold = float(match["window"] or 0), float(match["threshold"])
        fits = 1 <= window <= MAX_WINDOW if reading == "jump" else match["window"] is None
        if fits and math.isfinite(threshold):
            return Condition(metric, match["comparison"], threshold, reading, int(window))
    raise ConfigError(
        f"rule {rule!r} has when {text!r}",
        f"{GRAMMAR}; a window has 1 to {MAX_WINDOW} observations; a number is finite",
        "write a condition like kl_probe > 0.1",
    )


RollbackTarget = Literal["start", "best", "good"]
# From the most to the least trusted, once the judge of the others is in doubt.
_TARGETS: Final[dict[RollbackTarget, str]] = {
    "start": "the start",
    "best": "the best checkpoint",
    "good": "the last good checkpoint",
}


@dataclass(frozen=True)
class Actions:
    """What is asked of the training loop, in the order in which it is done: a rollback restores the
    optimizer, so it comes before the scale of the learning rate. A scale of 1 asks for nothing.

    Attributes:
        rollback: whose weights and optimizers are restored. good = the newest checkpoint whose
            probe passed; best = the one with the best probe; start = the policy that training
            began with, the only one that a reward under suspicion had no say in.
        learning_rate_scale: above 0, below 1.
        min_learning_rate_share: lowest share of the configured rate that is left.
        batch_scale: of the prompts of a step, above 1.
        max_batch_prompts: prompts that a step grows to at most.
        token_budget_scale: of tokens_per_micro_batch, above 0, below 1.
        min_tokens_per_micro_batch: tokens that are left at least.
        gradient_checkpointing: recompute activations instead of keeping them.
        reanchor: take a new snapshot of the current policy as the proximal one.
        reset_sampler: draw the data in a new order from here on.
        warn: report only.
        stop: end the run.
        reason: of the stop; filled in when a rule fires.
    """

    rollback: RollbackTarget | None = None
    learning_rate_scale: float = 1.0
    min_learning_rate_share: float = 0.0
    batch_scale: float = 1.0
    max_batch_prompts: int = sys.maxsize
    token_budget_scale: float = 1.0
    min_tokens_per_micro_batch: int = 1
    gradient_checkpointing: bool = False
    reanchor: bool = False
    reset_sampler: bool = False
    warn: bool = False
    stop: bool = False
    reason: str = ""

    @property
    def doubt_policy(self) -> bool:
        """Whether the weights of now are to go."""
        return self.stop or self.rollback is not None

    @property
    def change_run(self) -> bool:
        """Whether there is more to do than to report."""
        return self != Actions(warn=self.warn)

    @property
    def change_memory(self) -> bool:
        """Whether the workers have to be built anew."""
        return self.gradient_checkpointing or self.token_budget_scale != 1.0

    def lr_scale(self, share: float) -> float:
        """Return the new share of the configured learning rate; never above the present one."""
        return min(share, max(share * self.learning_rate_scale, self.min_learning_rate_share))

    def batch_prompts(self, prompts: int) -> int:
        """Return the new number of prompts; never below the present one."""
        return max(prompts, min(int(prompts * self.batch_scale), self.max_batch_prompts))

    def token_budget(self, tokens: int) -> int:
        """Return the new tokens of a micro-batch; never above the present ones."""
        scaled = int(tokens * self.token_budget_scale)
        return min(tokens, max(scaled, self.min_tokens_per_micro_batch))

    def __str__(self) -> str:
        texts = [
            (self.rollback, f"roll back to {_TARGETS[self.rollback or 'good']}"),
            (
                self.learning_rate_scale != 1.0,
                f"multiply the learning rate by {self.learning_rate_scale:g}, not below "
                f"{self.min_learning_rate_share:g} of the configured one",
            ),
            (
                self.batch_scale != 1.0,
                f"multiply the batch by {self.batch_scale:g}, up to {self.max_batch_prompts} "
                "prompts",
            ),
            (
                self.token_budget_scale != 1.0,
                f"multiply tokens per micro-batch by {self.token_budget_scale:g}, not below "
                f"{self.min_tokens_per_micro_batch} tokens",
            ),
            (self.gradient_checkpointing, "enable gradient checkpointing"),
            (self.reanchor, "reanchor"),
            (self.reset_sampler, "reset sampler"),
            (self.warn, "warn"),
            (self.stop, f"stop ({self.reason})" if self.reason else "stop"),
        ]
        return "; ".join(text for is_asked, text in texts if is_asked)


def merge_actions(asked: Sequence[Actions]) -> Actions:
    """Merge what several rules ask for, whatever their order.

    - rollback: to start wins over best, best over good
    - learning rate: scales multiply, the highest minimum holds
    - batch: the largest scale, the smallest maximum
    - token budget: the smallest scale, the highest minimum
    - a stop wins over everything but a rollback, which then says with which weights the run ends;
      reasons are joined
    """
    asked = [Actions(), *asked]
    targets = [each.rollback for each in asked]
    rollback = next((target for target in _TARGETS if target in targets), None)
    if any(each.stop for each in asked):
        reasons = sorted({each.reason for each in asked if each.reason})
        return Actions(rollback, stop=True, reason="; ".join(reasons))
    return Actions(
        rollback,
        # Sorted, because a product of floats depends on its order in the last bit.
        learning_rate_scale=math.prod(sorted(each.learning_rate_scale for each in asked)),
        min_learning_rate_share=max(each.min_learning_rate_share for each in asked),
        batch_scale=max(each.batch_scale for each in asked),
        max_batch_prompts=min(each.max_batch_prompts for each in asked),
        token_budget_scale=min(each.token_budget_scale for each in asked),
        min_tokens_per_micro_batch=max(each.min_tokens_per_micro_batch for each in asked),
        gradient_checkpointing=any(each.gradient_checkpointing for each in asked),
        reanchor=any(each.reanchor for each in asked),
        reset_sampler=any(each.reset_sampler for each in asked),
        warn=any(each.warn for each in asked),
    )


def after_out_of_memory(
    tokens_per_micro_batch: int, gradient_checkpointing: bool, minimum_tokens: int, scale: float
) -> Actions:
    """Return what to change when memory ran out: smaller micro-batches down to the minimum, then
    gradient checkpointing.

    Args:
        tokens_per_micro_batch: with which memory ran out.
        gradient_checkpointing: whether it was on.
        minimum_tokens: what the longest row needs.
        scale: of the token budget at each step down, above 0 and below 1.

    Raises:
        TrainingError: nothing is left to change.
    """
    if tokens_per_micro_batch > minimum_tokens:
        return Actions(token_budget_scale=scale, min_tokens_per_micro_batch=minimum_tokens)
    if not gradient_checkpointing:
        return Actions(gradient_checkpointing=True)
    raise TrainingError(
        f"memory ran out with {tokens_per_micro_batch} tokens per micro-batch and gradient "
        "checkpointing",
        f"room for one row of {minimum_tokens} tokens",
        "lower rendering.max_prompt_tokens or max_response_tokens, set runtime.offload, use "
        "more ranks or a smaller model",
    )


class Rule(NamedTuple):
    """When to do what.

    Attributes:
        name: unique among the rules of a run.
        condition: what is out of bounds.
        actions: what is then done.
        cooldown_steps: after a firing at step s, the rule is silent before step
            ``s + cooldown_steps``; a value that is not finite ignores this.
        for_observations: consecutive observations out of bounds before it fires, at least 1; a
            value that is not finite fires at once.
    """

    name: str
    condition: Condition
    actions: Actions
    cooldown_steps: int = 0
    for_observations: int = 1


@dataclass(frozen=True)
class Firing:
    """One rule that fired.

    Attributes:
        step: optimizer steps done.
        rule: its name.
        condition: of the rule.
        value: of the metric.
        reading: what was compared with the threshold; NaN where ``value`` is not finite.
        actions: what the rule asks for, with the reason where the run must end.
        history: the metric's last (step, value), oldest first, this one last.
    """

    step: int
    rule: str
    condition: Condition
    value: float
    reading: float
    actions: Actions
    history: tuple[tuple[int, float], ...]

    @property
    def message(self) -> str:
        """Return one sentence on what was seen and one on what is done."""
        earlier = ", ".join(f"{value:.4g}" for _, value in self.history[-5:-1])
        seen = f"{self.condition.metric} is {self.value:.4g}"
        if math.isfinite(self.value) and self.reading != self.value:
            seen += f", the reading {self.reading:.4g}"
        if earlier:
            seen += f"; before: {earlier}"
        return (
            f"Guard {self.rule} at step {self.step}: {self.condition} ({seen}). Action: "
            f"{self.actions}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-plain fields for the report; a number that is not finite becomes its text."""
        return {
            "step": self.step,
            "rule": self.rule,
            "message": self.message,
            "history": _plain_history(self.history),
        }


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
            case "drop_from_best":
                return best - value
            case "drop_from_start":
                return first - value
            case "rise_from_start":
                return _relative(value - first, first)
            case "jump":
                before, self.window = self.window, [*self.window, value][-condition.window :]
                if len(before) < condition.window:
                    return None
                # Divided first, so that no sum of large values overflows.
                mean = math.fsum(earlier / condition.window for earlier in before)
                return abs(_relative(value - mean, mean))
        return value


def _relative(change: float, base: float) -> float:
    """Return change / |base|, infinite where only the base is 0."""
    if base == 0.0:
        return 0.0 if change == 0.0 else math.copysign(math.inf, change)
    return change / abs(base)


class GuardEngine:
    """Evaluates rules on every observation of a run.

    Args:
        rules: names are unique; their order decides nothing but the order of firings.
        max_rollbacks: rollbacks of the whole run; the next one stops it.
    """

    def __init__(self, rules: Sequence[Rule], *, max_rollbacks: int) -> None:
        self.rules = tuple(rules)
        self.max_rollbacks = max_rollbacks
        # Rollbacks that were asked for, without one that ended the run.
        self.n_rollbacks = 0
        self._watches = {rule.name: _Watch() for rule in rules}
        self._histories: dict[str, list[tuple[int, float]]] = {}
        self._last_step: int | None = None
        self._condemned = False

    @property
    def passing(self) -> bool:
        """Return whether the policy is beyond doubt, so that a checkpoint may be called good.

        False while a condition of a rule that rolls back or stops was true when it was last
        evaluated, although the rule may still wait for more observations or cool down; and from
        the observation that asks for a rollback or a stop until the next one, because it is about
        the weights that are to go.
        """
        doubts = (self._watches[r.name].holds for r in self.rules if r.actions.doubt_policy)
        return not (self._condemned or any(doubts))

    @property
    def unobserved_metrics(self) -> tuple[str, ...]:
        """Return metrics that rules watch and no observation held, sorted."""
        watched = {rule.condition.metric for rule in self.rules}
        return tuple(sorted(watched - set(self._histories)))

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """Evaluate the rules whose metric is present, and return those that fire.

        A rule whose metric is absent keeps its streak. A metric that is not finite fires every
        rule that watches it, at once and in spite of a cool-down, and enters no best, start or
        window. When a rollback is among the actions, the streaks and windows of all rules restart
        (best, start and cool-downs stay); when it would be one too many, the firing ends with
        a stop, and the rollback before it leads to the best checkpoint (or the start, if asked).

        Args:
            step: optimizer steps done. Several observations may share a step; a step below the
                last one means that the loop went back, and counts as one step of cool-down.
            metrics: by name, any number of them.

        Returns:
            firings in the order of the rules; `merge_actions` says what to do about all of them.
        """
        if self._last_step is not None and step != self._last_step:
            for watch in self._watches.values():
                left = watch.cooldown_left_steps - max(1, step - self._last_step)
                watch.cooldown_left_steps = max(0, left)
        self._last_step = step
        present = [rule for rule in self.rules if rule.condition.metric in metrics]
        for metric in {rule.condition.metric: None for rule in present}:
            history = self._histories.setdefault(metric, [])
            history.append((step, float(metrics[metric])))
            del history[:-HISTORY_OBSERVATIONS]
        firings = [firing for rule in present if (firing := self._evaluate(step, rule))]
        firings = self._limit_rollbacks(firings)
        self._condemned = any(firing.actions.doubt_policy for firing in firings)
        return firings

    def _evaluate(self, step: int, rule: Rule) -> Firing | None:
        watch, condition = self._watches[rule.name], rule.condition
        history = self._histories[condition.metric]
        value = history[-1][1]
        at_once = not math.isfinite(value)
        reading = math.nan if at_once else watch.read(condition, value)
        if reading is None:
            return None
        compare = _COMPARE[condition.comparison]
        watch.holds = at_once or compare(reading, condition.threshold)
        if watch.cooldown_left_steps and not at_once:
            return None
        watch.streak = watch.streak + 1 if watch.holds else 0
        if watch.streak < rule.for_observations and not at_once:
            return None
        watch.streak, watch.cooldown_left_steps = 0, rule.cooldown_steps
        actions = rule.actions
        if actions.stop:
            reason = f"{rule.name}: {condition}, {condition.metric} is {value:.4g}"
            actions = replace(actions, reason=reason)
        return Firing(step, rule.name, condition, value, reading, actions, tuple(history))

    def _limit_rollbacks(self, firings: list[Firing]) -> list[Firing]:
        if not any(firing.actions.rollback for firing in firings):
            return firings
        for watch in self._watches.values():
            # What the weights that are gone had begun.
            watch.streak, watch.holds, watch.window = 0, False, []
        if any(firing.actions.stop for firing in firings):
            return firings
        if self.n_rollbacks < self.max_rollbacks:
            self.n_rollbacks += 1
            return firings
        return [self._last_of_run(f) if f.actions.rollback else f for f in firings]

    def _last_of_run(self, firing: Firing) -> Firing:
        target: RollbackTarget = "start" if firing.actions.rollback == "start" else "best"
        reason = f"{firing.rule} asks for a rollback after {self.max_rollbacks} of them"
        return replace(firing, actions=Actions(target, stop=True, reason=reason))

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-plain state from which `load_state_dict` goes on exactly."""
        return {
            "readings": {rule.name: rule.condition.read_as for rule in self.rules},
            "watches": {name: asdict(watch) for name, watch in self._watches.items()},
            "histories": {m: _plain_history(history) for m, history in self._histories.items()},
            "last_step": self._last_step,
            "n_rollbacks": self.n_rollbacks,
            "condemned": self._condemned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. Thresholds and actions may differ, readings may not; a
        rule may be gone.

        Raises:
            DataError: a state of other rules.
        """
        own = self.state_dict()
        if set(state) != set(own) or not own["readings"].items() <= state["readings"].items():
            raise DataError(
                f"a guard state of {state.get('readings')}",
                f"the rules and readings {own['readings']}",
                "resume with the rules of the first run, or start anew",
            )
        self._watches = {name: _Watch(**state["watches"][name]) for name in self._watches}
        self._histories = {
            metric: [(step, float(value)) for step, value in history]
            for metric, history in state["histories"].items()
        }
        self._last_step, self.n_rollbacks = state["last_step"], state["n_rollbacks"]
        self._condemned = state["condemned"]


def _plain_history(history: Sequence[tuple[int, float]]) -> list[list[Any]]:
    return [[step, value if math.isfinite(value) else str(value)] for step, value in history]
