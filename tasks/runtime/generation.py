"""Generation: one interface for probes, teacher responses and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.config.shared import GenerationConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.rendering import Renderer
from tasks.errors import DataError
from tasks.models.loading import load_causal_lm
from tasks.runtime.rows import Row
from tasks.runtime.session import resolve_device


@dataclass(frozen=True)
class EndTokens:
    """Token ids that batched generation needs."""

    end_of_turn_id: int
    pad_token_id: int


class TransformersGenerator:
    """Samples from a model directory with transformers, in this process."""

    def __init__(self, model_dir: Path, tokens: EndTokens, *, device: str, threads: int) -> None:
        self._device = torch.device(device)
        self._model: Any = load_causal_lm(model_dir).to(self._device)
        self._tokens = tokens
        self._threads = threads

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        cfg: GenerationConfig,
        seed: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[list[int]]:
        """Return one response per prompt, as token ids up to and including the end of turn.

        A response that ran out of length has no end-of-turn token: nothing is forced onto it.

        Args:
            prompts: token ids, each ending with the generation prompt.
            cfg: temperature 0 is greedy.
            seed: of the sampling; the same prompts and seed give the same responses.
            progress: called with prompts done and prompts in all.

        Raises:
            DataError: an empty prompt.
        """
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise DataError(
                    f"Prompt {index} has no tokens", "a rendered prompt", "render it first"
                )
        responses: list[list[int]] = [[] for _ in prompts]
        # Prompts of like length together: less padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for start in range(0, len(order), cfg.batch_size):
                    part = order[start : start + cfg.batch_size]
                    found = self._generate_batch([prompts[i] for i in part], cfg)
                    for index, response in zip(part, found, strict=True):
                        responses[index] = response
                    progress(start + len(part), len(order))
        finally:
            torch.set_num_threads(threads)
        return responses

    @torch.no_grad()
    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], cfg: GenerationConfig
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._tokens.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if cfg.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": cfg.temperature,
                "top_p": cfg.top_p,
                "top_k": 0,
            }
        output = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=cfg.max_new_tokens,
            eos_token_id=self._tokens.end_of_turn_id,
            pad_token_id=self._tokens.pad_token_id,
            **sampling,
        )
        return [self._cut(row) for row in output[:, width:].tolist()]

    def _cut(self, response: list[int]) -> list[int]:
        end = self._tokens.end_of_turn_id
        return response[: response.index(end) + 1] if end in response else response


# Models that answer.

Prompt = tuple[Message, ...]


@dataclass(frozen=True)
class Reply:
    """What a model said.

    Args:
        row: prompt and response as generated; decoding and encoding again may give other tokens.
        text: the response, decoded.
    """

    row: Row
    text: str


class Speaker:
    """A model that answers."""

    def __init__(self, model_dir: Path, renderer: Renderer, runtime: RuntimeConfig) -> None:
        self._renderer = renderer
        self._generator = TransformersGenerator(
            model_dir,
            EndTokens(renderer.end_of_turn_id, renderer.pad_token_id),
            device=resolve_device(runtime),
            threads=runtime.cpu_threads,
        )

    def reply(
        self,
        prompts: Sequence[Prompt],
        cfg: GenerationConfig,
        seed: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Reply]:
        """Return one reply per prompt; progress gets prompts done and prompts in all."""
        rendered = [self._renderer.prompt_ids(prompt)[0] for prompt in prompts]
        found = self._generator.generate(rendered, cfg, seed, progress)
        return [
            Reply(Row(prompt, response), self._renderer.decode(response))
            for prompt, response in zip(rendered, found, strict=True)
        ]
