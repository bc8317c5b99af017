"""Models that answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.backends.cluster import resolve_device
from tasks.backends.generation import EndTokens, TransformersGenerator
from tasks.backends.roles import Row
from tasks.config import GenerationConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.rendering import Renderer

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
