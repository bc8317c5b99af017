"""Runs a vocabulary head on the states that predict a response token, in parts where the logits of
all of them would be large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tasks.backends.logits_hooks import LOSS

# Logits that exist at a time: 64 MiB in fp32, of which a loss holds a few copies.
LOGITS_AT_A_TIME = 2**24

Columns = dict[str, Tensor]
ColumnsOf = Callable[[Tensor, slice], Columns]
# What some models do to logits behind the head; in parts the head alone would be missing it.
_AFTER_HEAD = ("logits_scaling", "final_logit_softcapping", "logit_scale")


def head_is_last(config: Any) -> bool:
    """Return whether a model's logits are what its head returns."""
    return all(getattr(config, name, None) in (None, 1, 1.0) for name in _AFTER_HEAD)


@dataclass
class HeadReading:
    """What one forward pass reads from the logits.

    Args:
        slots: (M,) of the flattened positions of the model's input: those before response tokens.
        before_response: (M,) the same among the N tokens of the rows, end to end.
        columns_of: reads the logits of some of the M tokens.
        in_parts: do not compute the logits of all of them at once.
        found: columns of all M tokens, once the head ran in parts.
        is_done: the head has had its states.
    """

    slots: Tensor
    before_response: Tensor
    columns_of: ColumnsOf
    in_parts: bool
    found: Columns = field(default_factory=dict)
    is_done: bool = False

    def pick(self, head: Any, states: Tensor) -> Tensor:
        """Return the states that the head itself has to see, (1, M, H), or none of them, (1, 0, H),
        where the parts are done here."""
        self.is_done = True
        picked = states.flatten(0, 1)[self.slots]
        if not self.in_parts:
            return picked[None]
        self.found = read_in_parts(head, picked, self.columns_of)
        return picked[None, :0]

    def columns(self, logits: Tensor) -> Columns:
        """Return the columns of all M tokens, for what the model returned for `pick`."""
        if not self.in_parts:
            return self.columns_of(logits[0], slice(0, len(self.slots)))
        if torch.is_grad_enabled():
            # The gradient has to pass through the model's own output, to which FSDP ties its hooks.
            self.found[LOSS] = self.found[LOSS] + logits.sum()
        return self.found


def read_in_parts(head: Any, states: Tensor, columns_of: ColumnsOf) -> Columns:
    """Return columns of M tokens without ever holding the logits of all of them.

    Where a gradient is wanted, only the column `LOSS` has one.

    Args:
        head: the vocabulary head.
        states: (M, H).
        columns_of: reads logits.
    """
    vocabulary = head.weight.shape[0]
    step = max(1, LOGITS_AT_A_TIME // vocabulary)
    spans = [slice(i, min(i + step, len(states))) for i in range(0, len(states), step)]
    is_trained = any(parameter.requires_grad for parameter in head.parameters())
    if torch.is_grad_enabled() and not is_trained:
        others: dict[str, list[Tensor]] = {}
        loss = _FrozenHead.apply(  # type: ignore[no-untyped-call]
            states, head.forward, columns_of, spans, others
        )
        return {LOSS: loss} | {name: torch.cat(parts) for name, parts in others.items()}
    parts = [
        checkpoint(_columns_of_part, head.forward, states[s], columns_of, s, use_reentrant=False)
        if torch.is_grad_enabled()
        else _columns_of_part(head.forward, states[s], columns_of, s)
        for s in spans
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _columns_of_part(
    project: Callable[[Tensor], Tensor], states: Tensor, columns_of: ColumnsOf, span: slice
) -> Columns:
    return columns_of(project(states), span)


class _FrozenHead(torch.autograd.Function):
    """Computes the gradient of each token's loss together with the loss, part by part.

    A token's loss depends on its own state only, so that its gradient is known up to the factor
    that comes in the backward pass, and no logits are computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        project: Callable[[Tensor], Tensor],
        columns_of: ColumnsOf,
        spans: list[slice],
        others: dict[str, list[Tensor]],
    ) -> Tensor:
        gradients, losses = torch.empty_like(states), []
        for span in spans:
            with torch.enable_grad():
                part = states[span].detach().requires_grad_()
                columns = columns_of(project(part), span)
                loss = columns.pop(LOSS)
                (gradients[span],) = torch.autograd.grad(loss.sum(), part)
            losses.append(loss.detach())
            for name, values in columns.items():
                others.setdefault(name, []).append(values.detach())
        ctx.save_for_backward(gradients)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        return gradients * grads[0][:, None].to(gradients.dtype), None, None, None, None


def label_logprobs(
    logits: Tensor, labels: Tensor, at_a_time: int = LOGITS_AT_A_TIME, **_: Any
) -> Tensor:
    """Return log softmax of the labels, in fp32.

    Computed for as many tokens together as ``at_a_time`` logits are, and for the backward pass
    again, so that of all logits there is never an fp32 copy.

    Args:
        logits: (N, V).
        labels: (N,) token ids.
        at_a_time: logits; more of them take more memory and fewer operations.

    Returns:
        (N,) fp32.
    """
    step = max(1, at_a_time // logits.shape[1])
    if len(labels) <= step:
        return _logprobs_of_part(logits, labels)
    parts = [
        checkpoint(
            _logprobs_of_part, logits[i : i + step], labels[i : i + step], use_reentrant=False
        )
        for i in range(0, len(labels), step)
    ]
    return torch.cat(parts)


def _logprobs_of_part(logits: Tensor, labels: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
