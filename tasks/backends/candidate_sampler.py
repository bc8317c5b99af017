"""A generator that tells from which distribution it sampled.

A temperature other than 1 or a nucleus makes the sampling policy another one than the model. Its
probabilities are computed from the model's logits, in a pass over the finished responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tasks.algorithms.sampling import sampling_logprobs
from tasks.backends.generation import EndTokens, TransformersGenerator
from tasks.backends.roles import Row
from tasks.config import GenerationConfig

# Logits that exist at a time while responses are scored: 64 MiB in fp32.
_LOGITS_AT_A_TIME = 2**24


class CandidateSampler(TransformersGenerator):
    """Samples from a model and tells from which distribution."""

    def __init__(self, model_dir: Path, tokens: EndTokens, *, device: str, threads: int) -> None:
        super().__init__(model_dir, tokens, device=device, threads=threads)
        # What the model's own settings add (a repetition penalty, min_p) would change the
        # distribution without a trace.
        self._model.generation_config = transformers.GenerationConfig()

    def score(self, rows: Sequence[Row], cfg: GenerationConfig) -> tuple[list[Tensor], float]:
        """Return log-probabilities of responses under the distribution that ``cfg`` samples from.

        Returns:
            One fp32 tensor of shape (T_i,) per row, and the sum over all tokens of the KL
            divergence, in nats, of that distribution from the model's own.

        Raises:
            TrainingError: a token that was not drawn from it.
        """
        found: list[Tensor] = [Tensor()] * len(rows)
        order = sorted(
            range(len(rows)), key=lambda i: (len(rows[i].prompt_ids), tuple(rows[i].prompt_ids))
        )
        kl = 0.0
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            for start in range(0, len(order), cfg.batch_size):
                part = order[start : start + cfg.batch_size]
                logprobs, part_kl = self._score_batch([rows[i] for i in part], cfg)
                kl += part_kl
                for index, values in zip(part, logprobs, strict=True):
                    found[index] = values
        finally:
            torch.set_num_threads(threads)
        return found, kl

    @torch.no_grad()
    def _score_batch(
        self, rows: Sequence[Row], cfg: GenerationConfig
    ) -> tuple[list[Tensor], float]:
        ids, mask, width = self._align(rows)
        cache = self._read_prompts(ids[:, : width - 1], mask[:, : width - 1]) if width > 1 else None
        n_tokens = ids.shape[1] - width
        logprobs = torch.zeros(len(rows), n_tokens)
        kl = 0.0
        vocab_size = self._model.get_input_embeddings().num_embeddings
        step = max(1, _LOGITS_AT_A_TIME // (len(rows) * vocab_size))
        for start in range(0, n_tokens, step):
            stop = min(start + step, n_tokens)
            # The state before a token sits one column left of it.
            span = slice(width - 1 + start, width - 1 + stop)
            output = self._forward(ids, mask, span, cache)
            cache = output.past_key_values
            real = mask[:, width + start : width + stop].bool()
            drawn = ids[:, width + start : width + stop][real]
            result = sampling_logprobs(
                output.logits[real], drawn, temperature=cfg.temperature, top_p=cfg.top_p
            )
            logprobs[:, start:stop][real.cpu()] = result.logprobs.cpu()
            kl += float(result.kl.double().sum())
        found = [
            values[: len(row.response_ids)].clone()
            for values, row in zip(logprobs, rows, strict=True)
        ]
        return found, kl

    def _read_prompts(self, ids: Tensor, mask: Tensor) -> Any:
        """Return the cache of prompts, each of which is computed once."""
        both, copies = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
        distinct, real = both.chunk(2, dim=1)
        output = self._forward(distinct, real, slice(0, ids.shape[1]), None, logits_to_keep=1)
        output.past_key_values.reorder_cache(copies)
        return output.past_key_values

    def _forward(self, ids: Tensor, mask: Tensor, span: slice, cache: Any, **options: Any) -> Any:
        """Run the model over some columns; the cache holds those before."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return self._model(
            input_ids=ids[:, span],
            attention_mask=mask[:, : span.stop],
            position_ids=positions[:, span],
            past_key_values=cache,
            use_cache=True,
            **options,
        )

    def _align(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, int]:
        """Return ids and mask, (B, L), and the column where all responses begin: prompts are padded
        on the left, as for generation."""
        width = max(len(row.prompt_ids) for row in rows)
        length = width + max(len(row.response_ids) for row in rows)
        ids = torch.full((len(rows), length), self._tokens.pad_token_id)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            start = width - len(row.prompt_ids)
            ids[index, start : start + len(row)] = torch.tensor(
                [*row.prompt_ids, *row.response_ids]
            )
            mask[index, start : start + len(row)] = 1
        return ids.to(self._device), mask.to(self._device), width
