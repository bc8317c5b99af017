"""What a guard may ask the training loop to do, and how several wishes become one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args

from tasks.errors import ConfigError

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
