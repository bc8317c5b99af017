"""Checks that every algorithm makes on its inputs before it computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.errors import ConfigError, DataError, TrainingError


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
