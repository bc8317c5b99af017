"""Adapters between verl's batches and the pure algorithms: the only place that knows verl's names.

verl calls a loss once per micro-batch on every rank, adds the results up and averages gradients
over ranks. The algorithms return this micro-batch's share of the whole step's loss, so every
adapter multiplies by the rank count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from tasks.algorithms.distillation_losses import soft_hard_loss, topk_tail_kl
from tasks.algorithms.masking import aggregate
from tasks.algorithms.reward_losses import (
    PairRegularization,
    PairTargets,
    bradley_terry_loss,
    split_interleaved,
)
from tasks.backends.micro_batches import layout_of
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


def _positions_before_response(data: Any) -> Tensor:
    """Return the flat positions whose logits predict the response tokens, shape (N,)."""
    offsets = data["input_ids"].offsets()
    prompt_lengths = data["prompts"].offsets().diff()
    starts = (offsets[:-1] + prompt_lengths - 1).tolist()
    ends = (offsets[1:] - 1).tolist()
    spans = [torch.arange(a, b, device=offsets.device) for a, b in zip(starts, ends, strict=True)]
    return torch.cat(spans)


def _token_kl(data: Any, logits: Tensor, tau: float) -> Tensor:
    """Return the divergence from the teacher at each response token, shape (M,), for logits (M,
    V)."""
    teacher = data["teacher_logprobs"].values(), data["teacher_ids"].values()
    return topk_tail_kl(*teacher, logits, tau=tau)


def distillation_loss(
    alpha: float,
    tau: float,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    student_logits: Tensor | None = None,
) -> Any:
    """Soft and hard labels; columns ``teacher_logprobs`` (T_i, K) at ``tau`` and ``teacher_ids``.

    verl calls it twice per micro-batch: with ``student_logits`` for the per-token divergence, which
    exists only while the logits do, and then as the loss. The logits are (1, N, V), of all tokens,
    or, where rows are merged, (1, M, V), of those before the response tokens.
    """
    if student_logits is not None:
        if layout_of(data) is not None:
            return {"token_kl": _token_kl(data, student_logits[0], tau)[None]}
        positions = _positions_before_response(data)
        token_kl = _token_kl(data, student_logits[0, positions], tau)
        all_tokens = torch.zeros(student_logits.shape[1], device=token_kl.device)
        return {"token_kl": all_tokens.index_put((positions,), token_kl)[None]}
    loss, metrics = soft_hard_loss(
        no_padding_2_padding(model_output["token_kl"], data),
        -no_padding_2_padding(model_output["log_probs"], data),
        response_mask(data),
        alpha=alpha,
        tau=tau,
        total_tokens=float(data["batch_num_tokens"]),
    )
    return loss * n_ranks(data), floats(metrics)


def top_k_hook(
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    student_logits: Tensor | None = None,
    *,
    k: int,
    tau: float,
) -> Any:
    """Return a teacher's k largest log-probabilities per token, or a zero loss when called as a
    loss.

    Args:
        student_logits: (1, N, V) logits of the tokens of the micro-batch that have any.
        k: entries kept per token.
        tau: temperature of the softmax.
    """
    if student_logits is None:
        return torch.zeros(()), {}
    top = torch.log_softmax(student_logits.float() / tau, -1).topk(k, -1)
    columns = {f"logprob_{i}": top.values[..., i] for i in range(k)}
    return columns | {f"id_{i}": top.indices[..., i] for i in range(k)}
