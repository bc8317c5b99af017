"""Configuration of what offline PPO draws, leaves out and subtracts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config_shared import PositiveFloat, Section, Share
from tasks.quarantine import REASONS

Target = Annotated[float, Field(gt=0.0, le=1.0)]
BaselineFeature = Literal["length", "prompt_mean", "value"]


class SamplerConfig(Section):
    """Which prompts a batch holds."""

    stratify: bool = Field(
        False, description="Give every batch each subset's share of the data, to within one prompt."
    )
    subset_weights: dict[str, PositiveFloat] = Field(
        {},
        description="How often a prompt of a subset is drawn, against 1 for subsets not named; "
        "needs stratify.",
    )
    priority: Literal["none", "margin", "advantage"] = Field(
        "none",
        description="Prefer prompts by the absolute reward margin of their responses, or by their "
        "last absolute advantage.",
    )
    priority_exponent: float = Field(
        1.0, gt=0.0, le=100.0, description="1 draws in proportion to the priority."
    )
    uniform_share: float = Field(
        0.1,
        gt=0.0,
        lt=1.0,
        description="Share of a prioritised draw that ignores priorities, so that no prompt is "
        "left out for good.",
    )
    epoch_share: float = Field(
        0.5,
        gt=0.0,
        lt=1.0,
        description="Share of the prompts that a prioritised epoch draws, each once. 1 divided by "
        "it bounds how much more often one prompt comes than the average.",
    )
    correct_priority: bool = Field(
        True, description="Weigh responses so that a prioritised draw leaves the mean as it is."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.subset_weights and not self.stratify:
            raise ValueError(
                f"subset_weights names {sorted(self.subset_weights)}, but stratify is off; turn it "
                "on or take the weights out"
            )
        return self


class SequenceThresholdConfig(Section):
    """Drop a response for the step whose geometric-mean ratio to the behaviour policy is outside
    1 / tau to tau."""

    mode: Literal["off", "fixed", "adaptive"] = Field(
        "off", description="off, a fixed threshold, or one that adapts to a target."
    )
    tau: float = Field(1.5, ge=1.0, le=1e8, description="The threshold of mode fixed.")
    tau_min: float = Field(1.05, ge=1.0, le=1e8, description="Lower bound of mode adaptive.")
    tau_max: float = Field(4.0, ge=1.0, le=1e8, description="Upper bound of mode adaptive.")
    target_ess_share: Target | None = Field(
        None,
        description="mode adaptive: the smallest tau with this effective sample size, as a share "
        "of all responses of the step.",
    )
    target_keep_share: Target | None = Field(
        None, description="mode adaptive: the smallest tau that keeps this share of the responses."
    )
    smoothing: Share = Field(
        0.9, description="mode adaptive: how much of log tau stays from one step to the next."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        targets = [self.target_ess_share, self.target_keep_share]
        n_targets = sum(target is not None for target in targets)
        if self.mode == "adaptive" and n_targets != 1:
            raise ValueError(
                f"mode adaptive with {n_targets} targets; give one of target_ess_share and "
                "target_keep_share"
            )
        if self.mode != "adaptive" and n_targets:
            raise ValueError(
                f"mode {self.mode} does not use target_ess_share or target_keep_share; choose mode "
                "adaptive or take them out"
            )
        if self.tau_min >= self.tau_max:
            raise ValueError(f"tau_min {self.tau_min} is not below tau_max {self.tau_max}")
        return self


class FilterConfig(Section):
    """Which stored pairs are not trained on."""

    min_margin_quantile: Share = Field(
        0.0, description="Pairs whose reward margin is below this quantile are left out."
    )
    max_length_quantile: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Pairs whose longer response is above this quantile of lengths are left out.",
    )
    drop_flags: tuple[str, ...] = Field(
        (), description="Pairs that carry any of these flags are left out."
    )
    sequence: SequenceThresholdConfig = SequenceThresholdConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = sorted(set(self.drop_flags) - set(REASONS) - {""})
        if unknown:
            raise ValueError(f"drop_flags names {unknown}; flags are {', '.join(REASONS)}")
        if len(set(self.drop_flags)) < len(self.drop_flags) or "" in self.drop_flags:
            raise ValueError(f"drop_flags {list(self.drop_flags)} has an empty or repeated name")
        return self


class ControlVariateConfig(Section):
    """A baseline that is subtracted from the rewards before advantages are estimated."""

    kind: Literal["none", "leave_one_out", "fitted"] = Field(
        "none",
        description="leave_one_out: the mean of the prompt's other responses; fitted: a linear "
        "function of the features, fitted on other prompts of the batch.",
    )
    features: tuple[BaselineFeature, ...] = Field(
        ("length", "prompt_mean"),
        description="Of kind fitted: response tokens, mean reward of the prompt's other responses, "
        "the critic's value of the prompt.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "fitted" and not self.features:
            raise ValueError("kind fitted needs at least one of the features, or another kind")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"features {list(self.features)} names one twice")
        return self
