"""Adapters between verl's batches and the pure algorithms: the only place that knows verl's names.

verl calls a loss once per micro-batch on every rank, adds the results up and averages gradients
over ranks. The algorithms return this micro-batch's share of the whole step's loss, so every
adapter multiplies by the rank count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.importance import (
    LikelihoodKind,
    RatioLevel,
    likelihood_weights,
    sequence_log_ratio,
)
from tasks.algorithms.kl import KLKind
from tasks.algorithms.masking import LossMode, Totals, aggregate, masked_sum
from tasks.algorithms.policy_losses import (
    dpo_loss,
    entropy_loss,
    kl_loss,
    value_loss,
    weighted_likelihood_loss,
)
from tasks.algorithms.reward_losses import bradley_terry_loss, split_interleaved

# What every loss reads from verl's micro-batches.

Loss = tuple[Tensor, dict[str, float]]


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Return metrics as plain numbers, read from the device at once."""
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


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


def of_responses(values: Any, data: Any) -> Tensor:
    """Return jagged values of prompt and response tokens as (B, T), those of the response."""
    # verl reads its environment when it is imported, and a session, which imports this, sets it.
    from verl.workers.utils.padding import no_padding_2_padding

    found: Tensor = no_padding_2_padding(values, data)
    return found


def cloning_loss(model_output: Any = None, data: Any = None, dp_group: Any = None) -> Loss:
    """Negative log-likelihood of the response tokens, averaged over all tokens of the step."""
    mask = response_mask(data)
    token_loss = -of_responses(model_output["log_probs"], data)
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
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    *,
    label_smoothing: float,
    center_coef: float,
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
        weights=weights,
        margins=_of_pairs(data, "margin"),
        trust=_of_pairs(data, "trust"),
        label_smoothing=label_smoothing,
        center_coef=center_coef,
    )
    return loss * n_ranks(data), floats(metrics)


def _of_pairs(data: Any, column: str) -> Tensor | None:
    """Return a column of one number per row as (P,), from the first row of each pair."""
    if column not in data.keys():  # noqa: SIM118  (a TensorDict iterates over rows)
        return None
    values: Tensor = data[column].values()[0::2]
    return values


# Losses of actor and critic.


def actor_loss(
    formula: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    columns: Sequence[str],
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    *,
    mode: LossMode,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k2",
) -> Loss:
    """Any policy loss, with entropy bonus and KL from the reference where they are on.

    Args:
        formula: ``formula(logprobs, mask=, totals=, **columns)``, all tensors (B, T), gives this
            micro-batch's share of the step's loss, and metrics that add up.
        columns: of the batch that it reads; the KL reads ``ref_logprobs``.
        mode: how token losses are averaged.
        entropy_coef: bonus per nat of entropy.
        kl_coef, kl_kind: loss per nat of KL, and its estimator.
    """
    mask, counts = response_mask(data), totals(data, mode)
    logprobs = of_responses(model_output["log_probs"], data)
    frozen = {name: padded(data, name) for name in columns}
    loss, metrics = formula(logprobs, mask=mask, totals=counts, **frozen)
    if entropy_coef > 0.0:
        entropy = of_responses(model_output["entropy"], data)
        bonus, added = entropy_loss(entropy, mask, coef=entropy_coef, totals=counts)
        loss, metrics = loss + bonus, metrics | added
    if kl_coef > 0.0:
        ref = padded(data, "ref_logprobs")
        term, added = kl_loss(logprobs, ref, mask, kind=kl_kind, coef=kl_coef, totals=counts)
        loss, metrics = loss + term, metrics | added
    return loss * n_ranks(data), floats(metrics)


def likelihood_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: LikelihoodKind,
    level: RatioLevel,
    clip_range: float,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted log-likelihood, whose weights follow the current policy, as their papers have it."""
    ratio = sequence_log_ratio(logprobs, behavior_logprobs, mask, level=level)
    weights = likelihood_weights(kind, ratio, advantages, mask, clip_range=clip_range)
    return weighted_likelihood_loss(logprobs, advantages, weights, mask, totals=totals)


def preference_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO over interleaved rows: chosen, rejected, chosen, ..."""
    chosen, rejected = split_interleaved(masked_sum(logprobs - ref_logprobs, mask, dim=1))
    loss, metrics = dpo_loss(
        chosen,
        rejected,
        beta=beta,
        label_smoothing=label_smoothing,
        total_pairs=totals.sequences / 2,
    )
    # Counted per pair, unlike entropy and KL.
    return loss, {f"dpo_{name}": value for name, value in metrics.items()}


def critic_loss(
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    *,
    clip_range: float,
    mode: LossMode,
) -> Loss:
    """Clipped squared error of the values; columns ``old_values`` and ``returns``."""
    loss, metrics = value_loss(
        of_responses(model_output["values"], data),
        padded(data, "old_values"),
        padded(data, "returns"),
        response_mask(data),
        clip_range=clip_range,
        totals=totals(data, mode),
    )
    return loss * n_ranks(data), floats(metrics)
