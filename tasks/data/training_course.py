"""How a training run went: its metrics by step, what guards did, and the weights at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tasks.algorithms.importance import effective_sample_size
from tasks.errors import DataError


@dataclass(frozen=True)
class GuardEvent:
    """One firing of a guard.

    Args:
        step: optimizer steps done.
        rule: name of the rule.
        message: what was seen and what was done.
        history: the metric's last ``(step, value)`` pairs before it.
    """

    step: int
    rule: str
    message: str = ""
    history: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> GuardEvent:
        """Read a plain record with the keys ``step``, ``rule``, ``message`` and ``history``.

        Values of the history without a step are numbered up to the event's step.

        Raises:
            DataError: a record that is none.
        """
        try:
            step = int(record["step"])
            values = list(record.get("history", ()))
            first = step - len(values) + 1
            history = tuple(
                (int(value[0]), float(value[1]))
                if isinstance(value, list | tuple)
                else (first + place, float(value))
                for place, value in enumerate(values)
            )
            return cls(step, str(record["rule"]), str(record.get("message", "")), history)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"A guard event is {dict(record)!r}: {error!r}",
                "step, rule, message and a history of numbers or (step, value) pairs",
                "record the event with these keys",
            ) from error


@dataclass(frozen=True)
class MetricNames:
    """Which metric of the history is what; one that is missing is not drawn."""

    reward: str = "reward_mean"
    probe_reward: str = "probe_reward"
    kl_probe: str = "kl_probe"
    kl_data: str = "kl_data"
    ess: str = "ess_share"
    ess_raw: str = "ess_share_raw"
    chosen_drift: str = "chosen_logprob_drift"
    rejected_drift: str = "rejected_logprob_drift"
    learning_rate: str = "learning_rate"
    batch: str = "batch_prompts"


@dataclass(frozen=True)
class TrainingCourse:
    """How training went.

    Args:
        history: metrics by step.
        events: firings of the guards, in order.
        final_weights: (N,) importance weights of the last steps; None where there are none.
        bounds: metric name to the value at which a guard acts.
    """

    history: Sequence[tuple[int, Mapping[str, float]]]
    events: Sequence[GuardEvent] = ()
    final_weights: Tensor | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    names: MetricNames = field(default_factory=MetricNames)

    @property
    def kl_bound(self) -> float | None:
        """Where the guard of the probe KL acts."""
        return self.bounds.get(self.names.kl_probe)

    @property
    def last_step(self) -> int:
        """The last step that has metrics."""
        return self.history[-1][0] if self.history else 0

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and finite values of a metric."""
        points = [(step, metrics[name]) for step, metrics in self.history if name in metrics]
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]


@dataclass(frozen=True)
class MetricSummary:
    """One metric over the run.

    Args:
        n: finite values.
        n_not_finite: values left out of the rest.
    """

    n: int
    n_not_finite: int
    first: float
    last: float
    minimum: float
    minimum_step: int
    maximum: float
    maximum_step: int


@dataclass(frozen=True)
class WeightSummary:
    """The importance weights at the end.

    Args:
        ess_share: effective sample size over n.
        at_maximum_share: weights within a thousandth of the largest.
    """

    n: int
    mean: float
    maximum: float
    ess_share: float
    at_maximum_share: float


def guards_fired(events: Sequence[GuardEvent]) -> dict[str, int]:
    """Return how often each rule fired, the most frequent first."""
    return dict(Counter(event.rule for event in events).most_common())


def event_record(event: GuardEvent) -> dict[str, Any]:
    """Return a firing as JSON can hold it."""
    kept = [[step, value if math.isfinite(value) else str(value)] for step, value in event.history]
    return {"step": event.step, "rule": event.rule, "message": event.message, "history": kept}


def summarize_metrics(course: TrainingCourse) -> dict[str, MetricSummary]:
    """Return a summary of every metric that has a finite value, by name."""
    counts = Counter(name for _, metrics in course.history for name in metrics)
    found = {}
    for name in sorted(counts):
        steps, values = course.curve(name)
        if values:
            low, high = min(values), max(values)
            found[name] = MetricSummary(
                n=len(values),
                n_not_finite=counts[name] - len(values),
                first=values[0],
                last=values[-1],
                minimum=low,
                minimum_step=steps[values.index(low)],
                maximum=high,
                maximum_step=steps[values.index(high)],
            )
    return found


def summarize_weights(weights: Tensor | None) -> WeightSummary | None:
    """Return figures of (N,) weights; None where there are none.

    Raises:
        TrainingError: a weight that is not finite.
    """
    if weights is None or weights.numel() == 0:
        return None
    values = weights.detach().cpu().double()
    share = float(effective_sample_size(values)) / len(values)
    top = float(values.max())
    return WeightSummary(
        n=len(values),
        mean=float(values.mean()),
        maximum=top,
        ess_share=share,
        at_maximum_share=float((values >= top * (1 - 1e-3)).double().mean()),
    )
