"""Models that answer, and the reward model that scores what they said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tasks.backends.cluster import resolve_device
from tasks.backends.generation import EndTokens, TransformersGenerator
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session
from tasks.config import GenerationConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.rendering import Renderer

REWARD = "reward"
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

    def reply(self, prompts: Sequence[Prompt], cfg: GenerationConfig, seed: int) -> list[Reply]:
        """Return one reply per prompt."""
        rendered = [self._renderer.prompt_ids(prompt)[0] for prompt in prompts]
        found = self._generator.generate(rendered, cfg, seed)
        return [
            Reply(Row(prompt, response), self._renderer.decode(response))
            for prompt, response in zip(rendered, found, strict=True)
        ]


@dataclass(frozen=True)
class RewardJudge:
    """The reward model as a judge.

    Args:
        session: workers; `load` puts the reward model into them.
        statistics: ``mean`` and ``std`` of its scores on the training split.
    """

    session: Session
    statistics: Mapping[str, float]

    @classmethod
    def load(
        cls, session: Session, model_dir: Path, statistics: Mapping[str, float]
    ) -> RewardJudge:
        """Put the reward model into the workers."""
        session.load(RoleSpec(REWARD, "value_model", str(model_dir), trained_head=True))
        return cls(session, statistics)

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Return (N,) scores in standard deviations of the training scores."""
        raw = self.session.scores(REWARD, rows)
        return (raw - self.statistics["mean"]) / self.statistics["std"]
