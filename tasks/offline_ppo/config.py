"""Configuration of stage offline_ppo, by concern."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from math import comb
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tasks.algorithms.guards import GRAMMAR, Actions, Condition, Rule, parse_condition
from tasks.config.shared import (
    CheckpointConfig,
    OptimizerConfig,
    PositiveFloat,
    PositiveInt,
    RenderingConfig,
    RuntimeConfig,
    Section,
    Share,
    StageConfig,
    changed_fields,
    check_budget,
    check_shares,
    later,
    setting,
)
from tasks.data.quarantine import REASONS
from tasks.errors import ConfigError
from tasks.offline_ppo.objectives import OBJECTIVES

# Configuration of candidate responses: more trajectories than the dataset stores.


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


# Configuration of the guards of stage offline_ppo: what is watched and what is done about it.


class GuardMetric(NamedTuple):
    """Where a metric that rules may watch comes from.

    Attributes:
        need: what a run must have to report it.
        is_met: whether a run has that.
        logged_as: its name in MLflow, where that is another one.
    """

    need: str = ""
    is_met: Callable[[OfflinePPOConfig], bool] = lambda cfg: True
    logged_as: str | None = None


_ANY: Final = GuardMetric()
_PPO: Final = GuardMetric("policy_loss ppo", lambda cfg: OBJECTIVES[cfg.policy_loss].uses_weights)
_REWARDED: Final = GuardMetric(
    "reward.components beside labels", lambda cfg: set(cfg.reward.components) != {"labels"}
)
# By the names that `when` may use.
GUARD_METRICS: Final = {
    # Once before training: share of held-out pairs whose chosen response the reward prefers.
    "reward_agrees_with_label": _ANY,
    "reward_agrees_with_label_upper": _ANY,
    # At each probe, on generated responses.
    "kl_probe": _ANY,
    "probe_win_rate": _REWARDED,
    "probe_reward": _REWARDED,
    "probe_length_tokens": _ANY,
    "probe_truncated_share": _ANY,
    "probe_entropy": _ANY,
    # At each probe, on held-out pairs: does the policy's own log-probability prefer chosen?
    "held_out_accuracy": _ANY,
    "held_out_accuracy_upper": _ANY,
    "held_out_margin": _ANY,
    "chosen_logprob_drift": _ANY,
    "rejected_logprob_drift": _ANY,
    # At each step.
    "reward_mean": _ANY,
    # Of the stored rewards in a batch, over the last steps: about how batches are drawn, and the
    # same for every policy.
    "reward_variance": _ANY,
    "grad_norm": _ANY,
    "kl_data": _PPO,
    "ess_share": _PPO,
    "weight_max": _PPO,
    "live_gradient_share": GuardMetric(
        "a policy_loss other than dpo",
        lambda cfg: OBJECTIVES[cfg.policy_loss].uses_advantages,
        "live_gradient",
    ),
    "entropy": GuardMetric("loss.entropy_coef above 0", lambda cfg: cfg.loss.entropy_coef > 0.0),
    "explained_variance": GuardMetric(
        "advantage.estimator gae", lambda cfg: cfg.advantage.estimator == "gae"
    ),
}


class GuardRuleConfig(Section):
    """One rule: when a metric is out of bounds, do everything that is set here."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$", description="Unique; names the event.")
    when: str = Field(max_length=200, description=f"{GRAMMAR}. For example: kl_probe > 0.1")
    for_observations: PositiveInt = Field(
        1, description="Consecutive observations out of bounds before it fires."
    )
    cooldown_steps: int = Field(20, ge=0, description="Steps of silence after it fired.")
    rollback: Literal["none", "good", "best", "start"] = Field(
        "none",
        description="good: the newest checkpoint whose probe passed; best: the one with the best "
        "probe; start: the policy that training began with.",
    )
    learning_rate_scale: float | None = Field(
        None, gt=0.0, lt=1.0, description="Multiply the learning rate by this."
    )
    min_learning_rate_share: float = Field(
        0.01, ge=0.0, le=1.0, description="Lowest share of the configured learning rate."
    )
    batch_scale: float | None = Field(None, gt=1.0, description="Multiply batch_prompts by this.")
    max_batch_prompts: PositiveInt = Field(128, description="Prompts a step grows to at most.")
    token_budget_scale: float | None = Field(
        None, gt=0.0, lt=1.0, description="Multiply tokens_per_micro_batch by this."
    )
    min_tokens_per_micro_batch: PositiveInt = Field(
        1024, description="Tokens that a micro-batch keeps at least."
    )
    gradient_checkpointing: bool = Field(False, description="Turn it on.")
    reanchor: bool = Field(False, description="Take a new snapshot of the proximal policy.")
    reset_sampler: bool = Field(False, description="Draw the data in a new order from here on.")
    stop: bool = Field(False, description="End the run, after the rollback if there is one.")
    warn: bool = Field(False, description="Report only.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.to_condition()
        if self.to_actions() == Actions():
            raise ValueError(
                f"rule {self.name!r} does nothing; set one of rollback, learning_rate_scale, "
                "batch_scale, token_budget_scale, gradient_checkpointing, reanchor, "
                "reset_sampler, stop or warn"
            )
        return self

    def to_condition(self) -> Condition:
        """Parse ``when``.

        Raises:
            ConfigError: a text that is none, or a metric that training does not report.
        """
        condition = parse_condition(self.when, rule=self.name)
        if condition.metric not in GUARD_METRICS:
            near = get_close_matches(condition.metric, GUARD_METRICS, n=1)
            raise ConfigError(
                f"rule {self.name!r} watches {condition.metric!r}",
                f"a metric that training reports{', perhaps ' if near else ''}{''.join(near)}",
                f"name one of {', '.join(sorted(GUARD_METRICS))}",
            )
        return condition

    def to_actions(self) -> Actions:
        """Return what is set."""
        asked = self.model_dump(
            exclude={"name", "when", "for_observations", "cooldown_steps"}, exclude_none=True
        )
        for scale, bound in (
            ("learning_rate_scale", "min_learning_rate_share"),
            ("batch_scale", "max_batch_prompts"),
            ("token_budget_scale", "min_tokens_per_micro_batch"),
        ):
            # A bound says nothing by itself, and must not count when actions are merged.
            if scale not in asked:
                del asked[bound]
        if self.rollback == "none":
            del asked["rollback"]
        return Actions(**asked)

    def to_rule(self, threshold: float | None) -> Rule:
        """Return the engine's rule, with another threshold if one is given."""
        condition = self.to_condition()
        if threshold is not None:
            condition = condition._replace(threshold=threshold)
        return Rule(
            self.name, condition, self.to_actions(), self.cooldown_steps, self.for_observations
        )


# A poisoned reward praises what it ruins, so the first three ask what the reward has no say in: the
# labels of held-out pairs, and length.
DEFAULT_RULES: Final = (
    GuardRuleConfig(
        name="reward_against_labels", when="reward_agrees_with_label_upper < 0.55", stop=True
    ),
    GuardRuleConfig(
        name="held_out_accuracy",
        # Any policy starts with one half; the bound allows for how many pairs there are.
        when="held_out_accuracy_upper < 0.45",
        rollback="start",
        stop=True,
    ),
    GuardRuleConfig(
        # Checkpoints on the way are ranked by the reward that pays for length: trust none of them.
        name="probe_length",
        when="rise_from_start(probe_length_tokens) > 0.5",
        rollback="start",
        stop=True,
    ),
    GuardRuleConfig(
        name="probe_kl", when="kl_probe > 0.1", rollback="good", learning_rate_scale=0.5
    ),
    GuardRuleConfig(
        name="probe_win_rate",
        when="drop_from_best(probe_win_rate) > 0.05",
        for_observations=2,
        rollback="best",
    ),
    GuardRuleConfig(name="entropy_jump", when="jump(probe_entropy, 3) > 0.5", reset_sampler=True),
    GuardRuleConfig(name="effective_samples", when="ess_share < 0.3", reanchor=True),
)


class GuardsConfig(Section):
    """Rules over training metrics, and the probes that some of the metrics come from."""

    enabled: bool = Field(True, description="Whether rules act; probes are reported either way.")
    rules: tuple[GuardRuleConfig, ...] = Field(
        DEFAULT_RULES, description="Their order decides nothing; actions of several are merged."
    )
    thresholds: dict[str, float | None] = Field(
        {},
        description="Thresholds by rule name, in place of those in `when`; null turns a rule off.",
    )
    max_rollbacks: int = Field(
        3, ge=0, description="Rollbacks of a run; the next one ends it with the best checkpoint."
    )
    probe_every_steps: PositiveInt = Field(
        10,
        description="The policy answers fixed held-out prompts at the first snapshot after so many "
        "steps.",
    )
    probe_prompts: PositiveInt = Field(128, description="Held-out prompts of a probe.")
    probe_max_new_tokens: PositiveInt = Field(64, description="Longest answer of a probe.")
    held_out_pairs: PositiveInt = Field(
        512, description="Held-out pairs that say whether policy and reward follow the labels."
    )
    oom_token_budget_scale: Share = Field(
        0.5,
        gt=0.0,
        description="When memory runs out, multiply tokens_per_micro_batch by this down to the "
        "longest row; then turn gradient checkpointing on.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several rules are named {', '.join(twice)}; names are unique")
        # Null for a rule that is not there asks for nothing: a file that extends another one cannot
        # take a key out of it.
        asked = {name for name, value in self.thresholds.items() if value is not None}
        unknown = sorted(asked - set(names))
        if unknown:
            raise ValueError(
                f"thresholds for {', '.join(unknown)}, which are no rules; rules: "
                f"{', '.join(names)}"
            )
        return self

    @property
    def active(self) -> tuple[GuardRuleConfig, ...]:
        """Return the rules that are not turned off."""
        off = {name for name, threshold in self.thresholds.items() if threshold is None}
        return tuple(rule for rule in self.rules if self.enabled and rule.name not in off)

    def to_rules(self) -> tuple[Rule, ...]:
        """Return the engine's rules with their thresholds."""
        return tuple(rule.to_rule(self.thresholds.get(rule.name)) for rule in self.active)


# Configuration of what offline PPO draws, leaves out and subtracts.

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
    path: str | None = later(
        None,
        description="Python file with a sampler of your own, in place of all of the above: a class "
        "with draw, state and resume (tasks/offline_ppo/batches.py: Sampler).",
    )
    name: str = later("Sampler", description="Name of the class in that file.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.subset_weights and not self.stratify:
            raise ValueError(
                f"subset_weights names {sorted(self.subset_weights)}, but stratify is off; turn it "
                "on or take the weights out"
            )
        unread = changed_fields(self, "sampler", "stratify", "priority")
        if self.path is not None and unread:
            raise ValueError(f"the sampler of {self.path} does not read {unread}; take them out")
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
    function_seconds: PositiveFloat = setting(
        60.0, description="Longest time that the function may take for one response."
    )
    function_memory_gib: PositiveFloat = setting(
        8.0, description="Memory that the function's process may hold (Linux)."
    )
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
        self._check_guards()
        if self.reward.kl_target is not None and self.reward.kl_horizon < 4 * self.batch_prompts:
            raise ValueError(
                f"reward.kl_horizon {self.reward.kl_horizon} is too short for steps of "
                f"{self.batch_prompts} prompts; at least {4 * self.batch_prompts}"
            )
        return self

    def settings_without_effect(self) -> dict[str, str]:
        """Return the settings that were changed and that nothing reads in this combination, each
        with the reason."""
        idle: dict[str, str] = {}
        names: tuple[str, ...]

        def unread(why: str, section: Section, prefix: str, *names: str) -> None:
            idle.update(dict.fromkeys(changed_fields(section, prefix, *names), why))

        policy_loss, advantage, estimator = (
            self.policy_loss,
            self.advantage,
            self.advantage.estimator,
        )
        by_loss = f"policy_loss is {policy_loss}"
        by_estimator = f"advantage.estimator is {estimator}"
        if policy_loss == "dpo":
            unread(by_loss, advantage, "advantage")
            unread(by_loss, self.behavior, "behavior")
        if policy_loss != "dpo":
            unread(by_loss, self.loss, "loss", "dpo_beta", "dpo_label_smoothing")
        if policy_loss != "ppo":
            unread(by_loss, self.loss, "loss", "clip_low", "dual_clip")
            unread(by_loss, self.importance, "importance", "cap")
        if policy_loss not in ("ppo", "a_lol"):
            unread(by_loss, self.loss, "loss", "clip_high")
        if policy_loss in ("positives_only", "dpo"):
            unread(by_loss, self.importance, "importance", "level")
        if self.loss.kl_coef == 0.0:
            unread("loss.kl_coef is 0", self.loss, "loss", "kl_kind")
        if estimator != "gae":
            unread(by_estimator, self.critic, "critic")
            unread(by_estimator, advantage, "advantage", "gae_lambda")
        if estimator in ("group", "rloo"):
            unread(by_estimator, advantage, "advantage", "gamma")
            why = f"{by_estimator}, whose baseline takes a prompt's mean away"
            unread(why, self.reward, "reward", "center")
        else:
            unread(f"{by_estimator}, which always whitens", advantage, "advantage", "whiten")
        if estimator != "group":
            unread(by_estimator, advantage, "advantage", "normalize_std")
        if advantage.control_variate.kind != "fitted":
            why = f"advantage.control_variate.kind is {advantage.control_variate.kind}"
            unread(why, advantage.control_variate, "advantage.control_variate", "features")
        if (estimator, advantage.control_variate.kind, advantage.normalize_std) == (
            "group",
            "leave_one_out",
            True,
        ):
            why = "the group advantage takes the mean away and divides the factor out again"
            unread(why, advantage.control_variate, "advantage.control_variate", "kind")
        if self.behavior.policy != "cloned":
            why = f"behavior.policy is {self.behavior.policy}"
            names = ("clone_epochs", "clone_batch_pairs", "clone_optimizer")
            unread(why, self.behavior, "behavior", *names)
        if self.reward.normalize in ("raw", "binary"):
            why = f"reward.normalize is {self.reward.normalize}"
            unread(why, self.reward, "reward", "clip")
        if not any(name.split(".")[0] == "reward_model" for name in self.reward.components):
            why = "reward.components has no reward_model"
            unread(why, self.reward, "reward", "normalize", "clip")
        if "function" not in self.reward.components:
            names = ("function_path", "function_name", "function_seconds", "function_memory_gib")
            unread("reward.components has no function", self.reward, "reward", *names)
        if self.reward.kl_target is None:
            unread("reward.kl_target is not set", self.reward, "reward", "kl_horizon")
        if self.sampler.priority == "none":
            names = ("priority_exponent", "uniform_share", "epoch_share", "correct_priority")
            unread("sampler.priority is none", self.sampler, "sampler", *names)
        if self.sampler.path is None:
            unread("sampler.path is not set", self.sampler, "sampler", "name")
        sequence, of_sequence = self.filters.sequence, "filters.sequence"
        if sequence.mode != "fixed":
            unread(f"{of_sequence}.mode is {sequence.mode}", sequence, of_sequence, "tau")
        if sequence.mode != "adaptive":
            names = ("tau_min", "tau_max", "smoothing")
            unread(f"{of_sequence}.mode is {sequence.mode}", sequence, of_sequence, *names)
        if self.candidates.per_prompt == 0:
            unread("candidates.per_prompt is 0", self.candidates, "candidates")
        elif self.candidates.kl_bound is None:
            names = ("temperature_scale", "min_temperature")
            unread("candidates.kl_bound is not set", self.candidates, "candidates", *names)
        if not self.guards.enabled:
            names = ("rules", "thresholds", "max_rollbacks")
            unread("guards.enabled is false", self.guards, "guards", *names)
        if self.report.prompts == 0:
            unread("report.prompts is 0", self.report, "report", "max_new_tokens")
        idle.update(
            dict.fromkeys(self.optimizer.idle("optimizer"), "optimizer.schedule is constant")
        )
        return idle

    @property
    def sleeping_rules(self) -> dict[GuardRuleConfig, str]:
        """Return the rules whose metric this run never reports, each with the reason."""
        watched = {rule: rule.to_condition().metric for rule in self.guards.active}
        return {
            rule: f"{rule.name} watches {metric}, which needs {GUARD_METRICS[metric].need}"
            for rule, metric in watched.items()
            if not GUARD_METRICS[metric].is_met(self)
        }

    def _check_guards(self) -> None:
        """Refuse a rule that can never act. Of the defaults the run says so."""
        asleep = [why for rule, why in self.sleeping_rules.items() if rule not in DEFAULT_RULES]
        if asleep:
            raise ValueError(
                f"guards.rules: {'; '.join(asleep)}; change that, take the rule out, or turn it "
                "off by guards.thresholds: {NAME: null}"
            )

    def _check_policy_loss(self) -> None:
        """Refuse settings that the chosen loss would not read."""
        unread, objective = [], OBJECTIVES[self.policy_loss]
        if not objective.uses_weights:
            unread += ["filters.sequence"] if self.filters.sequence.mode != "off" else []
            unread += ["reward.kl_target"] if self.reward.kl_target is not None else []
        if objective.in_pairs and self.candidates.per_prompt:
            unread += ["candidates.per_prompt"]
        if not objective.uses_advantages:
            unread += ["sampler.priority"] if self.sampler.priority != "none" else []
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
