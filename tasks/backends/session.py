"""The driver's side of the worker group: what the stages call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tasks.backends import cluster, worker_logs
from tasks.backends.logits_hooks import FLAG, LogitsHook
from tasks.backends.roles import Batch, HostSpec, RoleSpec, Row
from tasks.backends.row_batches import (
    before_tokens,
    metrics_of,
    plan_calls,
    reduce_metrics,
    to_tensordict,
)
from tasks.backends.worker_group import end_group, lost_ranks, start_group, watched
from tasks.config import RuntimeConfig
from tasks.context import RunLog
from tasks.errors import ConfigError, TrainingError
from tasks.models.weights import list_weight_files
from tasks.run_log import run_logger

ROWS_PER_CALL = 1024
# Rows of a model that takes a second for a few of them; what is done between calls can be told.
ROWS_PER_CALL_LARGE = 128
_LARGE_BYTES = 256 * 2**20
_LOG = logging.getLogger(__name__)


@dataclass
class Session:
    """Roles of one stage on the worker group.

    Args:
        group: verl's handle of the ranks.
        runtime: how roles are built.
        host: what the group was started with.
        notes: role to why its rows do not share their prompts, which costs time but changes
            nothing; only roles for which `RuntimeConfig` asks for it in vain.
        log: of the stage that uses the session.
    """

    group: Any
    runtime: RuntimeConfig
    host: HostSpec
    notes: dict[str, str] = field(default_factory=dict)
    log: RunLog | None = None
    specs: dict[str, RoleSpec] = field(default_factory=dict)

    def load(self, *specs: RoleSpec) -> None:
        """Build roles inside the running workers."""
        for spec in specs:
            with watched(self.group):
                reason = self.group.load_role(spec, self.runtime)[0]
            self.specs[spec.name] = spec
            self.notes.pop(spec.name, None)
            if reason is not None:
                self._tell_once(spec.name, reason)
                self.notes[spec.name] = reason

    def _tell_once(self, role: str, reason: str) -> None:
        if reason in self.notes.values():
            return
        message = f"role {role} computes each prompt again for each response: {reason}"
        if self.log is None:
            _LOG.warning(message)
        else:
            self.log.event("plain_rows", message)

    def drop(self) -> None:
        """Free all roles; the processes stay for the next stage."""
        self.group.drop_roles()
        self.notes.clear()
        self.specs.clear()

    def rebuild(self, runtime: RuntimeConfig | None = None) -> str:
        """Start the workers anew, where nodes are left for them, with the same roles as loaded from
        their directories: weights, optimizers and losses have to be restored.

        Args:
            runtime: how roles are built from now on; None = as before.

        Returns:
            On how many nodes the ranks run, where these are not as many as wanted; else nothing.

        Raises:
            ClusterError: the nodes that are left cannot hold the ranks.
            WorkerLostError: a rank died again while it was started.
        """
        end_group(self.group)
        self.runtime = runtime or self.runtime
        self.group = start_group(self.host, after_loss=True)
        self.load(*self.specs.values())
        found, wanted = len(self.group.resource_pool.store), self.host.nodes
        return "" if found == wanted else f" on {found} of {wanted} nodes"

    def scale_learning_rate(self, role: str, scale: float) -> None:
        """Train a role at ``scale`` times its configured learning rate from its next step on."""
        with watched(self.group):
            self.group.scale_learning_rate(role, scale)

    def set_loss(self, role: str, loss_fn: Callable[..., Any]) -> None:
        """Set the loss of a role's next steps."""
        with watched(self.group):
            self.group.set_loss(role, loss_fn)

    def train_step(
        self, role: str, batch: Batch, *, update_schedule: bool = True
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch and return its reduced metrics.

        Raises:
            ConfigError: the batch cannot be shared evenly among the ranks, or a group exceeds a
                micro-batch.
            TrainingError: the loss or the gradient is not finite; no step was taken.
            MemoryLimitError: the device's memory does not hold a micro-batch.
            WorkerLostError: a rank or its node died.
        """
        self._check_shape(batch)
        data = to_tensordict(batch, {"role": role, "update_lr_scheduler": update_schedule})
        with watched(self.group):
            metrics = reduce_metrics(metrics_of(self.group.train(data).get()))
        for name in ("loss", "grad_norm"):
            if not torch.isfinite(torch.tensor(metrics[name])):
                raise TrainingError(
                    f"Role {role}: {name} is {metrics[name]}",
                    "a finite number",
                    "lower the learning rate or look at the batch; the last checkpoint is kept",
                )
        return metrics

    def logprobs(
        self, role: str, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return the log-probability of each response token, one tensor of shape (T_i,) per row."""
        outputs = self._infer(role, rows, ("log_probs",), {"temperature": temperature})
        return [
            before_tokens(values, row)
            for values, row in zip(outputs["log_probs"], rows, strict=True)
        ]

    def values(self, role: str, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the value of the state before each response token, one tensor of shape (T_i,) per
        row."""
        outputs = self._infer(role, rows, ("values",), {})
        return [
            before_tokens(values, row) for values, row in zip(outputs["values"], rows, strict=True)
        ]

    def scores(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the score at the last real token of each row, shape (B,), fp32."""
        outputs = self._infer(role, rows, ("values",), {})
        return torch.stack([values[-1].float() for values in outputs["values"]])

    def last_states(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the hidden state that a value model's score is made of, at the last real token of
        each row, shape (B, H)."""
        outputs = self._infer(role, rows, ("last_states",), {"return_last_states": True})
        return torch.stack(outputs["last_states"])

    def read_tokens(
        self,
        role: str,
        rows: Sequence[Row],
        hook: LogitsHook,
        columns: dict[str, list[torch.Tensor]] | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """Return what a hook reads from the logits before each response token.

        Args:
            role: a language model; the hook takes the place of its loss.
            rows: N rows.
            hook: says what is read.
            columns: what it needs to know of each response token, N tensors of shape (T_i,) or
                (T_i, K) each.

        Returns:
            By the hook's names, N tensors of shape (T_i, K), K = 1 for one number a token.
        """
        self.set_loss(role, hook)
        flags = {FLAG: True, "compute_loss": True}
        outputs = self._infer(role, rows, hook.names, flags, columns or {})
        return {
            name: [v.view(len(row.response_ids), -1) for v, row in zip(found, rows, strict=True)]
            for name, found in outputs.items()
        }

    def save(self, role: str, directory: Path) -> None:
        """Write a role's training state."""
        with watched(self.group):
            self.group.save_checkpoint(role, str(directory))

    def restore(self, role: str, directory: Path) -> None:
        """Restore a role's training state."""
        with watched(self.group):
            self.group.load_checkpoint(role, str(directory))

    def export(self, role: str, directory: Path) -> None:
        """Write a role's model for transformers or peft."""
        with watched(self.group):
            self.group.export(role, str(directory))

    def _check_shape(self, batch: Batch) -> None:
        n_groups = len(batch.rows) // batch.group_size
        if n_groups % self.host.ranks:
            raise ConfigError(
                f"{n_groups} pairs or prompts cannot be shared by {self.host.ranks} ranks",
                "a multiple of runtime.ranks",
                "change the stage's batch size or runtime.ranks",
            )
        longest = max(map(len, batch.rows)) * batch.group_size
        if longest > self.runtime.tokens_per_micro_batch:
            raise ConfigError(
                f"A group of {batch.group_size} rows may take {longest} tokens",
                f"at most runtime.tokens_per_micro_batch={self.runtime.tokens_per_micro_batch}",
                "raise tokens_per_micro_batch or lower rendering.max_prompt_tokens",
            )

    def _rows_per_call(self, role: str) -> int:
        """Return a number that does not depend on the clock, because cuts change roundings."""
        files = list_weight_files(Path(self.specs[role].model_dir))
        is_large = sum(file.stat().st_size for file in files) > _LARGE_BYTES
        return ROWS_PER_CALL_LARGE if is_large else ROWS_PER_CALL

    def _infer(
        self,
        role: str,
        rows: Sequence[Row],
        names: Iterable[str],
        flags: dict[str, Any],
        columns: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> dict[str, list[torch.Tensor]]:
        outputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        # The order of the rows is restored below.
        calls = plan_calls(rows, self._rows_per_call(role))
        order = [i for call in calls for i in call]
        done = 0
        for call in calls:
            n_real = len(call)
            filled = call + [call[-1]] * (-n_real % self.host.ranks)
            given = {name: [values[i] for i in filled] for name, values in columns.items()}
            batch = Batch([rows[i] for i in filled], given)
            data = to_tensordict(batch, {"role": role, "compute_loss": False} | flags)
            with watched(self.group):
                result = self.group.infer(data).get()
            for name, collected in outputs.items():
                collected.extend(result[name].unbind()[:n_real])
            done += n_real
            if self.log is not None and len(calls) > 1:
                self.log.progress(done, len(rows), f"rows read by role {role}")
        place = {index: position for position, index in enumerate(order)}
        return {
            name: [found[place[i]] for i in range(len(rows))] for name, found in outputs.items()
        }


@cache
def _live() -> dict[str, Session]:
    """Hold the one session of this process."""
    return {}


def open_session(runtime: RuntimeConfig, log: RunLog | None = None) -> Session:
    """Return the worker group for this runtime, without roles; a running group that fits is used
    again.

    Args:
        runtime: ranks, device and how roles are built.
        log: where the stage reports.
    """
    worker_logs.forward_to(run_logger("session"))
    host = HostSpec.from_runtime(runtime, cluster.resolve_device(runtime))
    current = _live().get("session")
    if current is not None and current.host == host and not lost_ranks(current.group):
        current.drop()
        current.runtime, current.log = runtime, log
        return current
    close()
    cluster.connect(runtime)
    _live()["session"] = Session(start_group(host), runtime, host, log=log)
    return _live()["session"]


def close() -> None:
    """End the worker processes."""
    session = _live().pop("session", None)
    if session is not None:
        end_group(session.group)
