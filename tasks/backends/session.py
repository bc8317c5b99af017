"""The driver's side of the workers: what the stages call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tasks.backends import cluster, worker_logs
from tasks.backends.group_calls import Call, Job, together
from tasks.backends.logits_hooks import FLAG, LogitsHook
from tasks.backends.roles import Batch, HostSpec, RoleSpec, Row
from tasks.backends.row_batches import (
    before_tokens,
    metrics_of,
    plan_calls,
    reduce_metrics,
    to_tensordict,
)
from tasks.backends.worker_group import end_group, lost_ranks, start_groups, watched
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
    """Roles of one stage in the worker processes.

    Args:
        groups: verl's handles of the ranks: one, which all roles share, or two.
        runtime: how roles are built.
        host: what the groups were started with.
        alone: roles that are in the first of two groups; all others are in the second.
        notes: role to why its rows do not share their prompts, which costs time but changes
            nothing; only roles for which `RuntimeConfig` asks for it in vain.
        log: of the stage that uses the session.
    """

    groups: list[Any]
    runtime: RuntimeConfig
    host: HostSpec
    alone: frozenset[str] = frozenset()
    notes: dict[str, str] = field(default_factory=dict)
    log: RunLog | None = None
    specs: dict[str, RoleSpec] = field(default_factory=dict)

    def load(self, *specs: RoleSpec) -> None:
        """Build roles inside the running workers."""
        for spec in specs:
            reason = self._ask(spec.name, "load_role", spec, self.runtime)[0]
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
        for group in self.groups:
            group.drop_roles()
        self.notes.clear()
        self.specs.clear()

    def rebuild(self, runtime: RuntimeConfig | None = None) -> str:
        """Start the workers anew, where nodes are left for them, with the same roles as loaded from
        their directories: weights, optimizers and losses have to be restored.

        Args:
            runtime: how roles are built from now on; None = as before.

        Returns:
            On how many nodes the ranks run and in how many groups, where these are not as many as
            wanted; else nothing.

        Raises:
            ClusterError: the nodes that are left cannot hold the ranks.
            WorkerLostError: a rank died again while it was started.
        """
        self._end()
        self.runtime = runtime or self.runtime
        self.groups = start_groups(self.host, after_loss=True)
        self.load(*self.specs.values())
        found, wanted = len(self.groups[0].resource_pool.store), self.host.nodes
        where = "" if found == wanted else f" on {found} of {wanted} nodes"
        if len(self.groups) < self.host.groups:
            where += f" in {len(self.groups)} of {self.host.groups} groups"
        return where

    def _end(self) -> None:
        for group in self.groups:
            end_group(group)
        # Where it is not started again, nothing is left to end.
        self.groups = []

    def scale_learning_rate(self, role: str, scale: float) -> None:
        """Train a role at ``scale`` times its configured learning rate from its next step on."""
        self._ask(role, "scale_learning_rate", role, scale)

    def set_loss(self, role: str, loss_fn: Callable[..., Any]) -> None:
        """Set the loss of a role's next steps."""
        self._ask(role, "set_loss", role, loss_fn)

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
        return together([self._step(role, batch, update_schedule)])[0]

    def train_steps(self, batches: Mapping[str, Batch]) -> dict[str, dict[str, float]]:
        """Take a `train_step` of each role, at the same time where they are in different groups."""
        if self._are_apart(batches):
            jobs = [self._step(role, batch) for role, batch in batches.items()]
            return dict(zip(batches, together(jobs), strict=True))
        return {role: self.train_step(role, batch) for role, batch in batches.items()}

    def _step(self, role: str, batch: Batch, update_schedule: bool = True) -> Job[dict[str, float]]:
        self._check_shape(batch)
        data = to_tensordict(batch, {"role": role, "update_lr_scheduler": update_schedule})
        metrics = reduce_metrics(metrics_of((yield self._start(role, "train", data))))
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
        return together([self._logprobs(role, rows, temperature)])[0]

    def values(self, role: str, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the value of the state before each response token, one tensor of shape (T_i,) per
        row."""
        return together([self._values(role, rows)])[0]

    def logprobs_and_values(
        self, policy: str, critic: str, rows: Sequence[Row]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return `logprobs` and `values` of two roles, computed at the same time where they are in
        different groups."""
        if self._are_apart([policy, critic]):
            jobs = [self._logprobs(policy, rows), self._values(critic, rows)]
            logprobs, values = together(jobs)
            return logprobs, values
        return self.logprobs(policy, rows), self.values(critic, rows)

    def _logprobs(
        self, role: str, rows: Sequence[Row], temperature: float = 1.0
    ) -> Job[list[torch.Tensor]]:
        outputs = yield from self._infer(role, rows, ("log_probs",), {"temperature": temperature})
        return [
            before_tokens(values, row)
            for values, row in zip(outputs["log_probs"], rows, strict=True)
        ]

    def _values(self, role: str, rows: Sequence[Row]) -> Job[list[torch.Tensor]]:
        outputs = yield from self._infer(role, rows, ("values",), {})
        return [
            before_tokens(values, row) for values, row in zip(outputs["values"], rows, strict=True)
        ]

    def scores(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the score at the last real token of each row, shape (B,), fp32."""
        outputs = self._read(role, rows, ("values",), {})
        return torch.stack([values[-1].float() for values in outputs["values"]])

    def last_states(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the hidden state that a value model's score is made of, at the last real token of
        each row, shape (B, H)."""
        outputs = self._read(role, rows, ("last_states",), {"return_last_states": True})
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
        outputs = self._read(role, rows, hook.names, flags, columns or {})
        return {
            name: [v.view(len(row.response_ids), -1) for v, row in zip(found, rows, strict=True)]
            for name, found in outputs.items()
        }

    def save(self, role: str, directory: Path) -> None:
        """Write a role's training state."""
        self._ask(role, "save_checkpoint", role, str(directory))

    def restore(self, role: str, directory: Path) -> None:
        """Restore a role's training state."""
        self._ask(role, "load_checkpoint", role, str(directory))

    def export(self, role: str, directory: Path) -> None:
        """Write a role's model for transformers or peft."""
        self._ask(role, "export", role, str(directory))

    def _of(self, role: str) -> Any:
        """Return the group that a role is in."""
        return self.groups[0 if role in self.alone else -1]

    def _are_apart(self, roles: Collection[str]) -> bool:
        return len({id(self._of(role)) for role in roles}) == len(roles) > 1

    def _start(self, role: str, method: str, *args: Any) -> Call:
        """Start a call to all ranks of a role's group, of which a future comes back."""
        group, whose = self._of(role), self._whose(role)
        with watched(group, whose):
            return Call(group, getattr(group, method)(*args), whose)

    def _ask(self, role: str, method: str, *args: Any) -> Any:
        """Call a method of all ranks of a role's group and return what they return."""
        with watched(self._of(role), self._whose(role)):
            return getattr(self._of(role), method)(*args)

    def _whose(self, role: str) -> str:
        """Tell a group by its roles, where there are several."""
        if len(self.groups) == 1:
            return ""
        known = dict.fromkeys([*self.specs, role])
        return f" ({', '.join(name for name in known if self._of(name) is self._of(role))})"

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

    def _read(self, *args: Any) -> dict[str, list[torch.Tensor]]:
        return together([self._infer(*args)])[0]

    def _infer(
        self,
        role: str,
        rows: Sequence[Row],
        names: Iterable[str],
        flags: dict[str, Any],
        columns: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> Job[dict[str, list[torch.Tensor]]]:
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
            result = yield self._start(role, "infer", data)
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


def open_session(
    runtime: RuntimeConfig, log: RunLog | None = None, *, alone: Collection[str] = ()
) -> Session:
    """Return the workers for this runtime, without roles; running ones that fit are used again.

    Args:
        runtime: ranks, device and how roles are built.
        log: where the stage reports.
        alone: roles that get a group of ranks to themselves; with none, one group is all.
    """
    worker_logs.forward_to(run_logger("session"))
    groups = 2 if alone else 1
    host = HostSpec.from_runtime(runtime, cluster.resolve_device(runtime), groups)
    current = _live().get("session")
    if current is not None and current.host == host and _is_whole(current):
        current.drop()
        current.runtime, current.log, current.alone = runtime, log, frozenset(alone)
        return current
    close()
    cluster.make_room(runtime, host.ranks * groups)
    started = Session(start_groups(host), runtime, host, frozenset(alone), log=log)
    return _live().setdefault("session", started)


def _is_whole(session: Session) -> bool:
    """Tell whether all groups are there, with all their ranks."""
    return len(session.groups) == session.host.groups and not any(map(lost_ranks, session.groups))


def close() -> None:
    """End the worker processes."""
    session = _live().pop("session", None)
    if session is not None:
        session._end()
