"""A local language model as judge, with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.backends.judging import Done, JudgeOutcome, JudgeTask, Sampling
from tasks.backends.speaking import Prompt, Speaker
from tasks.config import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.rendering import Renderer
from tasks.errors import DataError


@dataclass(frozen=True)
class LocalModel:
    """A model directory, and what one judgment may take.

    Args:
        name: how judgments name it.
        max_prompt_tokens: a longer prompt is a failed judgment: half an answer is not judged.
        batch_size: judgments made together.
    """

    name: str
    directory: Path
    max_prompt_tokens: int
    batch_size: int


class LocalJudge:
    """A model directory as judge."""

    def __init__(self, model: LocalModel, sampling: Sampling, runtime: RuntimeConfig) -> None:
        self.model = model
        self.sampling = sampling
        self.runtime = runtime
        self._renderer = Renderer.load(
            model.directory,
            RenderingConfig(
                max_prompt_tokens=model.max_prompt_tokens,
                max_response_tokens=sampling.max_new_tokens,
            ),
        )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Judge in batches; what has no rating is asked again with another seed."""
        speaker = Speaker(self.model.directory, self._renderer, self.runtime)
        for start in range(0, len(tasks), self.model.batch_size):
            batch = tasks[start : start + self.model.batch_size]
            for task, outcome in zip(batch, self._batch(speaker, batch), strict=True):
                done(task, outcome)

    def _batch(self, speaker: Speaker, tasks: Sequence[JudgeTask]) -> list[JudgeOutcome]:
        prompts = [self._prompt(task.messages) for task in tasks]
        outcomes = {
            index: JudgeOutcome("", f"the prompt exceeds {self.model.max_prompt_tokens} tokens")
            for index, prompt in enumerate(prompts)
            if prompt is None
        }
        waiting = {index: prompt for index, prompt in enumerate(prompts) if prompt is not None}
        for attempt in range(self.sampling.rating_attempts):
            if not waiting:
                break
            found = self._ask(speaker, list(waiting.values()), tasks[0].seed + attempt)
            for index, (text, tokens) in zip(list(waiting), found, strict=True):
                earlier = outcomes.get(index, JudgeOutcome(""))
                is_decided = tasks[index].is_decided(text)
                outcomes[index] = JudgeOutcome(
                    text,
                    "" if is_decided else tasks[index].no_decision,
                    requests=earlier.requests + 1,
                    tokens=earlier.tokens + tokens,
                )
                if is_decided:
                    del waiting[index]
            if self.sampling.temperature == 0:
                # Greedy: asked again it would say the same.
                break
        return [outcomes[index] for index in range(len(tasks))]

    def _ask(self, speaker: Speaker, prompts: Sequence[Prompt], seed: int) -> list[tuple[str, int]]:
        cfg = GenerationConfig(
            temperature=self.sampling.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            batch_size=self.model.batch_size,
        )
        replies = speaker.reply(prompts, cfg, seed)
        return [(r.text, len(r.row)) for r in replies]

    def _prompt(self, messages: Prompt) -> Prompt | None:
        """Return a prompt that the template takes and that fits, or None."""
        try:
            rendered = self._renderer.render_prompt(messages)
        except DataError:
            # Templates without a system turn refuse one.
            messages = (Message("user", "\n\n".join(m.content for m in messages)),)
            rendered = self._renderer.render_prompt(messages)
        return None if rendered.cut or rendered.dropped_turns else messages
