"""verl's FSDP engines with micro-batches of like length.

verl balances micro-batches by total tokens and so mixes long and short rows, which it then pads to
the longest. Here rows are sorted by length first and cut where padding plus the fixed cost of a
micro-batch is least. Every loss is a share of the whole step's loss, so the cut changes nothing but
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as verl_fsdp
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

# What starting one more micro-batch costs, in tokens of work (about 10 ms for the tiny model).
MICRO_BATCH_COST_TOKENS = 384
_MAX_CUT_POINTS = 64


def length_buckets(lengths: Sequence[int], budget_tokens: int, cost_tokens: int) -> list[list[int]]:
    """Partition units into buckets of like length.

    Minimises sum over buckets of (size * longest + cost_tokens) over contiguous cuts of the sorted
    lengths, each bucket's padded size at most ``budget_tokens`` (a single unit may exceed it).

    Args:
        lengths: tokens of each unit.
        budget_tokens: padded tokens of one bucket.
        cost_tokens: fixed cost of a bucket.

    Returns:
        Buckets of indices into ``lengths``, longest first; every index once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    n = len(order)
    stride = max(1, -(-n // _MAX_CUT_POINTS))
    cuts = [*range(0, n, stride), n]
    best = [0.0] + [float("inf")] * (len(cuts) - 1)
    previous = [0] * len(cuts)
    for end in range(1, len(cuts)):
        for start in range(end):
            padded = lengths[order[cuts[start]]] * (cuts[end] - cuts[start])
            fits = padded <= budget_tokens or end - start == 1
            total = best[start] + padded + cost_tokens
            if fits and total < best[end]:
                best[end], previous[end] = total, start
    buckets = []
    end = len(cuts) - 1
    while end:
        start = previous[end]
        buckets += _within_budget(order[cuts[start] : cuts[end]], lengths, budget_tokens)
        end = start
    return sorted(buckets, key=lambda bucket: -lengths[bucket[0]])


def _within_budget(
    bucket: list[int], lengths: Sequence[int], budget_tokens: int
) -> list[list[int]]:
    """Cut a bucket that is over the budget because its cut points were coarse."""
    size = max(1, budget_tokens // max(lengths[bucket[0]], 1))
    return [bucket[start : start + size] for start in range(0, len(bucket), size)]


def match_count(buckets: list[list[int]], count: int) -> list[list[int]]:
    """Halve the largest buckets until there are ``count``: all ranks must run the same number of
    passes."""
    buckets = list(buckets)
    while len(buckets) < count:
        buckets.sort(key=len)
        largest = buckets.pop()
        half = len(largest) // 2
        if half == 0:
            raise RuntimeError(f"{len(buckets) + 1} rows cannot make {count} micro-batches")
        buckets += [largest[:half], largest[half:]]
    return buckets


def _bucketed_micro_batches(
    data: TensorDict, dp_group: Any = None, **_: Any
) -> tuple[list[TensorDict], list[list[int]]]:
    """Stand in for verl's ``prepare_micro_batches``."""
    group_size = int(tu.get_non_tensor_data(data, "force_group_size", 1))
    row_lengths = data["input_ids"].offsets().diff().tolist()
    groups = range(0, len(row_lengths), group_size)
    # Rows of a group are padded to the longest of the micro-batch, so the longest row stands for
    # its group.
    lengths = [group_size * max(row_lengths[first : first + group_size]) for first in groups]
    buckets = length_buckets(lengths, int(data["max_token_len_per_gpu"]), MICRO_BATCH_COST_TOKENS)
    if dp_group is not None and torch.distributed.get_world_size(dp_group) > 1:
        count = torch.tensor([len(buckets)], device=data["input_ids"].device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        buckets = match_count(buckets, int(count))
    rows = [
        [group * group_size + offset for group in bucket for offset in range(group_size)]
        for bucket in buckets
    ]
    return [tu.index_select_tensor_dict(data, bucket) for bucket in rows], rows


class _LengthBuckets:
    """Mixed into a verl engine: cuts micro-batches by length."""

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        # With this flag verl puts the outputs back into the order of the rows.
        tu.assign_non_tensor(data, use_dynamic_bsz=True)
        original = verl_fsdp.prepare_micro_batches
        verl_fsdp.prepare_micro_batches = _bucketed_micro_batches
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        finally:
            verl_fsdp.prepare_micro_batches = original


class LanguageEngine(_LengthBuckets, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Language model with a vocabulary head."""


class ValueEngine(_LengthBuckets, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Model with one score per token."""


def _cpu_logprobs(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return log softmax of the labels, shape (N,), for logits (N, V), in one operation.

    Without a fused CUDA kernel verl takes the tokens one by one, to save memory that a CPU does not
    lack; with the tiny model that is two thirds of a training step.
    """
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def register_engines() -> None:
    """Make verl build these engines, on CPU, for which it has none, and before its own on CUDA."""
    if get_device_name() == "cpu":
        verl_fsdp.logprobs_from_logits = _cpu_logprobs
    kinds = (("language_model", LanguageEngine), ("value_model", ValueEngine))
    for model_type, engine in kinds:
        EngineRegistry.register(model_type, ["fsdp2"], device="cpu")(engine)
        EngineRegistry.register(model_type, ["fsdp2"], device="cuda", vendor=["nvidia", "amd"])(
            engine
        )
