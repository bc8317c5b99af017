"""From an adapter to a merged model, and what a reader of either computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tasks.data.templates import load_tokenizer
from tasks.models.loading import (
    load_adapted_reward_model,
    load_student,
    new_reward_model,
)


def merge_adapter(base_dir: Path, adapter_dir: Path, merged_dir: Path) -> None:
    """Write base plus adapter as one model: W + (alpha / r) B A, in fp32, because bf16 would round
    the change away.

    Raises:
        ModelError: base and adapter do not fit.
    """
    merged = load_student(base_dir, adapter_dir).merge_and_unload()
    merged.save_pretrained(str(merged_dir))
    load_tokenizer(base_dir).save_pretrained(str(merged_dir))


def merge_reward_adapter(base_dir: Path, adapter_dir: Path, merged_dir: Path) -> None:
    """Write base, adapter and value head as one reward model, in fp32.

    Raises:
        ModelError: base and adapter do not fit, or the adapter has no value head.
    """
    merged = load_adapted_reward_model(base_dir, adapter_dir).merge_and_unload()
    merged.save_pretrained(str(merged_dir))
    load_tokenizer(base_dir).save_pretrained(str(merged_dir))


@torch.no_grad()
def write_reward_model(base_dir: Path, head: Tensor, directory: Path) -> None:
    """Write a reward model of this backbone and a head without bias.

    Args:
        base_dir: a language model.
        head: (H,) weight.
        directory: final path.
    """
    model = new_reward_model(base_dir)
    model.score.weight.copy_(head[None])
    model.score.bias.zero_()
    model.save_pretrained(str(directory))
    load_tokenizer(base_dir).save_pretrained(str(directory))


@torch.no_grad()
def response_logprobs(
    model: torch.nn.Module, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> Tensor:
    """Return the log-probability of each response token by a plain forward pass, shape (T,)."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
    labels = ids[0, len(prompt_ids) :]
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return logprobs
