"""The loop of the stages that fit fixed rows: behaviour cloning, reward model, distillation."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.algorithms.samplers import GroupSampler
from tasks.config.shared import CheckpointConfig
from tasks.context import RunLog
from tasks.data.history import RunHistory
from tasks.errors import ArtifactError, MemoryLimitError, WorkerLostError
from tasks.runtime.rows import Batch
from tasks.runtime.session import Session

# Training state on disk, so that a killed run continues where its last complete checkpoint
# stands.

_PREFIX = "step-"
_STATE_FILE = "trainer.pt"
_POINTERS_FILE = "pointers.json"


@dataclass(frozen=True)
class CheckpointStore:
    """Complete checkpoints of one training run, ``step-00000050/`` and so on.

    Args:
        directory: holds checkpoints of exactly one stage fingerprint.
        keep: how many stay.
    """

    directory: Path
    keep: int

    def latest_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 when there is none."""
        return max(self._steps(), default=0)

    @property
    def is_empty(self) -> bool:
        """Whether there is no complete checkpoint, not even one of step 0."""
        return not self._steps()

    def save(
        self,
        step: int,
        session: Session,
        roles: Sequence[str],
        state: dict[str, Any],
        pointers: Mapping[str, int] | None = None,
    ) -> None:
        """Write a checkpoint; it gets its name only when complete.

        Args:
            step: optimizer steps done.
            session: holds the roles.
            roles: roles whose weights, optimizer, schedule and random state are kept.
            state: tensors and plain values of the driver: sampler, window, best step.
            pointers: steps of checkpoints that stay, by what they are ("best"); written to
                ``pointers.json`` together with the newest one.
        """
        final = self.directory / f"{_PREFIX}{step:08d}"
        temporary = self.directory / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            for role in roles:
                session.save(role, temporary / role)
            with (temporary / _STATE_FILE).open("wb") as handle:
                torch.save(state, handle)
                handle.flush()
                os.fsync(handle.fileno())
        except BaseException:
            # On a full disk it would hold the space that everything else lacks.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        self._point({**(pointers or {}), "last": step})

    def restore(self, step: int, session: Session, roles: Sequence[str]) -> dict[str, Any]:
        """Load the checkpoint of a step into the roles and return the driver's state.

        Raises:
            ArtifactError: the checkpoint cannot be read.
        """
        directory = self.directory / f"{_PREFIX}{step:08d}"
        try:
            state: dict[str, Any] = torch.load(directory / _STATE_FILE, weights_only=True)
            for role in roles:
                session.restore(role, directory / role)
        except (WorkerLostError, MemoryLimitError):
            raise
        # A torn file raises whatever its bytes lead torch to, here or in a worker.
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[-1]
            raise ArtifactError(
                f"Checkpoint {directory} cannot be read: {reason}",
                "a complete checkpoint",
                f"remove {directory} to continue from the one before it",
            ) from error
        return state

    def _steps(self) -> list[int]:
        found = self.directory.glob(f"{_PREFIX}*")
        return sorted(int(path.name.removeprefix(_PREFIX)) for path in found if path.is_dir())

    def _point(self, pointers: Mapping[str, int]) -> None:
        """Write the pointers, then remove what none of them needs."""
        temporary = self.directory / f".tmp-{_POINTERS_FILE}"
        temporary.write_text(json.dumps(dict(pointers), indent=2) + "\n")
        temporary.replace(self.directory / _POINTERS_FILE)
        kept = set(self._steps()[-self.keep :]) | set(pointers.values())
        for step in self._steps():
            if step not in kept:
                shutil.rmtree(self.directory / f"{_PREFIX}{step:08d}")


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
    """Divide summed metrics by their counts: ``x_sum`` becomes ``x``, per pair, else per token.

    Sums with a prefix of their own, such as ``dpo_``, are divided by the count with that prefix.
    """
    counts: dict[str, float] = {}
    for unit in ("n_tokens", "n_pairs"):
        counts |= {name.removesuffix(unit): n for name, n in metrics.items() if name.endswith(unit)}
    readable: dict[str, float] = {}
    for name, value in metrics.items():
        prefix = max((p for p in counts if name.startswith(p)), key=len, default="")
        if name.removeprefix(prefix).startswith("n_"):
            continue
        if not name.endswith("_sum"):
            readable[name] = value
        elif counts.get(prefix):
            readable[name.removesuffix("_sum")] = value / counts[prefix]
    return readable
