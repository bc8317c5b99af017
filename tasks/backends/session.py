"""The driver's side of the worker group: what the stages call."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tasks.backends import cluster
from tasks.backends.roles import Batch, HostSpec, RoleSpec, Row
from tasks.config import RuntimeConfig
from tasks.context import RunLog
from tasks.errors import ConfigError, TrainingError

ROWS_PER_CALL = 1024
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

    def load(self, *specs: RoleSpec) -> None:
        """Build roles inside the running workers."""
        for spec in specs:
            reason = self.group.load_role(spec, self.runtime)[0]
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

    def set_loss(self, role: str, loss_fn: Callable[..., Any]) -> None:
        """Set the loss of a role's next steps."""
        self.group.set_loss(role, loss_fn)

    def train_step(
        self, role: str, batch: Batch, *, update_schedule: bool = True
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch and return its reduced metrics.

        Raises:
            ConfigError: the batch cannot be shared evenly among the ranks, or a group exceeds a
                micro-batch.
            TrainingError: the loss or the gradient is not finite; no step was taken.
        """
        self._check_shape(batch)
        data = to_tensordict(batch, {"role": role, "update_lr_scheduler": update_schedule})
        metrics = reduce_metrics(_metrics_of(self.group.train(data).get()))
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
            _before_tokens(values, row)
            for values, row in zip(outputs["log_probs"], rows, strict=True)
        ]

    def values(self, role: str, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the value of the state before each response token, one tensor of shape (T_i,) per
        row."""
        outputs = self._infer(role, rows, ("values",), {})
        return [
            _before_tokens(values, row) for values, row in zip(outputs["values"], rows, strict=True)
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

    def top_k(
        self, role: str, rows: Sequence[Row], k: int, tau: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the k largest log-probabilities at temperature tau before each response token, and
        their ids.

        Returns:
            Two lists of tensors of shape (T_i, k): log-probabilities fp32, token ids int64.
        """
        from functools import partial

        from tasks.backends.verl_losses import top_k_hook

        self.set_loss(role, partial(top_k_hook, k=k, tau=tau))
        names = [f"{kind}_{i}" for kind in ("logprob", "id") for i in range(k)]
        outputs = self._infer(
            role, rows, names, {"distillation_use_topk": True, "compute_loss": True}
        )
        logprobs, ids = [], []
        for i, row in enumerate(rows):
            columns = [_before_tokens(outputs[name][i], row) for name in names]
            logprobs.append(torch.stack(columns[:k], -1).float())
            ids.append(torch.stack(columns[k:], -1).long())
        return logprobs, ids

    def save(self, role: str, directory: Path) -> None:
        """Write a role's training state."""
        self.group.save_checkpoint(role, str(directory))

    def restore(self, role: str, directory: Path) -> None:
        """Restore a role's training state."""
        self.group.load_checkpoint(role, str(directory))

    def export(self, role: str, directory: Path) -> None:
        """Write a role's model for transformers or peft."""
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

    def _infer(
        self, role: str, rows: Sequence[Row], names: Iterable[str], flags: dict[str, Any]
    ) -> dict[str, list[torch.Tensor]]:
        outputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        # The order of the rows is restored below.
        calls = plan_calls(rows, ROWS_PER_CALL)
        order = [i for call in calls for i in call]
        for call in calls:
            part = [rows[i] for i in call]
            n_real = len(part)
            part += [part[-1]] * (-n_real % self.host.ranks)
            data = to_tensordict(Batch(part), {"role": role, "compute_loss": False} | flags)
            result = self.group.infer(data).get()
            for name, collected in outputs.items():
                collected.extend(result[name].unbind()[:n_real])
        place = {index: position for position, index in enumerate(order)}
        return {
            name: [found[place[i]] for i in range(len(rows))] for name, found in outputs.items()
        }


def plan_calls(rows: Sequence[Row], rows_per_call: int) -> list[list[int]]:
    """Cut rows into calls: rows of a prompt side by side, and prompts of like length, counted with
    all their responses, in one call.

    Returns:
        Indices into ``rows``, at most ``rows_per_call`` in a call; a prompt of more rows is cut.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        prompts.setdefault(tuple(row.prompt_ids), []).append(index)

    def merged_length(group: list[int]) -> int:
        return len(rows[group[0]].prompt_ids) + sum(len(rows[i].response_ids) for i in group)

    calls: list[list[int]] = []
    for group in sorted(prompts.values(), key=merged_length):
        for start in range(0, len(group), rows_per_call):
            piece = group[start : start + rows_per_call]
            if not calls or len(calls[-1]) + len(piece) > rows_per_call:
                calls.append([])
            calls[-1] += piece
    return calls


def _before_tokens(values: torch.Tensor, row: Row) -> torch.Tensor:
    """Return what was computed from the state before each response token: one position left of the
    token."""
    return values[len(row.prompt_ids) - 1 : len(row) - 1].clone()


def _metrics_of(output: Any) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    metrics: dict[str, Any] = tu.get(output, "metrics")
    return metrics


def reduce_metrics(nested: dict[str, Any]) -> dict[str, float]:
    """Reduce per-rank, per-micro-batch metrics: ``*_max`` by the maximum, all others are sums."""
    reduced: dict[str, float] = {}
    for name, value in nested.items():
        if name.startswith(("perf/", "mfu")):
            continue
        flat = list(_flatten(value))
        reduced[name] = max(flat) if name.endswith("_max") else sum(flat)
    return reduced


def _flatten(value: Any) -> Iterable[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield float(value)


def _jagged(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return values that lie end to end as rows of these lengths."""
    offsets = torch.tensor([0, *accumulate(lengths)])
    rows: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
    return rows


def _column(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return _jagged(torch.cat(list(tensors)), [len(tensor) for tensor in tensors])


def _ids(parts: Iterable[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for part in parts for token in part])


def to_tensordict(batch: Batch, flags: dict[str, Any]) -> Any:
    """Build the jagged batch that a verl worker takes.

    Every row becomes prompt + response without padding; ``loss_mask`` is 1 on the response tokens.
    """
    from verl.utils import tensordict_utils as tu

    rows = batch.rows
    prompt_tokens = [len(row.prompt_ids) for row in rows]
    response_tokens = [len(row.response_ids) for row in rows]
    row_tokens = [len(row) for row in rows]
    positions = torch.tensor([position for n in row_tokens for position in range(n)])
    in_response = positions >= torch.tensor(prompt_tokens).repeat_interleave(
        torch.tensor(row_tokens)
    )
    ids = _ids(part for row in rows for part in (row.prompt_ids, row.response_ids))
    tensors = {
        "input_ids": _jagged(ids, row_tokens),
        "position_ids": _jagged(positions, row_tokens),
        "loss_mask": _jagged(in_response.long(), row_tokens),
        "prompts": _jagged(_ids(row.prompt_ids for row in rows), prompt_tokens),
        "responses": _jagged(_ids(row.response_ids for row in rows), response_tokens),
        **{name: _column(column) for name, column in batch.columns.items()},
    }
    plain = {
        "temperature": 1.0,
        "global_batch_size": len(rows),
        "force_group_size": batch.group_size,
    }
    return tu.get_tensordict(tensors, non_tensor_dict={**plain, **batch.scalars, **flags})


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
    host = HostSpec.from_runtime(runtime, cluster.resolve_device(runtime))
    current = _live().get("session")
    if current is not None and current.host == host:
        current.drop()
        current.runtime, current.log = runtime, log
        return current
    close()
    cluster.connect(runtime)
    _live()["session"] = Session(_start_group(host), runtime, host, log=log)
    return _live()["session"]


def _start_group(host: HostSpec) -> Any:
    os.environ.update(cluster.worker_environment(host.device))
    if host.device == "cpu":
        # Registers the platform even where verl was imported before the environment was set.
        importlib.import_module(cluster.PLATFORM_MODULE)
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from tasks.backends.verl_host import RoleHost

    use_gpu = host.device == "cuda"
    pool = RayResourcePool(cluster.node_layout(host), use_gpu=use_gpu, max_colocate_count=1)
    actor = RayClassWithInitArgs(cls=ray.remote(RoleHost), threads=host.threads_per_rank)
    # On a cluster that was joined, whether there are GPUs is known only now.
    environment = cluster.worker_environment(host.device)
    return RayWorkerGroup(pool, actor, device_name=host.device, worker_env=environment)


def close() -> None:
    """End the worker processes."""
    session = _live().pop("session", None)
    if session is None:
        return
    import ray
    from ray.util import remove_placement_group

    for worker in session.group.workers:
        ray.kill(worker)
    # Otherwise the CPUs stay reserved, and a group of another size waits for them for ever.
    for placement_group in session.group.resource_pool.pgs:
        remove_placement_group(placement_group)
