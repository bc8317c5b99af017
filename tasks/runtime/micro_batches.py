"""Cuts a batch into micro-batches, of like length where rows are padded.

verl balances micro-batches by total tokens and so mixes long and short rows, which it then pads to
the longest. Here rows are sorted by length first and cut where padding plus the fixed cost of a
micro-batch is least. Rows of one prompt may be merged into one; then the length is that of the
merged row, and where merged rows are packed nothing is padded. Every loss is a share of the whole
step's loss, so the cut changes nothing but time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tasks.algorithms.packed_rows import (
    MergeLimit,
    RowLayout,
    RowShape,
    lay_out,
    merge_rows,
    merged_tokens,
)
from tasks.config.shared import RuntimeConfig

# What must stay in one micro-batch: merged rows, each of them the indices of its rows.
Unit = list[list[int]]

# What starting one more micro-batch costs, in tokens of work: measured best at 64 for a model of a
# million parameters and at 32 for one of a hundred million, where 384 cost 14 and 8 % more time.
MICRO_BATCH_COST_TOKENS = 48
_MAX_CUT_POINTS = 64
_LAYOUT = "row_layout"


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


def plan_units(rows: Sequence[RowShape], group_size: int, limit: MergeLimit | None) -> list[Unit]:
    """Partition rows into units.

    Args:
        rows: the rows of one rank.
        group_size: consecutive rows that must stay together; beyond 1, prompts are shared only
            among these.
        limit: how far rows are merged; without one, every row stays by itself.
    """
    if group_size == 1:
        return [[members] for members in _merged(rows, limit)]
    return [
        [
            [first + i for i in members]
            for members in _merged(rows[first : first + group_size], limit)
        ]
        for first in range(0, len(rows), group_size)
    ]


def _merged(rows: Sequence[RowShape], limit: MergeLimit | None) -> list[list[int]]:
    return [[i] for i in range(len(rows))] if limit is None else merge_rows(rows, limit)


def pack_units(
    units: Sequence[Unit], rows: Sequence[RowShape], budget_tokens: int
) -> list[list[int]]:
    """Partition units into micro-batches without padding, first fit by falling length."""
    tokens = [sum(merged_tokens(rows, members) for members in unit) for unit in units]
    buckets: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(units)), key=lambda i: -tokens[i]):
        at = next((at for at, room in enumerate(free) if room >= tokens[i]), len(free))
        if at == len(free):
            buckets.append([])
            free.append(budget_tokens)
        buckets[at].append(i)
        free[at] -= tokens[i]
    return buckets


def bucket_units(
    units: Sequence[Unit], rows: Sequence[RowShape], budget_tokens: int
) -> list[list[int]]:
    """Partition units into micro-batches of like length under a budget of padded tokens."""
    buckets = []
    # A bucket holds units of one number of merged rows, so that its padded size is known.
    for n_rows in sorted({len(unit) for unit in units}):
        alike = [i for i, unit in enumerate(units) if len(unit) == n_rows]
        lengths = [
            n_rows * max(merged_tokens(rows, members) for members in units[i]) for i in alike
        ]
        found = length_buckets(lengths, budget_tokens, MICRO_BATCH_COST_TOKENS)
        buckets += [[alike[i] for i in bucket] for bucket in found]
    return buckets


def split_units(units: list[Unit], buckets: list[list[int]], count: int) -> None:
    """Halve the units of most rows, in place, until there is one for each of ``count``
    micro-batches.

    Ranks hold the same number of rows, but may share fewer or more prompts.
    """
    place = {index: bucket for bucket in buckets for index in bucket}
    while len(units) < count:
        index = max(range(len(units)), key=lambda i: len(units[i][0]))
        (members,) = units[index]
        half = len(members) // 2
        if half == 0:
            return
        units[index] = [members[:half]]
        units.append([members[half:]])
        place[index].append(len(units) - 1)
        place[len(units) - 1] = place[index]


def make_micro_batches(
    data: TensorDict, limit: MergeLimit | None, dp_group: Any
) -> tuple[list[TensorDict], list[list[int]]]:
    """Stand in for verl's ``prepare_micro_batches``.

    Args:
        data: jagged rows of this rank; ``force_group_size`` rows stay together.
        limit: how far rows are merged; then each micro-batch carries its `RowLayout`.
        dp_group: ranks that must run the same number of micro-batches.

    Returns:
        The micro-batches and the indices of their rows.
    """
    group_size = int(tu.get_non_tensor_data(data, "force_group_size", 1))
    rows = _row_shapes(data)
    units = plan_units(rows, group_size, limit)
    if limit is not None and limit.packed:
        buckets = pack_units(units, rows, limit.max_tokens)
    else:
        buckets = bucket_units(units, rows, int(data["max_token_len_per_gpu"]))
    if dp_group is not None and torch.distributed.get_world_size(dp_group) > 1:
        count = torch.tensor([len(buckets)], device=data["input_ids"].device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        split_units(units, buckets, int(count))
        buckets = match_count(buckets, int(count))
    chosen = [[sorted(i for part in units[u] for i in part) for u in bucket] for bucket in buckets]
    indices = [[i for unit in bucket for i in unit] for bucket in chosen]
    batches = [select_rows(data, index) for index in indices]
    if limit is not None:
        for batch, bucket, index in zip(batches, buckets, indices, strict=True):
            place = {row: at for at, row in enumerate(index)}
            merged = [[place[i] for i in part] for unit in bucket for part in units[unit]]
            layout = lay_out([rows[i] for i in index], merged, limit.packed)
            batch[_LAYOUT] = NonTensorData(layout)
    return batches, indices


def layout_of(micro_batch: TensorDict) -> RowLayout | None:
    """Return how the rows of a micro-batch are merged, or None where they are not."""
    layout: RowLayout | None = tu.get_non_tensor_data(micro_batch, _LAYOUT, None)
    return layout


def _row_shapes(data: TensorDict) -> list[RowShape]:
    prompts = data["prompts"]
    ids = prompts.values().cpu().numpy()
    ends = prompts.offsets().tolist()
    row_tokens = data["input_ids"].offsets().diff().tolist()
    return [
        RowShape(ids[start:end].tobytes(), end - start, tokens - (end - start))
        for start, end, tokens in zip(ends[:-1], ends[1:], row_tokens, strict=True)
    ]


def select_rows(data: TensorDict, indices: Sequence[int]) -> TensorDict:
    """Return the rows of a jagged batch at these indices, with its plain values."""
    index = torch.tensor(indices, device=data["input_ids"].device)
    selected = {
        name: _select_jagged(value, index)
        if isinstance(value, Tensor) and value.is_nested
        else value[index]
        if value.shape
        else value
        for name, value in data.items()
    }
    return TensorDict(selected, batch_size=len(indices))


def _select_jagged(column: Any, index: Tensor) -> Tensor:
    """Gather rows in one operation: one by one costs more than a small model's forward pass."""
    starts, lengths = column.offsets()[index], column.offsets().diff()[index]
    ends = lengths.cumsum(0)
    steps = torch.arange(int(ends[-1]), device=index.device)
    tokens = steps + torch.repeat_interleave(starts - (ends - lengths), lengths)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    # Without the longest length at hand, torch would pad to the sum of all.
    shortest, longest = int(lengths.min()), int(lengths.max())
    selected: Tensor = torch.nested.nested_tensor_from_jagged(
        column.values()[tokens], offsets, min_seqlen=shortest, max_seqlen=longest
    )
    return selected


# Decides whether a model's rows may share their prompts, and with which attention.

FLEX_ATTENTION: Final = "flex_attention"
TREE_ATTENTION: Final = "tree_attention"
# Tokens of a packed micro-batch: below this the fixed cost shows, and above it a model of a hundred
# million parameters is no faster but needs more memory.
PACKED_TOKENS: Final = 2048
# Decoders of transformers whose layers all take a given 4D mask and positions as they are, and pass
# unknown keywords on to the attention that is registered under the config's name.
MERGEABLE_MODEL_TYPES = frozenset(
    {"gemma", "granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"}
)
_SMALLEST_FLEX_HEAD = 16


def plain_rows_reason(config: Any, runtime: RuntimeConfig) -> str | None:
    """Say why rows of this model are computed one by one though prompts should be shared.

    Args:
        config: the model's config as transformers reads it.
        runtime: how it is run.

    Returns:
        None where prompts are shared or need not be.
    """
    if not runtime.share_prompts:
        return None
    if runtime.remove_padding:
        return "runtime.remove_padding packs rows, which takes no mask"
    if runtime.attention != "sdpa":
        return f"runtime.attention {runtime.attention} takes no mask"
    if config.model_type not in MERGEABLE_MODEL_TYPES:
        return f"model type {config.model_type} is not known to keep to a given mask"
    if _has_window(config):
        return "the model's attention has a sliding window"
    if getattr(config, "attention_dropout", 0.0):
        return "the model has attention dropout, which rows would share"
    return None


def _has_window(config: Any) -> bool:
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return True
    used = getattr(config, "use_sliding_window", True)
    return bool(used) and getattr(config, "sliding_window", None) is not None


def shares_prompts(config: Any, runtime: RuntimeConfig) -> bool:
    """Return whether rows of the same prompt are merged."""
    return runtime.share_prompts and plain_rows_reason(config, runtime) is None


def attention_implementation(
    config: Any, runtime: RuntimeConfig, device: Literal["cpu", "cuda"]
) -> str:
    """Return the attention to load a model with.

    Merged rows are computed piece by piece on CPU. On CUDA, where many small kernels are slow, they
    take block-sparse attention, which skips the blocks between siblings; its kernels want heads
    whose width is a power of two.
    """
    if not shares_prompts(config, runtime):
        return runtime.attention
    if device == "cpu":
        return TREE_ATTENTION
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = width >= _SMALLEST_FLEX_HEAD and width & (width - 1) == 0
    return FLEX_ATTENTION if fits else runtime.attention


def merge_limit(config: Any, max_tokens: int) -> MergeLimit:
    """Return how far rows are merged.

    With width h and a feed-forward layer of about 3 h, the matrices of a layer take about 12 h^2
    multiplications per token and attention over n tokens 2 n h, so that with a dense mask attention
    costs as much as the rest at n = 6 h. The others do not work on what the mask hides, however
    long the row.

    Args:
        config: the model's, with the attention that it was loaded with.
        max_tokens: of a micro-batch.
    """
    attention = config._attn_implementation
    if attention == TREE_ATTENTION:
        return MergeLimit(min(max_tokens, PACKED_TOKENS), math.inf, packed=True)
    if attention == FLEX_ATTENTION:
        return MergeLimit(max_tokens, math.inf)
    return MergeLimit(max_tokens, 6.0 * float(config.hidden_size))
