"""Configuration of stage distill, by concern."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.shared import (
    CheckpointConfig,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    Section,
    Share,
    StageConfig,
    StudentLoraConfig,
    check_budget,
    check_shares,
    setting,
)


class SoftLabelConfig(Section):
    """What is kept of the teacher's distributions, and how the student is compared with them."""

    kind: Literal["top_k", "sampled", "full"] = Field(
        "top_k",
        description="Per token: the k best tokens and the mass of the others, k tokens drawn from "
        "the teacher, or all of a small vocabulary.",
    )
    top_k: PositiveInt = 16
    samples: PositiveInt = Field(32, description="Tokens drawn, of kind sampled.")
    tau: PositiveFloat = 2.0
    alpha: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Weight of the soft loss; the rest is cross-entropy. At 0 the teacher labels "
        "nothing.",
    )
    loss: Literal["forward_kl", "reverse_kl", "jsd", "sequence"] = Field(
        "forward_kl",
        description="sequence: cross-entropy on the teacher's own responses, without soft labels.",
    )
    jsd_beta: float = Field(
        0.5, ge=0.0, le=1.0, description="The teacher's share of the mixture, of loss jsd."
    )
    max_cache_gib: PositiveFloat = setting(
        20.0, description="Labels that would take more on the disk are refused."
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "sampled" and self.loss in ("reverse_kl", "jsd"):
            raise ValueError(
                f"kind sampled estimates the forward KL only, not {self.loss}; choose kind top_k "
                "or loss forward_kl"
            )
        return self

    @property
    def is_used(self) -> bool:
        """Whether the loss reads any soft label."""
        return self.alpha > 0.0 and self.loss != "sequence"


class StudentReportConfig(Section):
    """The student against base and teacher, when it is done."""

    prompts: int = Field(200, ge=0, description="Prompts of the test split; 0 leaves it out.")
    max_new_tokens: PositiveInt = 64


class ModelCardConfig(Section):
    """What the model card says and nothing else knows."""

    license: str | None = Field(None, description="Licence of the student, as the hub names it.")
    base_license: str | None = Field(None, description="Of the base; null: as its own card says.")
    data_license: str | None = Field(None, description="Of the data.")


class DistillConfig(StageConfig):
    """The aligned policy teaches a LoRA student."""

    student: Literal["base", "model"] = Field(
        "base", description="Adapter on the chain's base, or on `model`."
    )
    model: ModelConfig | None = None
    data: Literal["teacher", "chosen", "all", "mixture"] = Field(
        "teacher",
        description="Responses the student learns on: the teacher's own, the stored chosen ones, "
        "all stored ones, or the teacher's and the chosen ones.",
    )
    min_reward_quantile: Share = Field(
        0.0,
        description="Responses of the teacher whose reward is below this quantile of them are left "
        "out.",
    )
    reward_weighting: Literal["none", "agreement"] = Field(
        "none",
        description="agreement: responses about which teacher and reward model agree weigh more.",
    )
    lora: StudentLoraConfig = StudentLoraConfig()
    soft_labels: SoftLabelConfig = SoftLabelConfig()
    generation: GenerationConfig = GenerationConfig()
    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    batch_rows: PositiveInt = 64
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: StudentReportConfig = StudentReportConfig()
    card: ModelCardConfig = ModelCardConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def uses_teacher_text(self) -> bool:
        """Whether the teacher writes responses."""
        return self.data in ("teacher", "mixture")

    @model_validator(mode="after")
    def _check_student(self) -> Self:
        check_shares("batch_rows", self.batch_rows, self.runtime)
        check_budget(self.rendering, self.runtime, rows=1)
        if (self.student == "model") != (self.model is not None):
            raise ValueError("give `model` exactly when `student` is 'model'")
        if self.model is not None and self.model.source == "tiny":
            raise ValueError("a tiny student would have another tokenizer than its teacher")
        return self

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if self.soft_labels.loss == "sequence" and self.data != "teacher":
            raise ValueError(
                f"soft_labels.loss sequence learns from the teacher's responses, and data is "
                f"{self.data!r}; set data: teacher, or soft_labels.alpha: 0 for plain cloning"
            )
        if self.min_reward_quantile and not self.uses_teacher_text:
            raise ValueError(
                f"min_reward_quantile filters the teacher's responses, of which data "
                f"{self.data!r} has none; take it out, or set data: teacher or mixture"
            )
        return self
