"""Configuration of stage offline_ppo, by concern."""

from __future__ import annotations

from math import comb
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config_candidates import CandidatesConfig, check_candidates
from tasks.config_guards import GuardsConfig
from tasks.config_sampler import ControlVariateConfig, FilterConfig, SamplerConfig
from tasks.config_shared import (
    CheckpointConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    Section,
    StageConfig,
    check_budget,
    check_shares,
    setting,
)

MAX_SEARCH_POINTS = 500


class BehaviorConfig(Section):
    """Which policy wrote the data."""

    policy: Literal["reference", "cloned", "logged"] = Field(
        "reference",
        description="reference: the base model; cloned: two-fold cross-fitted behaviour cloning; "
        "logged: the log-probabilities that the source gives with each response.",
    )
    clone_epochs: PositiveFloat = Field(
        1.0, description="cloned: passes over each half of the data."
    )
    clone_batch_pairs: PositiveInt = Field(32, description="cloned: pairs of one optimizer step.")
    clone_optimizer: OptimizerConfig = OptimizerConfig()


class WeightSearchConfig(Section):
    """Weights of reward components from a grid, judged on the validation split."""

    resolution: int = Field(
        10, ge=1, le=100, description="Grid steps from 0 to 1; the weights add up to 1."
    )


class RewardConfig(Section):
    """What a response is worth."""

    components: dict[str, float] = Field(
        {"reward_model": 1.0},
        description="Weights of: reward_model, reward_model.<component>, labels (+1 chosen, -1 "
        "rejected), function.",
    )
    search: WeightSearchConfig | None = Field(
        None,
        description="Find the weights on the validation split; those of `components` then only "
        "say which components take part.",
    )
    function_path: str | None = Field(None, description="Python file with the reward function.")
    function_name: str = Field("reward_fn", description="Name of the function in that file.")
    normalize: Literal["standardize", "unit_range", "raw", "binary"] = Field(
        "standardize",
        description="Of the score: standardize (by mean and deviation of the training scores), "
        "unit_range (from -1 to 1), binary (above or below the mean), raw.",
    )
    clip: PositiveFloat = Field(5.0, description="Bound of the standardized score.")
    center: Literal["none", "prompt"] = Field(
        "none", description="prompt: subtract the mean over the responses of a prompt."
    )
    missing_end_penalty: float = Field(
        0.0, ge=0.0, description="Taken from the reward of a response that never ends its turn."
    )
    kl_coef: float = Field(0.0, ge=0.0, description="KL-in-reward coefficient per token; 0 is off.")
    kl_target: PositiveFloat | None = Field(
        None, description="Adapt kl_coef towards this KL per token."
    )
    kl_horizon: PositiveInt = Field(
        10_000, description="Responses over which kl_coef follows kl_target."
    )

    @model_validator(mode="after")
    def _check_components(self) -> RewardConfig:
        known = {"reward_model", "labels", "function"}
        unknown = {
            name
            for name in self.components
            if name not in known and name.removeprefix("reward_model.") in ("", name)
        }
        if unknown or not self.components:
            raise ValueError(
                f"unknown components {sorted(unknown)}; choose one or more of {sorted(known)}, or "
                "reward_model.<component> for one component of the reward model"
            )
        if self.search is None and all(weight == 0.0 for weight in self.components.values()):
            raise ValueError("all component weights are zero; give at least one a weight")
        self._check_search()
        if self.kl_target is not None and self.kl_coef == 0.0:
            raise ValueError("kl_target adapts kl_coef, which is 0; give kl_coef a start value")
        if "function" in self.components and self.function_path is None:
            raise ValueError(
                "component 'function' needs function_path, the Python file that defines it"
            )
        return self

    def _check_search(self) -> None:
        if self.search is None:
            return
        if "labels" in self.components:
            raise ValueError(
                "search judges weights by the labels, which component 'labels' repeats; leave it "
                "out or give the weights"
            )
        n = len(self.components)
        if n < 2:
            raise ValueError("search weighs components against each other; name a second one")
        n_points = comb(self.search.resolution + n - 1, n - 1)
        if n_points > MAX_SEARCH_POINTS:
            raise ValueError(
                f"search.resolution {self.search.resolution} over {n} components makes {n_points} "
                f"grid points, more than {MAX_SEARCH_POINTS}; lower it"
            )


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Literal["group", "rloo", "gae", "reinforce_pp"] = Field(
        "group",
        description="Baseline: group (mean of the prompt's responses), rloo (mean of its other "
        "responses), gae (a critic), reinforce_pp (the batch).",
    )
    normalize_std: bool = Field(
        True, description="Divide the group advantage by the group's standard deviation."
    )
    gamma: float = Field(1.0, gt=0.0, le=1.0, description="Discount per token.")
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["adaptive"] = Field(
        0.95, description="adaptive: 0.95 + 0.03 (1 - variance ratio)."
    )
    whiten: bool = Field(False, description="To mean 0 and deviation 1 over the batch.")
    control_variate: ControlVariateConfig = ControlVariateConfig()

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        variate = self.control_variate
        if variate.kind == "fitted" and "value" in variate.features and self.estimator != "gae":
            raise ValueError(
                f"control_variate feature 'value' needs a critic, which estimator "
                f"{self.estimator!r} has not; use estimator gae or leave the feature out"
            )
        return self


class CriticConfig(Section):
    """The value function, used by ``estimator: gae`` only."""

    warmup_steps: PositiveInt = Field(40, description="Steps on returns with the policy frozen.")
    value_clip: PositiveFloat = Field(
        0.2, description="How far a value may move from the one that it started with."
    )
    force: bool = Field(
        False, description="Go on although the warmed-up critic explains no variance."
    )
    optimizer: OptimizerConfig = OptimizerConfig()


class ImportanceConfig(Section):
    """Truncated weights between the frozen proximal and the behaviour policy."""

    level: Literal["sequence", "geometric", "token"] = Field(
        "sequence", description="What one weight belongs to."
    )
    cap: float = Field(
        2.0, ge=1.0, description="Largest weight of a response with positive advantage."
    )


class PolicyLossConfig(Section):
    """Options of the policy losses; which one is used is `policy_loss`."""

    clip_low: float = Field(
        0.2, gt=0.0, lt=1.0, description="Ratios below 1 - clip_low are clipped."
    )
    clip_high: float = Field(0.2, gt=0.0, description="Also the clip of a_lol.")
    dual_clip: float = Field(3.0, gt=1.0, description="Bound of the loss for negative advantages.")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="How the loss is averaged over tokens and responses."
    )
    entropy_coef: float = Field(0.0, ge=0.0, description="Bonus per nat of entropy.")
    kl_coef: float = Field(
        0.0, ge=0.0, description="KL from the base as a loss, per nat and token; 0 is off."
    )
    kl_kind: Literal["k1", "k2", "k3"] = Field(
        "k2", description="Estimator of that KL; k2 has the gradient of the KL itself."
    )
    dpo_beta: PositiveFloat = Field(
        0.1, description="Policy loss dpo: strength of the pull to the base."
    )
    dpo_label_smoothing: float = Field(
        0.0, ge=0.0, lt=0.5, description="Policy loss dpo: assumed share of wrong labels."
    )

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip < 1.0 + self.clip_high:
            raise ValueError(
                f"dual_clip {self.dual_clip} is below 1 + clip_high = {1.0 + self.clip_high}"
            )
        return self


class HeldOutReportConfig(Section):
    """The policy against the base, when it is done."""

    prompts: int = Field(200, ge=0, description="Prompts of the test split; 0 leaves it out.")
    max_new_tokens: PositiveInt = Field(64, description="Longest answer.")


class OfflinePPOConfig(StageConfig):
    """Offline PPO over the stored responses, with a re-anchored proximal policy."""

    policy_loss: Literal["ppo", "topr", "a_lol", "positives_only", "dpo"] = Field(
        "ppo",
        description="ppo: clipped surrogate around the re-anchored policy; topr, a_lol and "
        "positives_only: weighted likelihood; dpo: the labels alone, no reward.",
    )
    steps: PositiveInt = Field(80, description="Optimizer steps.")
    batch_prompts: PositiveInt = Field(
        64, description="Prompts of one step, with all their responses."
    )
    reanchor_steps: int = Field(
        8, ge=0, description="Steps between snapshots of the proximal policy; 0 never moves it."
    )
    behavior: BehaviorConfig = BehaviorConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    importance: ImportanceConfig = ImportanceConfig()
    loss: PolicyLossConfig = PolicyLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampler: SamplerConfig = SamplerConfig()
    filters: FilterConfig = FilterConfig()
    candidates: CandidatesConfig = CandidatesConfig()
    guards: GuardsConfig = GuardsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: HeldOutReportConfig = HeldOutReportConfig()
    max_restarts: int = setting(
        2, ge=0, description="How often training goes on after a worker or its node died."
    )
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def worker_groups(self) -> int:
        """Two where the policy has ranks of its own."""
        return 2 if self.runtime.placement == "separate" else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_shares("batch_prompts", self.batch_prompts, self.runtime)
        check_budget(self.rendering, self.runtime, rows=1)
        self._check_logged()
        self._check_candidates()
        self._check_policy_loss()
        if self.reward.kl_target is not None and self.reward.kl_horizon < 4 * self.batch_prompts:
            raise ValueError(
                f"reward.kl_horizon {self.reward.kl_horizon} is too short for steps of "
                f"{self.batch_prompts} prompts; at least {4 * self.batch_prompts}"
            )
        return self

    def _check_policy_loss(self) -> None:
        """Refuse settings that the chosen loss would not read."""
        unread = []
        if self.policy_loss != "ppo":
            unread += ["filters.sequence"] if self.filters.sequence.mode != "off" else []
            unread += ["reward.kl_target"] if self.reward.kl_target is not None else []
        if self.policy_loss == "dpo":
            unread += ["sampler.priority"] if self.sampler.priority != "none" else []
            unread += ["candidates.per_prompt"] if self.candidates.per_prompt else []
            unread += ["advantage.estimator gae"] if self.advantage.estimator == "gae" else []
        if unread:
            raise ValueError(
                f"policy_loss {self.policy_loss} does not use {', '.join(unread)}; take it out, or "
                "choose policy_loss ppo"
            )

    def _check_candidates(self) -> None:
        check_candidates(self.candidates, self.rendering)
        if self.candidates.per_prompt and "labels" in self.reward.components:
            raise ValueError(
                "component 'labels' knows the stored responses only, and candidates are none of "
                "them; take it out or set candidates.per_prompt to 0"
            )

    def _check_logged(self) -> None:
        if self.behavior.policy != "logged":
            return
        if self.importance.level == "token":
            raise ValueError(
                "behavior.policy 'logged' knows one log-probability per response, which "
                "importance.level 'token' cannot use; choose sequence or geometric"
            )
        if self.rendering.truncate_response:
            raise ValueError(
                "behavior.policy 'logged' knows whole responses, but rendering.truncate_response "
                "cuts them; turn it off"
            )
