"""Adapters between verl's batches and the pure algorithms: the only place that knows verl's names.

verl calls a loss once per micro-batch on every rank, adds the results up and averages gradients
over ranks. The algorithms return this micro-batch's share of the whole step's loss, so every
adapter multiplies by the rank count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from tasks.algorithms.masking import aggregate
from tasks.algorithms.reward_losses import (
    PairRegularization,
    PairTargets,
    bradley_terry_loss,
    split_interleaved,
)
from tasks.backends.verl_batches import Loss, floats, n_ranks, response_mask, totals


def cloning_loss(model_output: Any = None, data: Any = None, dp_group: Any = None) -> Loss:
    """Negative log-likelihood of the response tokens, averaged over all tokens of the step."""
    mask = response_mask(data)
    token_loss = -no_padding_2_padding(model_output["log_probs"], data)
    loss = aggregate(token_loss, mask, totals(data, "token-mean"))
    return loss * n_ranks(data), {"nll_mean": float(loss.detach())}


def last_token_scores(values: Any) -> Tensor:
    """Return the score at the last real token of each row, by index.

    Args:
        values: jagged (B, L_i), one value per token of prompt and response.

    Returns:
        (B,) fp32.
    """
    scores: Tensor = values.values()[values.offsets()[1:] - 1]
    return scores.float()


def pairwise_loss(
    regularization: PairRegularization,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
) -> Loss:
    """Bradley-Terry loss over interleaved rows: chosen, rejected, chosen, rejected, ...

    Columns of one number per row, the same for both rows of a pair: ``weight``, ``margin``,
    ``trust``, where the batch has them; scalar ``total_weight`` with the first.
    """
    chosen, rejected = split_interleaved(last_token_scores(model_output["values"]))
    weights = _of_pairs(data, "weight")
    total = data["global_batch_size"] / 2 if weights is None else data["total_weight"]
    loss, metrics = bradley_terry_loss(
        chosen,
        rejected,
        total_pairs=float(total),
        targets=PairTargets(weights, _of_pairs(data, "margin"), _of_pairs(data, "trust")),
        regularization=regularization,
    )
    return loss * n_ranks(data), floats(metrics)


def _of_pairs(data: Any, column: str) -> Tensor | None:
    """Return a column of one number per row as (P,), from the first row of each pair."""
    if column not in data.keys():  # noqa: SIM118  (a TensorDict iterates over rows)
        return None
    values: Tensor = data[column].values()[0::2]
    return values
