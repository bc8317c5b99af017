"""Configuration of candidate responses: more trajectories than the dataset stores."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from tasks.config_shared import PositiveFloat, PositiveInt, RenderingConfig, Section, setting


class CandidatesConfig(Section):
    """Responses sampled once, before training, by a policy whose probabilities are then known
    exactly."""

    per_prompt: int = Field(0, ge=0, description="Candidate responses per prompt; 0 is off.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Nucleus: share of the probability that is sampled from."
    )
    max_new_tokens: PositiveInt = Field(64, description="Longest candidate.")
    batch_size: PositiveInt = setting(128, description="Responses generated at a time.")
    chunk_prompts: PositiveInt = Field(
        64, description="Prompts after which the responses are stored and the temperature is set."
    )
    pattern: str | None = Field(
        None,
        description="Regular expression that must be found in a response; ^ and $ anchor it.",
    )
    max_tries: PositiveInt = Field(
        3, description="Rounds of sampling for prompts that lack responses, the first included."
    )
    kl_bound: PositiveFloat | None = Field(
        None,
        description="Lower the temperature for the next chunk where the KL divergence per token of "
        "what was sampled from, from the model at temperature 1, exceeds this.",
    )
    temperature_scale: float = Field(
        0.9, gt=0.0, lt=1.0, description="Factor on the temperature when kl_bound is exceeded."
    )
    min_temperature: PositiveFloat = Field(1.0, description="Where that ends.")

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.pattern is None:
            return self
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"pattern {self.pattern!r} is not a regular expression: {error}; correct it, or "
                "put a backslash before characters that stand for themselves"
            ) from error
        return self

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        if self.kl_bound is None:
            return self
        # Below temperature 1 the divergence grows as the temperature falls.
        if not 1.0 <= self.min_temperature < self.temperature:
            raise ValueError(
                f"kl_bound lowers the temperature from {self.temperature} to at least "
                f"min_temperature {self.min_temperature}, which brings it closer to the model only "
                "above 1; set 1 <= min_temperature < temperature, or leave kl_bound out"
            )
        return self

    def next_temperature(self, temperature: float, kl: float) -> float:
        """Return the temperature of the chunk after one with this KL divergence per token."""
        if self.kl_bound is None or kl <= self.kl_bound:
            return temperature
        return max(self.min_temperature, temperature * self.temperature_scale)


def check_candidates(candidates: CandidatesConfig, rendering: RenderingConfig) -> None:
    """Refuse candidates that may become longer than the responses that the stage is planned for.

    Raises:
        ValueError: naming both limits.
    """
    if candidates.per_prompt and candidates.max_new_tokens > rendering.max_response_tokens:
        raise ValueError(
            f"candidates.max_new_tokens {candidates.max_new_tokens} exceeds "
            f"rendering.max_response_tokens {rendering.max_response_tokens}; lower the one or "
            "raise the other"
        )
