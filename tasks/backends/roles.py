"""What a worker is told: plain values, so that they pickle small and need no verl to be built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tasks.config import LoraConfig, OptimizerConfig, RuntimeConfig

# Runtime settings on which the last digits of what a model says depend.
NUMERIC_FIELDS = {"device", "dtype", "attention", "ranks", "remove_padding", "share_prompts"}


@dataclass(frozen=True)
class RoleSpec:
    """One model inside the worker group.

    Args:
        name: role, for instance ``actor`` or ``critic``; unique in the group.
        kind: ``language_model`` has a vocabulary head, ``value_model`` one score per token.
        model_dir: directory in transformers format.
        seed: seeds whatever is newly initialised (value head, adapter).
        total_steps: optimizer steps of the schedule.
        lora: train an adapter instead of all weights.
        trained_head: the value head must be in the directory; a fresh one would score at random.
    """

    name: str
    kind: Literal["language_model", "value_model"]
    model_dir: str
    seed: int = 0
    total_steps: int = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig | None = None
    trained_head: bool = False


@dataclass(frozen=True)
class Row:
    """One prompt with one response, as token ids; the response includes its end-of-turn token."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Rows with what belongs to each of their response tokens.

    Args:
        rows: B rows.
        columns: name to B tensors of shape (T_i,) or (T_i, K), aligned with the response tokens of
            each row.
        group_size: consecutive rows that must stay together, 2 for the rows of a pair.
        scalars: plain values that the loss reads.
    """

    rows: Sequence[Row]
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    group_size: int = 1
    scalars: dict[str, float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class HostSpec:
    """The worker processes, which live on from stage to stage.

    Args:
        ranks: of each group.
        device: of all ranks.
        threads_per_rank: torch threads on a CPU.
        nodes: that share the ranks of a group.
        groups: of as many ranks each, in placement groups of their own.
    """

    ranks: int
    device: Literal["cpu", "cuda"]
    threads_per_rank: int
    nodes: int = 1
    groups: int = 1

    @classmethod
    def from_runtime(
        cls, runtime: RuntimeConfig, device: Literal["cpu", "cuda"], groups: int = 1
    ) -> HostSpec:
        """Share the CPU threads among the ranks of a group, wherever they run: another number of
        threads may round otherwise."""
        threads = max(1, runtime.cpu_threads // runtime.ranks)
        return cls(runtime.ranks, device, threads, runtime.nodes, groups)
