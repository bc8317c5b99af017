"""How rows travel to the workers and numbers come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from tasks.backends.roles import Batch, Row


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


def before_tokens(values: torch.Tensor, row: Row) -> torch.Tensor:
    """Return what was computed from the state before each response token: one position left of the
    token."""
    return values[len(row.prompt_ids) - 1 : len(row) - 1].clone()


def metrics_of(output: Any) -> dict[str, Any]:
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
