"""Configuration: one frozen model per stage, nested by concern.

A YAML file has one section per stage and three shared ones: ``seed``, ``runtime`` and
``rendering`` at the top level are defaults for every stage that has such a field and does not
set it. Unknown keys are errors. Fields marked with ``setting`` do not change what a stage
produces (addresses, thread counts, logging) and stay out of its fingerprint.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from tasks.ablation.config import AblationConfig, MethodConfig
from tasks.config.shared import (
    CheckpointConfig,
    GenerationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    Section,
    Seed,
    Share,
    StageConfig,
    TinyModelConfig,
    check_budget,
    check_shares,
    setting,
)
from tasks.distill.config import (
    DistillConfig,
    ModelCardConfig,
    SoftLabelConfig,
    StudentLoraConfig,
    StudentReportConfig,
)
from tasks.evaluate.config import (
    AnswersConfig,
    EndpointConfig,
    EvaluateConfig,
    GateConfig,
    JudgingConfig,
    PromotionConfig,
)
from tasks.ingest.config import (
    DemoWorldConfig,
    IngestConfig,
    LengthLimitsConfig,
    SourceConfig,
    SplitConfig,
    TokenColumnsConfig,
)
from tasks.offline_ppo.config import (
    AdvantageConfig,
    BehaviorConfig,
    CriticConfig,
    ImportanceConfig,
    OfflinePPOConfig,
    PolicyLossConfig,
    RewardConfig,
    WeightSearchConfig,
)
from tasks.reward_model.config import (
    HeldOutConfig,
    LabelNoiseConfig,
    PairLossConfig,
    RewardComponentConfig,
    RewardModelConfig,
)

__all__ = [
    "STAGES",
    "AblationConfig",
    "AdvantageConfig",
    "AnswersConfig",
    "BehaviorConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DemoWorldConfig",
    "DistillConfig",
    "EndpointConfig",
    "EvaluateConfig",
    "GateConfig",
    "GenerationConfig",
    "HeldOutConfig",
    "ImportanceConfig",
    "IngestConfig",
    "JudgingConfig",
    "LabelNoiseConfig",
    "LengthLimitsConfig",
    "LoraConfig",
    "MethodConfig",
    "ModelCardConfig",
    "ModelConfig",
    "OfflinePPOConfig",
    "OptimizerConfig",
    "PairLossConfig",
    "PipelineConfig",
    "PolicyLossConfig",
    "PositiveFloat",
    "PositiveInt",
    "PromotionConfig",
    "RenderingConfig",
    "RewardComponentConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RuntimeConfig",
    "Section",
    "Seed",
    "SftConfig",
    "Share",
    "SoftLabelConfig",
    "SourceConfig",
    "SplitConfig",
    "Stage",
    "StageConfig",
    "StudentLoraConfig",
    "StudentReportConfig",
    "TinyModelConfig",
    "TokenColumnsConfig",
    "TrackingConfig",
    "WeightSearchConfig",
    "identity_fields",
]

# In the chain's order; each is a section of `PipelineConfig` and a record of `flows.stages`.
Stage = Literal["ingest", "sft", "reward_model", "offline_ppo", "distill", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)


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


class TrackingConfig(Section):
    """Where runs are recorded. The defaults need no server."""

    tracking_uri: str | None = setting(
        None, description="MLflow address; null is the workspace's database."
    )
    experiment: str = setting("rlhf-flows", description="MLflow experiment.")
    system_metrics_seconds: PositiveFloat | None = setting(
        10.0, description="How often load, memory, disk and network are recorded; null is never."
    )


class PipelineConfig(Section):
    """The chain."""

    name: str = setting("rlhf", min_length=1, description="Name of the MLflow run of the chain.")
    reuse: bool = setting(True, description="Reuse a stage whose fingerprint exists and verifies.")
    stage_timeout_seconds: PositiveInt | None = setting(
        None, description="A stage that takes longer ends as failed; a retry continues it."
    )
    tracking: TrackingConfig = TrackingConfig()
    ingest: IngestConfig = IngestConfig()
    sft: SftConfig = SftConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    offline_ppo: OfflinePPOConfig = OfflinePPOConfig()
    distill: DistillConfig = DistillConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    ablation: AblationConfig | None = Field(
        None, description="Compare methods of offline_ppo instead of running the chain."
    )

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        known = {f"reward_model.{name}" for name in self.reward_model.components}
        for where, section in self._policies().items():
            wanted = {n for n in section.reward.components if n.startswith("reward_model.")}
            if wanted - known:
                raise ValueError(
                    f"{where}.reward.components names {sorted(wanted - known)}, but "
                    f"reward_model.components makes {sorted(known)}"
                )
        return self

    def _policies(self) -> dict[str, OfflinePPOConfig]:
        """Return every config of stage offline_ppo that may run, by where it comes from."""
        if self.ablation is None:
            return {"offline_ppo": self.offline_ppo}
        if self.ablation.stage == "distill":
            self.ablation.resolve(self.distill)
            return {"offline_ppo": self.offline_ppo}
        return {
            f"ablation method {name!r}: offline_ppo": section
            for (name, _), section in self.ablation.resolve(self.offline_ppo).items()
        }


def identity_fields(section: BaseModel) -> dict[str, Any]:
    """Return the fields of a section that change what a stage produces, nested, as plain JSON
    values."""
    plain = section.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        value = getattr(section, name)
        kept[name] = identity_fields(value) if isinstance(value, BaseModel) else plain[name]
    return kept
