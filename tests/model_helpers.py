"""Trained models as the tests read them: with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification


def load_reward_model(path: Path) -> Any:
    """Load a backbone with one score per token, which must have been saved with its head."""
    model, info = AutoModelForTokenClassification.from_pretrained(
        str(path), num_labels=1, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


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
