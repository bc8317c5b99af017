"""Reductions over real tokens; what lies under a False mask never reaches a value or a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.errors import ConfigError, DataError, TrainingError

LossMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
LOSS_MODES: tuple[str, ...] = get_args(LossMode)


@dataclass(frozen=True)
class Totals:
    """Hold the denominators of one optimiser step, summed over all its micro-batches and ranks.

    Attributes:
        tokens: real response tokens of the step.
        sequences: sequences of the step that have at least one real token.
        mode: how token losses are averaged, see `aggregate`.
    """

    tokens: float
    sequences: float
    mode: LossMode = "token-mean"


def real_only(values: Tensor, mask: Tensor) -> Tensor:
    """Return values in fp32, 0 under a False mask.

    Selecting (not multiplying) keeps NaN out: NaN * 0 is NaN, in the forward and in the backward
    pass.

    Args:
        values: any shape, any floating dtype.
        mask: bool of the same shape, True = a real position.
    """
    assert mask.dtype == torch.bool and values.shape == mask.shape
    return torch.where(mask, values.float(), 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the real positions, over everything or along ``dim``; an empty mask sums to 0.

    Args:
        values: any shape; mask: bool of the same shape, True = a real position.
    """
    kept = real_only(values, mask)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the real positions, over everything or along ``dim``; NaN where there is none.

    Not for losses: the mean of micro-batch means is not the mean of the batch (see `aggregate`).

    Args:
        values: any shape; mask: bool of the same shape, True = a real position.
    """
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / count


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Scale the real positions to mean 0 and variance 1: ``(x - mean) / sqrt(var + 1e-8)``.

    Args:
        values: any shape: the whole batch, not a micro-batch.
        mask: bool of the same shape, True = a real position; the others become 0.

    Raises:
        DataError: fewer than 2 real positions, which have no variance over n - 1.
    """
    count = int(mask.sum())
    if count < 2:
        raise DataError(
            f"{count} real position(s) to whiten", "at least 2", "raise the prompts of a step"
        )
    real = real_only(values, mask)
    centred = real_only(real - real.sum() / mask.sum(), mask)
    variance = centred.square().sum() / (count - 1)
    return centred * torch.rsqrt(variance + 1e-8)


def last_token_index(mask: Tensor) -> Tensor:
    """Return the position of the last real token of each row, ``(B,)``; -1 for an empty row.

    Args:
        mask: ``(B, T)`` bool, True = a real token.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, -1).amax(dim=1)


def broadcast_to_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Give every real token its sequence's score.

    Args:
        scores: ``(B,)``; mask: ``(B, T)`` bool, True = a real response token.

    Returns:
        ``(B, T)`` fp32, 0 under the mask.
    """
    return real_only(scores.unsqueeze(1).expand(mask.shape), mask)


def aggregate(token_loss: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Reduce token losses of a micro-batch to its share of the whole step's loss.

    - token-mean: ``sum(loss) / totals.tokens``
    - seq-mean-token-sum: ``sum(loss) / totals.sequences``
    - seq-mean-token-mean: ``sum_rows(mean_tokens(loss)) / totals.sequences``

    The sum over micro-batches and ranks is the loss of the batch, however it was split. A
    data-parallel engine that averages gradients over ranks must multiply by the number of ranks.

    Args:
        token_loss: ``(B, T)``; mask: ``(B, T)`` bool, True = a real token. An empty row adds 0.
    """
    row_sums = masked_sum(token_loss, mask, dim=1)
    if totals.mode == "token-mean":
        return row_sums.sum() / totals.tokens
    if totals.mode == "seq-mean-token-mean":
        row_sums = row_sums / mask.sum(dim=1).clamp(min=1)
    return row_sums.sum() / totals.sequences


def count_metrics(mask: Tensor) -> dict[str, Tensor]:
    """Count the real tokens and the rows that have any, as metrics that add up."""
    return {"n_tokens": mask.sum().float(), "n_sequences": mask.any(dim=1).sum().float()}


# Checks of what data and config of a user can cause.


def check_rank(name: str, values: Tensor, rank: int) -> None:
    """Refuse a tensor with another number of dimensions (DataError)."""
    if values.dim() != rank:
        raise DataError(f"{name} has shape {tuple(values.shape)}", f"rank {rank}", "reshape it")


def check_shape(name: str, values: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, so that nothing broadcasts by accident (DataError)."""
    if tuple(values.shape) != tuple(shape):
        raise DataError(
            f"{name} has shape {tuple(values.shape)}",
            f"shape {tuple(shape)}",
            "slice every tensor to the same sequences and the same tokens",
        )


def check_finite(name: str, values: Tensor) -> None:
    """Refuse NaN or infinity (TrainingError), naming how many there are and where the first is."""
    bad = ~torch.isfinite(values.detach())
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise TrainingError(
            f"{name} holds {int(bad.sum())} value(s) that are not finite, the first at {first}",
            "finite numbers at every real position",
            "look for an exploded learning rate or a corrupt row",
        )


def check_in_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside the closed interval [low, high], or NaN (ConfigError)."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}", f"a number from {low} to {high}", f"change {name}")


def check_count(name: str, value: float) -> None:
    """Refuse a count that is not finite and above zero (DataError)."""
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{name} is {value}", "a count above 0", "look at what is counted")
