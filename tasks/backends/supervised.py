"""The loop of the stages that fit fixed rows: behaviour cloning, reward model, distillation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.algorithms.samplers import GroupSampler
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.roles import Batch
from tasks.backends.session import Session
from tasks.config import CheckpointConfig
from tasks.context import RunLog
from tasks.data.run_history import RunHistory

LOG_EVERY_STEPS = 5


def count_steps(n_units: int, batch_units: int, epochs: float, max_steps: int | None) -> int:
    """Return how many optimizer steps ``epochs`` passes over ``n_units`` take, at most
    ``max_steps``."""
    steps = max(1, math.ceil(n_units * epochs / batch_units))
    return steps if max_steps is None else min(steps, max_steps)


@dataclass(frozen=True)
class SupervisedRun:
    """What one loop needs.

    Args:
        session: holds the role.
        role: the role that is trained; its loss is set.
        steps: optimizer steps in all.
        batch_units: units (pairs, rows) of one step.
        make_batch: builds a batch of these units.
        store: checkpoints.
        log: where to report.
        after_step: called with the step number after each step; may evaluate; True ends training.
        prefix: of the metrics' names, to tell several loops of one run apart.
        history: keeps the metrics that are logged, for plots.
    """

    session: Session
    role: str
    steps: int
    batch_units: int
    make_batch: Callable[[Sequence[int]], Batch]
    store: CheckpointStore
    log: RunLog
    after_step: Callable[[int], bool] = lambda step: False
    prefix: str = ""
    history: RunHistory | None = None


def train_supervised(
    run: SupervisedRun, sampler: GroupSampler, checkpoint: CheckpointConfig
) -> None:
    """Train to the last step, from the newest checkpoint if there is one.

    Raises:
        TrainingError: a loss or gradient that is not finite, naming the step.
    """
    done = resume(run, sampler)
    tokens, since = 0, time.monotonic()
    for step in range(done + 1, run.steps + 1):
        batch = run.make_batch(sampler.next_batch(run.batch_units))
        metrics = run.session.train_step(run.role, batch)
        tokens += sum(map(len, batch.rows))
        if step % LOG_EVERY_STEPS == 0 or step == run.steps:
            rate = tokens / max(time.monotonic() - since, 1e-9)
            readable = per_unit(metrics) | {"tokens_per_second": rate}
            head = f"{run.prefix}/" if run.prefix else ""
            run.log.metrics({head + name: value for name, value in readable.items()}, step)
            if run.history is not None:
                run.history.append(step, readable)
            tokens, since = 0, time.monotonic()
        is_done = run.after_step(step)
        what = f"{run.prefix} " if run.prefix else ""
        run.log.progress(step, run.steps, f"{what}loss {metrics['loss']:.3f}")
        if is_done:
            run.log.event("stopped_early", f"{what}after step {step} of {run.steps}")
            return
        if step % checkpoint.save_every_steps == 0 and step < run.steps:
            run.store.save(step, run.session, [run.role], {"sampler": sampler.state_dict()})


def resume(run: SupervisedRun, sampler: GroupSampler) -> int:
    """Restore the newest checkpoint, if any, and return its step."""
    step = run.store.latest_step()
    if step:
        state = run.store.restore(step, run.session, [run.role])
        sampler.load_state_dict(state["sampler"])
        run.log.event("resumed", f"continuing from step {step} of {run.steps}")
    return step


def per_unit(metrics: dict[str, float]) -> dict[str, float]:
    """Divide summed metrics by their counts: ``x_sum`` becomes ``x``, per pair, sequence or
    token."""
    count = metrics.get("n_pairs") or metrics.get("n_tokens")
    readable = {name: value for name, value in metrics.items() if not name.endswith("_sum")}
    if count:
        sums = {name: value for name, value in metrics.items() if name.endswith("_sum")}
        readable |= {name.removesuffix("_sum"): value / count for name, value in sums.items()}
    return {name: value for name, value in readable.items() if not name.startswith("n_")}
