"""Candidate responses: sampled once per prompt, with the log-probabilities of what they were
sampled from.

Responses are stored in chunks of prompts, so that a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tasks.algorithms.logprobs import sampling_logprobs
from tasks.config.shared import GenerationConfig, RuntimeConfig, identity_fields
from tasks.data.columns import CandidateChunk, read_chunk, write_chunk
from tasks.data.rendering import Renderer
from tasks.errors import DataError
from tasks.offline_ppo.config import CandidatesConfig
from tasks.runtime.generation import EndTokens, TransformersGenerator
from tasks.runtime.rows import Row
from tasks.runtime.session import resolve_device

#
# A generator that tells from which distribution it sampled.
#
# A temperature other than 1 or a nucleus makes the sampling policy another one than the model. Its
# probabilities are computed from the model's logits, in a pass over the finished responses.

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
        scored: list[Tensor] = [Tensor()] * len(rows)
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
                    scored[index] = values
        finally:
            torch.set_num_threads(threads)
        return scored, kl

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
        per_row = [
            values[: len(row.response_ids)].clone()
            for values, row in zip(logprobs, rows, strict=True)
        ]
        return per_row, kl

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


Progress = Callable[[int, int], None]

# Raised when the same configuration gives other responses.
_VERSION = 1


@dataclass(frozen=True)
class CandidateSource:
    """Who answers, and where the answers are kept.

    Args:
        model_dir: the policy, in transformers format.
        renderer: its renderer.
        runtime: device and threads.
        cache_dir: directory of stored chunks.
        identity: fingerprints of the policy and of the dataset.
    """

    model_dir: Path
    renderer: Renderer
    runtime: RuntimeConfig
    cache_dir: Path
    identity: Sequence[str]


@dataclass(frozen=True)
class CandidateSet:
    """M sampled responses, those of a prompt side by side.

    Args:
        rows: prompt and response of each, token ids as generated.
        texts: the responses, decoded; encoding them again may give other tokens.
        group: (M,) int64, index of the prompt.
        logprobs: M fp32 tensors of shape (T_i,), of the distribution that the tokens were drawn
            from. A pattern and the removal of empty responses change the probability of a whole
            response by a factor 1 / P(kept | prompt), which they leave out.
        truncated: (M,) bool, True = ran out of length before its end of turn.
        counts: ``generated``, ``kept``, ``dropped_empty``, ``dropped_pattern``, ``truncated`` (of
            those kept), ``short_prompts`` (prompts that got fewer responses than asked for).
        temperature: that the last chunk was sampled at.
        kl: mean per token, in nats, of the sampling distribution from the model's own.
    """

    rows: list[Row]
    texts: list[str]
    group: Tensor
    logprobs: list[Tensor]
    truncated: Tensor
    counts: dict[str, int]
    temperature: float
    kl: float


def generate_candidates(
    source: CandidateSource,
    cfg: CandidatesConfig,
    prompts: Sequence[Sequence[int]],
    seed: int,
    progress: Progress = lambda done, total: None,
) -> CandidateSet:
    """Sample responses to all prompts, or read those that were sampled before.

    Every ``cfg.chunk_prompts`` prompts the responses are stored, and a killed run goes on behind
    the last stored ones: it ends with the responses that an uninterrupted run has.

    Args:
        source: the policy.
        cfg: how many, and how; none where ``per_prompt`` is 0.
        prompts: P prompts as token ids, each ending where the answer starts.
        seed: of the sampling.
        progress: called with prompts done and prompts in all.

    Raises:
        DataError: no response of the first chunk could be kept, or an empty prompt.
        ArtifactError: a stored chunk cannot be read.
    """
    run = _SamplingRun(source, cfg, prompts, seed, progress)
    starts = range(0, len(prompts), cfg.chunk_prompts) if cfg.per_prompt else range(0)
    chunks: list[CandidateChunk] = []
    temperature = cfg.temperature
    for index, start in enumerate(starts):
        stop = min(start + cfg.chunk_prompts, len(prompts))
        file = run.directory / f"{index:06d}.parquet"
        if not file.exists():
            write_chunk(file, run.sample(index, range(start, stop), temperature), run.key)
        chunks.append(read_chunk(file, run.key))
        progress(stop, len(prompts))
        temperature = cfg.next_temperature(chunks[-1].temperature, chunks[-1].kl)
    return _collect(chunks, prompts, source.renderer.end_of_turn_id, cfg.temperature)


@dataclass(frozen=True)
class _SamplingRun:
    source: CandidateSource
    cfg: CandidatesConfig
    prompts: Sequence[Sequence[int]]
    seed: int
    progress: Progress

    @cached_property
    def key(self) -> str:
        """Identity of everything that the responses depend on."""
        document = {
            "version": _VERSION,
            "source": list(self.source.identity),
            "renderer": self.source.renderer.fingerprint,
            "config": identity_fields(self.cfg),
            "seed": self.seed,
            "prompts": [list(prompt) for prompt in self.prompts],
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    @property
    def directory(self) -> Path:
        """Where the chunks of this run lie."""
        return self.source.cache_dir / self.key[:16]

    @cached_property
    def sampler(self) -> CandidateSampler:
        """The policy, loaded when something is left to sample."""
        renderer, runtime = self.source.renderer, self.source.runtime
        return CandidateSampler(
            self.source.model_dir,
            EndTokens(renderer.end_of_turn_id, renderer.pad_token_id),
            device=resolve_device(runtime),
            threads=runtime.cpu_threads,
        )

    def sample(self, index: int, prompts: range, temperature: float) -> CandidateChunk:
        """Sample and score the responses of a chunk."""
        how = GenerationConfig(
            temperature=temperature,
            top_p=self.cfg.top_p,
            max_new_tokens=self.cfg.max_new_tokens,
            batch_size=self.cfg.batch_size,
        )
        kept: dict[int, list[tuple[list[int], str]]] = {prompt: [] for prompt in prompts}
        counts: Counter[str] = Counter()
        for attempt in range(self.cfg.max_tries):
            lacking = [p for p in prompts for _ in range(self.cfg.per_prompt - len(kept[p]))]
            if not lacking:
                break
            for prompt, ids in zip(
                lacking, self._draw(index, attempt, lacking, prompts, how), strict=True
            ):
                text = self.source.renderer.decode(ids)
                counts[self._verdict(text)] += 1
                if self._verdict(text) == "kept":
                    kept[prompt].append((ids, text))
        if index == 0 and not counts["kept"]:
            raise self._nothing_kept(counts)
        counts["short_prompts"] = sum(len(kept[p]) < self.cfg.per_prompt for p in prompts)
        return self._scored(kept, counts, how)

    def _draw(
        self, index: int, attempt: int, lacking: list[int], prompts: range, how: GenerationConfig
    ) -> list[list[int]]:
        digest = hashlib.sha256(f"{self.seed}/{index}/{attempt}".encode()).digest()

        def report(done: int, total: int) -> None:
            if attempt == 0 and done < total:
                finished = prompts.start + len(prompts) * done // total
                self.progress(finished, len(self.prompts))

        return self.sampler.generate(
            [self.prompts[p] for p in lacking], how, int.from_bytes(digest[:6], "big"), report
        )

    def _verdict(self, text: str) -> str:
        if not text:
            return "dropped_empty"
        if self.cfg.pattern is not None and not re.search(self.cfg.pattern, text):
            return "dropped_pattern"
        return "kept"

    def _nothing_kept(self, counts: Counter[str]) -> DataError:
        return DataError(
            f"None of {counts.total()} candidate responses could be kept: "
            f"{counts['dropped_empty']} are empty, {counts['dropped_pattern']} do not match "
            f"{self.cfg.pattern!r}",
            "responses that can be kept",
            "correct offline_ppo.candidates.pattern, raise max_tries, or set per_prompt: 0",
        )

    def _scored(
        self,
        kept: dict[int, list[tuple[list[int], str]]],
        counts: Counter[str],
        how: GenerationConfig,
    ) -> CandidateChunk:
        answers = [(prompt, ids, text) for prompt, group in kept.items() for ids, text in group]
        logprobs, kl = self.sampler.score(
            [Row(self.prompts[prompt], ids) for prompt, ids, _ in answers], how
        )
        n_tokens = sum(len(ids) for _, ids, _ in answers)
        return CandidateChunk(
            [prompt for prompt, _, _ in answers],
            [ids for _, ids, _ in answers],
            [text for _, _, text in answers],
            logprobs,
            counts,
            how.temperature,
            kl / max(n_tokens, 1),
        )


def _collect(
    chunks: Sequence[CandidateChunk],
    prompts: Sequence[Sequence[int]],
    end_of_turn_id: int,
    temperature: float,
) -> CandidateSet:
    counts = Counter(
        dict.fromkeys(("kept", "dropped_empty", "dropped_pattern", "short_prompts"), 0)
    )
    for chunk in chunks:
        counts.update(chunk.counts)
    counts["generated"] = counts["kept"] + counts["dropped_empty"] + counts["dropped_pattern"]
    group = [prompt for chunk in chunks for prompt in chunk.prompts]
    responses = [ids for chunk in chunks for ids in chunk.response_ids]
    truncated = [ids[-1] != end_of_turn_id for ids in responses]
    counts["truncated"] = sum(truncated)
    tokens = [sum(map(len, chunk.response_ids)) for chunk in chunks]
    kl = sum(chunk.kl * n for chunk, n in zip(chunks, tokens, strict=True)) / max(sum(tokens), 1)
    return CandidateSet(
        [Row(prompts[p], ids) for p, ids in zip(group, responses, strict=True)],
        [text for chunk in chunks for text in chunk.texts],
        torch.tensor(group, dtype=torch.long),
        [values for chunk in chunks for values in chunk.logprobs],
        torch.tensor(truncated, dtype=torch.bool),
        dict(counts),
        chunks[-1].temperature if chunks else temperature,
        kl,
    )
