"""Statistics by group: all responses of one prompt, of any number and in any order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.algorithms.checks import check_finite, check_float, check_rank, check_shape
from tasks.errors import DataError


class GroupStats(NamedTuple):
    """Hold each row's deviation from its group, row by row.

    Attributes:
        centred: ``(B,)`` score minus group mean; exactly 0 where all scores of the group are equal.
        std: ``(B,)`` standard deviation of the group over n - 1, 0 for a group of one.
        size: ``(B,)`` rows in the group.
    """

    centred: Tensor
    std: Tensor
    size: Tensor


def group_statistics(scores: Tensor, group_ids: Tensor) -> GroupStats:
    """Compare each score with its group, in fp32.

    Args:
        scores: ``(B,)``.
        group_ids: ``(B,)`` integers; equal ids = one group.

    Raises:
        DataError: wrong shapes or ids that are not integers.
        TrainingError: a score that is not finite.
    """
    check_rank("scores", scores, 1)
    check_float("scores", scores)
    check_shape("group_ids", group_ids, scores.shape)
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise DataError(
            f"group_ids has dtype {group_ids.dtype}", "integers", "pass group_ids.long()"
        )
    check_finite("scores", scores)
    unique, index = torch.unique(group_ids, return_inverse=True)
    values = scores.detach().float()
    zeros = torch.zeros(unique.shape[0], device=values.device)
    size = zeros.index_add(0, index, torch.ones_like(values))
    # Measured from the group's lowest score, equal scores differ by exactly 0 and not by a
    # rounding error, which a division by the group's tiny standard deviation would blow up.
    lowest = zeros.scatter_reduce(0, index, values, reduce="amin", include_self=False)
    offset = values - lowest[index]
    mean = zeros.index_add(0, index, offset) / size
    centred = offset - mean[index]
    squares = zeros.index_add(0, index, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(centred, std[index], size[index])
