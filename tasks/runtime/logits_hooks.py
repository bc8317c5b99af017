"""What is read from logits while they exist, token by token: soft labels, losses, agreement.

Logits of a large vocabulary never exist for a whole batch, so each of these says what it wants to
know of some response tokens, and the engine hands them over in parts. An object serves verl as the
loss of a role, too; one that only reads has a loss of zero.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tasks.algorithms.distillation_losses import (
    draw_tokens,
    full_kl,
    jsd,
    sampled_kl,
    soft_hard_mean,
    soft_hard_tokens,
    tail_logprob,
    topk_tail_jsd,
    topk_tail_kl,
    topk_with_tail,
)
from tasks.runtime.verl_losses import Loss, floats, n_ranks

# The column of a loss that has a gradient.
LOSS = "token_loss"
FLAG = "use_logits_hook"
TEACHER_LOGPROBS = "teacher_logprobs"
TEACHER_IDS = "teacher_ids"
WEIGHTS = "weights"

LabelKind = Literal["none", "top_k", "sampled", "full"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Tokens:
    """Some of the response tokens of a micro-batch.

    Args:
        data: the micro-batch; its columns are aligned with all its response tokens.
        labels: (m,) the tokens' ids.
        span: which of the response tokens these are.
    """

    data: Any
    labels: Tensor
    span: slice

    def column(self, name: str) -> Tensor | None:
        """Return the part of a column, (m,) or (m, K); None where the batch has no such column."""
        if name not in self.data.keys():  # noqa: SIM118  (a TensorDict iterates over rows)
            return None
        values: Tensor = self.data[name].values()[self.span]
        return values


class LogitsHook(Protocol):
    """Reads logits; ``names`` are its columns."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        """Return columns (m,) or (m, K) for logits (m, V)."""

    def __call__(self, model_output: Any = None, data: Any = None, dp_group: Any = None) -> Loss:
        """Return the loss of a micro-batch."""


class _Reader:
    """Reads only."""

    def __call__(self, model_output: Any = None, data: Any = None, dp_group: Any = None) -> Loss:
        return torch.zeros(()), {}


def _cut(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits of the tokenizer's ids: a vocabulary may be padded behind them."""
    return logits if logits.shape[-1] == vocab_size else logits[..., :vocab_size]


@dataclass(frozen=True)
class TopKReader(_Reader):
    """A teacher's k largest log-probabilities at temperature tau with the mass of the others: (m, k
    + 1), the last of them the tail's, and their ids (m, k)."""

    k: int
    tau: float
    vocab_size: int
    names: ClassVar[tuple[str, ...]] = (TEACHER_LOGPROBS, TEACHER_IDS)

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        top = topk_with_tail(_cut(logits, self.vocab_size), k=self.k, tau=self.tau)
        tail = tail_logprob(top.logprobs)[:, None]
        return {TEACHER_LOGPROBS: torch.cat([top.logprobs, tail], -1), TEACHER_IDS: top.ids}


@dataclass(frozen=True)
class SampleReader(_Reader):
    """k tokens that a teacher draws at temperature tau, (m, k), and their log-probabilities.

    The draws follow from the seed and the rows of the micro-batch, so that the same pass draws the
    same again.
    """

    k: int
    tau: float
    vocab_size: int
    seed: int
    names: ClassVar[tuple[str, ...]] = (TEACHER_LOGPROBS, TEACHER_IDS)

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        place = tokens.data["input_ids"].values().cpu().numpy().tobytes()
        text = f"{self.seed}/{zlib.crc32(place)}/{tokens.span.start}"
        generator = torch.Generator(logits.device).manual_seed(zlib.crc32(text.encode()))
        cut = _cut(logits, self.vocab_size)
        drawn = draw_tokens(cut, k=self.k, tau=self.tau, generator=generator)
        return {TEACHER_LOGPROBS: drawn.logprobs, TEACHER_IDS: drawn.ids}


@dataclass(frozen=True)
class RowReader(_Reader):
    """A teacher's log-probabilities at temperature tau of the whole vocabulary, (m, V)."""

    tau: float
    vocab_size: int
    names: ClassVar[tuple[str, ...]] = (TEACHER_LOGPROBS,)

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        cut = _cut(logits, self.vocab_size).float()
        return {TEACHER_LOGPROBS: torch.log_softmax(cut / self.tau, -1)}


@dataclass(frozen=True)
class LogitsReader(_Reader):
    """The logits as they are, (m, V)."""

    names: ClassVar[tuple[str, ...]] = ("logits",)

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        return {"logits": logits.float()}


@dataclass(frozen=True)
class AgreementReader(_Reader):
    """How a student differs from the teacher's top-k labels at temperature 1: KL (m,), a lower
    bound where k is less than the vocabulary, and whether both prefer the same token (m,)."""

    vocab_size: int
    names: ClassVar[tuple[str, ...]] = ("kl", "same_top")

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        cut = _cut(logits, self.vocab_size)
        logprobs, ids = tokens.column(TEACHER_LOGPROBS), tokens.column(TEACHER_IDS)
        assert logprobs is not None and ids is not None
        kl = topk_tail_kl(logprobs, ids, cut, tau=1.0, direction="forward")
        return {"kl": kl, "same_top": (cut.argmax(-1) == ids[:, 0]).float()}


@dataclass(frozen=True)
class StudentLoss:
    """Soft and hard labels of the response tokens.

    Columns: ``teacher_logprobs`` (T_i, K) at ``tau`` (K = V for full rows), ``teacher_ids`` but for
    full rows, and ``weights`` (T_i,) where responses weigh unequally.

    Args:
        labels: what the teacher's columns hold; none of them: cross-entropy only.
        beta: of the divergence jsd.
        vocab_size: ids of the tokenizer; soft labels know no others.
    """

    labels: LabelKind
    alpha: float
    tau: float
    vocab_size: int
    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    names: ClassVar[tuple[str, ...]] = (LOSS, "token_kl", "token_nll")

    def columns(self, logits: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        logits = logits.float()
        nll = -_logprobs_of(logits, tokens.labels)
        is_soft = self.labels != "none"
        kl = self._divergence(logits, tokens) if is_soft else torch.zeros_like(nll)
        alpha = self.alpha if is_soft else 0.0
        weights = tokens.column(WEIGHTS)
        loss = soft_hard_tokens(kl, nll, alpha=alpha, tau=self.tau, weights=weights)
        return {LOSS: loss, "token_kl": kl.detach(), "token_nll": nll.detach()}

    def _divergence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        student = _cut(logits, self.vocab_size)
        teacher, ids = tokens.column(TEACHER_LOGPROBS), tokens.column(TEACHER_IDS)
        assert teacher is not None
        if self.labels == "full":
            return self._of_full_rows(teacher, student)
        assert ids is not None
        if self.labels == "sampled":
            return sampled_kl(teacher, ids, student, tau=self.tau)
        if self.divergence == "jsd":
            return topk_tail_jsd(teacher, ids, student, beta=self.beta, tau=self.tau)
        direction: Any = self.divergence.removesuffix("_kl")
        return topk_tail_kl(teacher, ids, student, tau=self.tau, direction=direction)

    def _of_full_rows(self, teacher: Tensor, student: Tensor) -> Tensor:
        # Log-probabilities at tau, times tau, are logits whose softmax at tau they are.
        rows = teacher * self.tau
        if self.divergence == "jsd":
            return jsd(rows, student, beta=self.beta, tau=self.tau)
        direction: Any = self.divergence.removesuffix("_kl")
        return full_kl(rows, student, tau=self.tau, direction=direction)

    def __call__(self, model_output: Any = None, data: Any = None, dp_group: Any = None) -> Loss:
        """Return this micro-batch's share of the step's loss, and sums for its metrics."""
        token_loss, token_kl, token_nll = (model_output[name].values() for name in self.names)
        loss, metrics = soft_hard_mean(
            token_loss,
            token_kl,
            token_nll,
            tau=self.tau,
            total_tokens=float(data["batch_num_tokens"]),
        )
        return loss * n_ranks(data), floats(metrics)


def _logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
