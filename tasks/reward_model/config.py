"""Configuration of stage reward_model, by concern."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.shared import (
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    Section,
    StageConfig,
    changed_fields,
    check_budget,
    check_shares,
)

MAX_NAME_CHARS = 40
# What scoring a file adds by itself.
RESERVED_NAMES = frozenset({"raw", "disagreement", "error"})


class RewardComponentConfig(Section):
    """What one component of the reward learns from."""

    subsets: tuple[str, ...] | None = Field(
        None, min_length=1, description="Subsets whose pairs it learns from; null is all."
    )


class PairLossConfig(Section):
    """Terms of the Bradley-Terry loss."""

    label_smoothing: float = Field(
        0.0, ge=0.0, lt=0.5, description="Assumed share of wrong labels in the loss."
    )
    center_coef: float = Field(
        0.0, ge=0.0, description="Weight of (r_chosen + r_rejected)^2: pins the offset."
    )
    margin_scale: float = Field(
        0.0, ge=0.0, description="Times the rated margin of a pair, inside the sigmoid; 0 is off."
    )


class LabelNoiseConfig(Section):
    """What becomes of pairs whose label members that did not see them contradict."""

    method: Literal["none", "downweight", "soften", "relabel"] = Field(
        "none",
        description="downweight: weight of a pair = probability that its label is right; soften: "
        "that probability as a soft label; relabel: swap labels that are more likely wrong.",
    )
    folds: int = Field(2, ge=2, le=10, description="Members that cross-fitting trains.")
    keep_folds: bool = Field(
        False, description="The members of the folds join the ensemble that scores."
    )
    flip_rate: float = Field(
        0.1,
        gt=0.0,
        lt=0.5,
        description="Assumed share of wrong labels; the held-out loss allows for it, too.",
    )
    compare: bool = Field(
        False, description="Train one member on the labels as they are, too, and report both."
    )


class HeldOutConfig(Section):
    """What the held-out loss decides."""

    evaluate_every_steps: PositiveInt = Field(
        50, description="Steps between looks at the held-out loss."
    )
    select_best: bool = Field(
        True,
        description="Keep the step with the lowest held-out loss at its best scale, not the last.",
    )
    stop_after: PositiveInt | None = Field(
        None, description="Looks without a lower held-out loss before a member stops early."
    )


class RewardModelConfig(StageConfig):
    """Bradley-Terry reward models on the base model's backbone."""

    components: dict[str, RewardComponentConfig] = Field(
        {"preference": RewardComponentConfig()},
        min_length=1,
        description="A reward model each, by name, for instance helpfulness and harmlessness.",
    )
    members: int = Field(1, ge=1, le=16, description="Models per component; scores are averaged.")
    lora: LoraConfig | None = Field(
        None, description="Train an adapter and the value head instead of all weights."
    )
    freeze_backbone: bool = Field(
        False,
        description="Train the value head alone, on states of the base that are computed once.",
    )
    epochs: PositiveFloat = Field(
        1.0, description="Passes over the training pairs, unless max_steps ends them."
    )
    max_steps: PositiveInt | None = Field(None, description="Most optimizer steps of a member.")
    batch_pairs: PositiveInt = Field(
        32, description="Pairs of one optimizer step, all ranks together."
    )
    loss: PairLossConfig = PairLossConfig()
    noise: LabelNoiseConfig = LabelNoiseConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_shares("batch_pairs", self.batch_pairs, self.runtime)
        check_budget(self.rendering, self.runtime, rows=2)
        self._check_names()
        if self.noise.method == "none" and (self.noise.keep_folds or self.noise.compare):
            raise ValueError("noise.keep_folds and noise.compare need a noise.method")
        if self.freeze_backbone and self.lora is not None:
            raise ValueError("freeze_backbone trains the head alone; give it or lora, not both")
        if self.held_out.stop_after is not None and not self.held_out.select_best:
            raise ValueError("held_out.stop_after needs held_out.select_best")
        return self

    def settings_without_effect(self) -> dict[str, str]:
        """Return the settings that were changed and that nothing reads in this combination, each
        with the reason."""
        idle = dict.fromkeys(self.optimizer.idle("optimizer"), "optimizer.schedule is constant")
        if self.noise.method == "none":
            noise = changed_fields(self.noise, "noise", "folds", "flip_rate")
            idle |= dict.fromkeys(noise, "noise.method is none")
        return idle

    def _check_names(self) -> None:
        for name in self.components:
            plain = name.replace("_", "").replace("-", "")
            if not plain.isalnum() or not plain.isascii() or len(name) > MAX_NAME_CHARS:
                raise ValueError(
                    f"component name {name!r} must be up to {MAX_NAME_CHARS} letters, digits, '-' "
                    "and '_'"
                )
            if name.lower() in RESERVED_NAMES:
                raise ValueError(f"component name {name!r} is the name of a score field")
        if len({name.lower() for name in self.components}) < len(self.components):
            raise ValueError("component names must differ in more than upper and lower case")
