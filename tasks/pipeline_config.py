"""Configuration: one frozen model per stage, nested by concern.

A YAML file has one section per stage and three shared ones: ``seed``, ``runtime`` and
``rendering`` at the top level are defaults for every stage that has such a field and does not
set it. Unknown keys are errors. Fields marked with ``setting`` do not change what a stage
produces (addresses, thread counts, logging) and stay out of its fingerprint.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tasks.ablation.config import AblationConfig
from tasks.config.shared import PositiveInt, Section, TrackingConfig, setting
from tasks.distill.config import DistillConfig
from tasks.evaluate.config import EvaluateConfig
from tasks.ingest.config import IngestConfig
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.reward_model.config import RewardModelConfig
from tasks.sft.config import SftConfig


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
