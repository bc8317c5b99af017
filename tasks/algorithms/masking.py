"""Reductions over real tokens; what lies under a False mask never reaches a value or a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tasks.errors import ConfigError, DataError, TrainingError

# Checks that every algorithm makes on its inputs before it computes.


def check_rank(name: str, values: Tensor, rank: int) -> None:
    """Refuse a tensor with another number of dimensions (DataError)."""
    if values.dim() != rank:
        raise DataError(
            f"{name} has shape {tuple(values.shape)}",
            f"a tensor of rank {rank}",
            "squeeze, reshape or pad it before the call",
        )


def check_shape(name: str, values: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, so that nothing broadcasts by accident (DataError)."""
    if tuple(values.shape) != tuple(shape):
        raise DataError(
            f"{name} has shape {tuple(values.shape)}",
            f"shape {tuple(shape)}",
            "slice every tensor to the same sequences and the same tokens",
        )


def check_float(name: str, values: Tensor) -> None:
    """Refuse a tensor that is not of a floating dtype (DataError)."""
    if not values.is_floating_point():
        raise DataError(
            f"{name} has dtype {values.dtype}", "a floating dtype", f"pass {name}.float()"
        )


def check_mask(mask: Tensor, shape: torch.Size | tuple[int, ...], name: str = "mask") -> None:
    """Refuse a mask that is not bool or does not have the given shape (DataError)."""
    if mask.dtype != torch.bool:
        raise DataError(
            f"{name} has dtype {mask.dtype}",
            "torch.bool, True = a real token",
            f"pass {name}.bool()",
        )
    check_shape(name, mask, shape)


def check_token_values(mask: Tensor, **values: Tensor) -> None:
    """Check a ``(B, T)`` bool mask and floating tensors of the same shape (DataError).

    Args:
        mask: ``(B, T)``, True = a real token.
        values: tensors by the name that error messages use.
    """
    check_rank("mask", mask, 2)
    check_mask(mask, mask.shape)
    for name, tensor in values.items():
        check_float(name, tensor)
        check_shape(name, tensor, mask.shape)


def check_finite(name: str, values: Tensor, mask: Tensor | None = None) -> None:
    """Refuse NaN or infinity at positions that count.

    Args:
        name: how the message calls the tensor.
        values: any floating tensor.
        mask: bool of the same shape, True = the position counts; None = all of them.

    Raises:
        TrainingError: naming how many values are not finite and where the first one is.
    """
    bad = ~torch.isfinite(values.detach())
    if mask is not None:
        bad = bad & mask
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise TrainingError(
            f"{name} holds {int(bad.sum())} value(s) that are not finite, the first at {first}",
            "finite numbers at every real position",
            "look for an exploded learning rate, a corrupt row, or a mask that covers padding",
        )


def check_frozen(name: str, values: Tensor) -> None:
    """Refuse a tensor that carries a gradient where a constant belongs (TrainingError)."""
    if values.requires_grad:
        raise TrainingError(
            f"{name} carries a gradient",
            "a constant computed before the optimiser step",
            f"compute {name} under torch.no_grad() from the frozen policy or critic",
        )


def check_in_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside the closed interval [low, high], or NaN (ConfigError)."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}", f"a number from {low} to {high}", f"change {name}")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above zero (ConfigError)."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}", "a finite number above 0", f"change {name}")


def check_count(name: str, value: float) -> None:
    """Refuse a global denominator that is not finite and above zero (DataError)."""
    if not (math.isfinite(value) and value > 0):
        raise DataError(
            f"{name} is {value}",
            "the count over all micro-batches and ranks of the step, above 0",
            "sum it over the whole batch, and skip a step in which nothing is left to train on",
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a name that is not among the choices (ConfigError)."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}", f"one of {', '.join(choices)}", f"change {name}")


LossMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
LOSS_MODES: tuple[str, ...] = get_args(LossMode)
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Totals:
    """Hold the denominators of one optimiser step, summed over all its micro-batches and ranks.

    Attributes:
        tokens: real response tokens of the step.
        sequences: sequences of the step that have at least one real token.
        mode: how token losses are averaged, see `aggregate_token_loss`.
    """

    tokens: float
    sequences: float
    mode: LossMode = "token-mean"

    def __post_init__(self) -> None:
        check_count("totals.tokens", self.tokens)
        check_count("totals.sequences", self.sequences)
        check_choice("totals.mode", self.mode, LOSS_MODES)


def sanitize(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Replace what lies under a False mask by ``fill``, in fp32.

    Selecting (not multiplying) keeps NaN out: NaN * 0 is NaN, in the forward and in the backward
    pass.

    Args:
        values: any shape, any floating dtype.
        mask: bool of the same shape, True = keep.
        fill: value at masked positions; their gradient is exactly zero.
    """
    check_float("values", values)
    check_mask(mask, values.shape)
    fp32 = values.float()
    return torch.where(mask, fp32, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the real positions, over everything or along ``dim``; an empty mask sums to 0.

    Args:
        values: any shape; mask: bool of the same shape, True = a real position.
    """
    kept = sanitize(values, mask)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the real positions, over everything or along ``dim``.

    Not for losses: the mean of micro-batch means is not the mean of the batch (see
    `aggregate_token_loss`).

    Args:
        values: any shape; mask: bool of the same shape, True = a real position.

    Raises:
        DataError: no real position to average (with ``dim``: in any slice).
    """
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    if bool((count == 0).any()):
        raise DataError(
            "the mask has no real position to average"
            + ("" if dim is None else f" along dim {dim}"),
            "at least one True",
            "drop empty responses before the call",
        )
    return masked_sum(values, mask, dim) / count


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Scale the real positions to mean 0 and variance 1, by their own statistics only.

    ``(x - mean) / sqrt(var + eps)``, plus ``mean`` again where ``shift_mean`` is False. Masked
    positions become 0.

    Args:
        values: any shape: the whole batch, not a micro-batch.
        mask: bool of the same shape, True = a real position.
        shift_mean: move the mean to 0.
        unbiased: divide the squares by n - 1 rather than by n.
        eps: added to the variance.

    Raises:
        DataError: fewer than 2 real positions (1 where ``unbiased`` is False).
        TrainingError: a real position is not finite.
    """
    check_mask(mask, values.shape)
    check_finite("values", values, mask)
    count = int(mask.sum())
    needed = 2 if unbiased else 1
    if count < needed:
        raise DataError(
            f"{count} real position(s) to whiten",
            f"at least {needed}",
            "whiten over the whole batch",
        )
    mean = masked_mean(values, mask)
    centred = sanitize(sanitize(values, mask) - mean, mask)
    variance = centred.square().sum() / (count - 1 if unbiased else count)
    scaled = centred * torch.rsqrt(variance + eps)
    return scaled if shift_mean else sanitize(scaled + mean, mask)


def last_token_index(mask: Tensor) -> Tensor:
    """Return the position of the last real token of each row, for left, right or mixed padding.

    Args:
        mask: ``(B, T)`` bool, True = a real token.

    Returns:
        ``(B,)`` long.

    Raises:
        DataError: a row has no real token.
    """
    check_token_values(mask)
    empty = ~mask.any(dim=1)
    if bool(empty.any()):
        raise DataError(
            f"row {int(empty.nonzero()[0])} of the mask has no real token",
            "at least one True in every row",
            "drop empty responses before the call",
        )
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, -1).amax(dim=1)


def select_last(values: Tensor, mask: Tensor) -> Tensor:
    """Pick each row's value at its last real token.

    Args:
        values: ``(B, T)``, any dtype (scores, ids).
        mask: ``(B, T)`` bool, True = a real token.

    Returns:
        ``(B,)`` in the dtype of ``values``; the gradient reaches the picked positions only.
    """
    check_shape("values", values, mask.shape)
    return values.gather(1, last_token_index(mask).unsqueeze(1)).squeeze(1)


def ended_with(ids: Tensor, mask: Tensor, end_id: int) -> Tensor:
    """Tell which rows end in ``end_id``, read at the last real token and not at the last slot.

    A False row ran out of length: its value function needs a bootstrap value.

    Args:
        ids: ``(B, T)`` token ids; mask: ``(B, T)`` bool, True = a real token, the end token
            included.

    Returns:
        ``(B,)`` bool.
    """
    return select_last(ids, mask) == end_id


def response_labels(ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor) -> Tensor:
    """Copy ids into labels and blank out prompt and padding with -100.

    Padding is told by the mask, never by a pad id (which may equal the end token).

    Args:
        ids: ``(B, L)`` long, prompt and response, padded on either side.
        attention_mask: ``(B, L)`` bool, True = a real token of prompt or response.
        prompt_lengths: ``(B,)`` real prompt tokens.

    Returns:
        ``(B, L)`` long.
    """
    check_rank("ids", ids, 2)
    check_mask(attention_mask, ids.shape, "attention_mask")
    check_shape("prompt_lengths", prompt_lengths, ids.shape[:1])
    seen = attention_mask.long().cumsum(dim=1)
    is_response = attention_mask & (seen > prompt_lengths.unsqueeze(1))
    return torch.where(is_response, ids, IGNORED_LABEL)


def aggregate_token_loss(
    token_loss: Tensor,
    mask: Tensor,
    *,
    mode: LossMode,
    total_tokens: float,
    total_sequences: float,
) -> Tensor:
    """Reduce token losses of a micro-batch to its share of the whole step's loss.

    - token-mean: ``sum(loss) / total_tokens``
    - seq-mean-token-sum: ``sum(loss) / total_sequences``
    - seq-mean-token-mean: ``sum_rows(mean_tokens(loss)) / total_sequences``

    The sum over micro-batches and ranks is the loss of the batch, however it was split. A
    data-parallel engine that averages gradients over ranks must multiply by the number of ranks.

    Args:
        token_loss: ``(B, T)``; mask: ``(B, T)`` bool, True = a real token. An empty row adds 0.
        total_tokens, total_sequences: counts of the whole step.

    Raises:
        DataError: a count that is not above 0.
    """
    totals = Totals(total_tokens, total_sequences, mode)
    check_token_values(mask, token_loss=token_loss)
    row_sums = masked_sum(token_loss, mask, dim=1)
    if totals.mode == "token-mean":
        return row_sums.sum() / totals.tokens
    if totals.mode == "seq-mean-token-mean":
        row_sums = row_sums / mask.sum(dim=1).clamp(min=1)
    return row_sums.sum() / totals.sequences


def aggregate(token_loss: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Reduce token losses as `aggregate_token_loss` does, with its numbers in one value."""
    return aggregate_token_loss(
        token_loss,
        mask,
        mode=totals.mode,
        total_tokens=totals.tokens,
        total_sequences=totals.sequences,
    )


def count_metrics(mask: Tensor) -> dict[str, Tensor]:
    """Count the real tokens and the rows that have any, as metrics that add up."""
    return {"n_tokens": mask.sum().float(), "n_sequences": mask.any(dim=1).sum().float()}
