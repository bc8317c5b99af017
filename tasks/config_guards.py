"""Configuration of the guards of stage offline_ppo: what is watched and what is done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from tasks.algorithms.guard_actions import (
    Action,
    EnableGradientCheckpointing,
    GrowBatch,
    LowerTokenBudget,
    Reanchor,
    ResetSampler,
    Rollback,
    ScaleLearningRate,
    Stop,
    Warn,
)
from tasks.algorithms.guard_rules import GRAMMAR, Condition, Rule, parse_condition
from tasks.config_shared import PositiveInt, Section, Share

# Metrics that the training loop reports, by the names that `when` may use.
GUARD_METRICS: Final = frozenset(
    {
        # Once before training: share of held-out pairs whose chosen response the reward prefers.
        "reward_agrees_with_label",
        "reward_agrees_with_label_upper",
        # At each probe, on generated responses.
        "kl_probe",
        "probe_win_rate",
        "probe_reward",
        "probe_length_tokens",
        "probe_truncated_share",
        # At each probe, on held-out pairs: does the policy's own log-probability prefer chosen?
        "held_out_accuracy",
        "held_out_accuracy_upper",
        "held_out_margin",
        "probe_entropy",
        # At each step.
        "kl_data",
        "reward_mean",
        "reward_variance",
        "entropy",
        "ess_share",
        "weight_max",
        "live_gradient_share",
        "grad_norm",
        "explained_variance",
        "chosen_logprob_drift",
        "rejected_logprob_drift",
    }
)


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
        if not self.to_actions():
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
        return parse_condition(self.when, rule=self.name, known_metrics=GUARD_METRICS)

    def to_actions(self) -> tuple[Action, ...]:
        """Return what is set, in the order in which it is carried out."""
        actions: list[Action] = []
        if self.rollback != "none":
            actions.append(Rollback(self.rollback))
        if self.learning_rate_scale is not None:
            actions.append(
                ScaleLearningRate(self.learning_rate_scale, self.min_learning_rate_share)
            )
        if self.batch_scale is not None:
            actions.append(GrowBatch(self.batch_scale, self.max_batch_prompts))
        if self.token_budget_scale is not None:
            actions.append(
                LowerTokenBudget(self.token_budget_scale, self.min_tokens_per_micro_batch)
            )
        flags: list[tuple[bool, Action]] = [
            (self.gradient_checkpointing, EnableGradientCheckpointing()),
            (self.reanchor, Reanchor()),
            (self.reset_sampler, ResetSampler()),
            (self.warn, Warn()),
            (self.stop, Stop()),
        ]
        return (*actions, *(action for wanted, action in flags if wanted))

    def to_rule(self, threshold: float | None = None) -> Rule:
        """Return the engine's rule, with another threshold if one is given."""
        condition = self.to_condition()
        if threshold is not None:
            condition = replace(condition, threshold=threshold)
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
    GuardRuleConfig(name="reward_variance", when="reward_variance > 0.3", batch_scale=2.0),
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

    def to_rules(self) -> tuple[Rule, ...]:
        """Return the engine's rules with their thresholds; none when guards are disabled."""
        if not self.enabled:
            return ()
        return tuple(
            rule.to_rule(self.thresholds.get(rule.name))
            for rule in self.rules
            if self.thresholds.get(rule.name, 0.0) is not None
        )


def default_rules() -> tuple[Rule, ...]:
    """Return the engine's rules of the default config."""
    return GuardsConfig().to_rules()
