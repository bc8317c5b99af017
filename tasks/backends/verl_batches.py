"""What every loss reads from verl's micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.masking import LossMode, Totals

Loss = tuple[Tensor, dict[str, float]]


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Return metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}


def response_mask(data: Any) -> Tensor:
    """Return (B, T) bool, True = a real response token."""
    lengths = data["responses"].offsets().diff()
    longest = int(lengths.max())
    mask: Tensor = torch.arange(longest, device=lengths.device)[None, :] < lengths[:, None]
    return mask


def padded(data: Any, column: str) -> Tensor:
    """Return a response-aligned column as (B, T) or (B, T, K)."""
    values: Tensor = torch.nested.to_padded_tensor(data[column], padding=0.0)
    return values


def totals(data: Any, mode: LossMode) -> Totals:
    """Return the denominators of the whole step."""
    return Totals(float(data["batch_num_tokens"]), float(data["global_batch_size"]), mode)


def n_ranks(data: Any) -> int:
    """Return by how many ranks the gradient is averaged."""
    return int(data["dp_size"])
