"""Configuration of stage sft."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.shared import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    StageConfig,
    check_budget,
    check_shares,
)


class SftConfig(StageConfig):
    """Behaviour cloning: the base model, and the policy that wrote the demo's data."""

    enabled: bool = Field(
        True, description="Off: the model is used as it is, for instance an instruct model."
    )
    model: ModelConfig = ModelConfig()
    responses: Literal["both", "chosen"] = Field(
        "both", description="both: the policy that wrote the data; chosen: its better half."
    )
    epochs: PositiveFloat = Field(
        1.0, description="Passes over the training pairs, unless max_steps ends them."
    )
    max_steps: PositiveInt | None = Field(None, description="Most optimizer steps.")
    batch_pairs: PositiveInt = Field(
        32, description="Pairs of one optimizer step, all ranks together."
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_shares("batch_pairs", self.batch_pairs, self.runtime)
        check_budget(self.rendering, self.runtime, rows=1)
        longest = self.rendering.max_prompt_tokens + self.rendering.max_response_tokens
        if self.model.source == "tiny" and self.model.tiny.max_position_embeddings < longest:
            raise ValueError(
                f"model.tiny.max_position_embeddings {self.model.tiny.max_position_embeddings} is "
                f"less than the {longest} tokens that rendering lets through"
            )
        return self
