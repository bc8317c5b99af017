"""Configuration of the guards: what is refused at load, and what the defaults do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.algorithms.guards import (
    Action,
    EnableGradientCheckpointing,
    GrowBatch,
    GuardEngine,
    LowerTokenBudget,
    Reanchor,
    ResetSampler,
    Rollback,
    ScaleLearningRate,
    Stop,
    Warn,
    merged_actions,
)
from tasks.offline_ppo.config import DEFAULT_RULES, GUARD_METRICS, GuardsConfig, default_rules

RULE: dict[str, Any] = {"name": "r", "when": "kl_probe > 0.1", "warn": True}


def default_engine() -> GuardEngine:
    return GuardEngine(default_rules(), max_rollbacks=GuardsConfig().max_rollbacks)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": [{**RULE, "when": "kl_probe >> 1"}]}, "rule 'r'.*'>' at position 11"),
        ({"rules": [{**RULE, "when": "kl > 1"}]}, "'kl' at position 1.*metrics: chosen_logprob"),
        ({"rules": [{**RULE, "when": "kl_probe > inf"}]}, "'inf' at position 12"),
        ({"rules": [{**RULE, "when": "kl_probe > 1e400"}]}, "finite in double precision"),
        ({"rules": [{**RULE, "warn": False}]}, "rule 'r' does nothing; set one of rollback"),
        ({"rules": [RULE, {**RULE, "stop": True}]}, "several rules are named r"),
        ({"rules": [{**RULE, "name": "A b"}]}, "name"),
        ({"rules": [{**RULE, "rollback": "last"}]}, "'none', 'good', 'best' or 'start'"),
        ({"rules": [{**RULE, "learning_rate_scale": 1.0}]}, "less than 1"),
        ({"rules": [{**RULE, "batch_scale": 1.0}]}, "greater than 1"),
        ({"rules": [{**RULE, "batch_scale": float("inf")}]}, "finite number"),
        ({"rules": [{**RULE, "lr": 0.5}]}, "Extra inputs"),
        ({"thresholds": {"kl": 0.2}}, "thresholds for kl, which are no rules; rules: reward_ag"),
        ({"thresholds": {"probe_kl": float("nan")}}, "finite number"),
        ({"max_rollbacks": -1}, "max_rollbacks"),
        ({"oom_token_budget_scale": 0.0}, "oom_token_budget_scale"),
    ],
)
def test_what_cannot_work_is_refused_at_load(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GuardsConfig.model_validate(values)


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"rollback": "good"}, Rollback("good")),
        ({"rollback": "start"}, Rollback("start")),
        (
            {"learning_rate_scale": 0.5, "min_learning_rate_share": 0.1},
            ScaleLearningRate(0.5, 0.1),
        ),
        ({"batch_scale": 2.0, "max_batch_prompts": 96}, GrowBatch(2.0, 96)),
        (
            {"token_budget_scale": 0.5, "min_tokens_per_micro_batch": 640},
            LowerTokenBudget(0.5, 640),
        ),
        ({"gradient_checkpointing": True}, EnableGradientCheckpointing()),
        ({"reanchor": True}, Reanchor()),
        ({"reset_sampler": True}, ResetSampler()),
        ({"stop": True}, Stop()),
        ({"warn": True}, Warn()),
    ],
)
def test_each_field_is_one_action(fields: dict[str, Any], action: Action) -> None:
    rules = [{"name": "r", "when": "kl_probe > 0.1", **fields}]
    assert GuardsConfig.model_validate({"rules": rules}).to_rules()[0].actions == (action,)


def test_thresholds_are_changed_and_rules_turned_off_by_name() -> None:
    cfg = GuardsConfig(thresholds={"probe_kl": 0.4, "reward_variance": None})
    rules = {rule.name: rule for rule in cfg.to_rules()}
    assert str(rules["probe_kl"].condition) == "kl_probe > 0.4"
    assert "reward_variance" not in rules
    assert len(rules) == len(DEFAULT_RULES) - 1
    assert GuardsConfig(enabled=False).to_rules() == ()


def test_json_round_trip_and_a_schema_without_a_discriminator() -> None:
    cfg = GuardsConfig(thresholds={"probe_kl": 0.4})
    assert GuardsConfig.model_validate_json(cfg.model_dump_json()) == cfg
    assert "discriminator" not in str(GuardsConfig.model_json_schema())


def test_every_metric_of_the_defaults_is_reported() -> None:
    engine = default_engine()
    assert set(engine.unobserved_metrics) <= GUARD_METRICS


def test_the_defaults_let_a_healthy_run_pass() -> None:
    engine = default_engine()
    assert engine.observe(0, {"reward_agrees_with_label_upper": 0.6}) == []
    for probe in range(10):
        metrics = {
            "kl_probe": 0.009 * probe,  # at most 0.081
            "probe_win_rate": 0.5 + 0.04 * probe,
            "probe_length_tokens": 10.0 + 0.4 * probe,  # at most 13.6: 0.36 above the start
            "held_out_accuracy_upper": 0.55 + 0.02 * probe,
            "reward_variance": 0.25,
            "probe_entropy": 2.0 - 0.1 * probe,
            "ess_share": 0.8 - 0.05 * probe,  # at least 0.35
        }
        assert engine.observe(10 * probe, metrics) == []
    assert engine.passing and engine.unobserved_metrics == ()


@pytest.mark.parametrize(
    ("metric", "good", "bad", "expected"),
    [
        ("kl_probe", 0.09, 0.11, (Rollback("good"), ScaleLearningRate(0.5, 0.01))),
        ("reward_variance", 0.29, 0.31, (GrowBatch(2.0, 128),)),
        ("ess_share", 0.31, 0.29, (Reanchor(),)),
        # |3.1 - 2| / 2 = 0.55
        ("probe_entropy", 2.0, 3.1, (ResetSampler(),)),
    ],
)
def test_what_each_default_does(
    metric: str, good: float, bad: float, expected: tuple[Action, ...]
) -> None:
    engine = default_engine()
    for step in range(8):
        assert engine.observe(step, {metric: good}) == []
    assert merged_actions(engine.observe(8, {metric: bad})) == expected
    # twenty steps of silence
    assert all(engine.observe(step, {metric: bad}) == [] for step in range(9, 28))


def test_a_win_rate_that_stays_down_goes_back_to_the_best() -> None:
    engine = default_engine()
    engine.observe(0, {"probe_win_rate": 0.70})
    # down 0.06 from the best: once may be noise
    assert engine.observe(10, {"probe_win_rate": 0.64}) == []
    firings = engine.observe(20, {"probe_win_rate": 0.64})
    assert merged_actions(firings) == (Rollback("best"),)


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [action.kind for action in actions]


@pytest.mark.parametrize(
    ("agreement", "stops"),
    [
        (0.08, True),  # a reward model that ranks 0.92 of the pairs as labelled, negated
        (0.48, True),  # longer is better, where length says nothing
        (0.60, False),  # an honest reward model of a hard data set
        (float("nan"), True),
    ],
)
def test_a_poisoned_reward_is_refused_before_training(agreement: float, stops: bool) -> None:
    firings = default_engine().observe(0, {"reward_agrees_with_label_upper": agreement})
    assert kinds(merged_actions(firings)) == (["stop"] if stops else [])


@pytest.mark.parametrize(
    ("start", "poisoned", "target"),
    [
        # even the upper bound is below one half, where any policy starts
        ({"held_out_accuracy_upper": 0.54}, {"held_out_accuracy_upper": 0.44}, "start"),
        # 16 / 10 - 1 = 0.6
        ({"probe_length_tokens": 10.0}, {"probe_length_tokens": 16.0}, "start"),
    ],
)
def test_poison_is_seen_although_the_reward_says_that_all_is_well(
    start: dict[str, float], poisoned: dict[str, float], target: str
) -> None:
    engine = default_engine()
    assert engine.observe(0, {**start, "probe_win_rate": 0.5, "kl_probe": 0.0}) == []
    firings = engine.observe(10, {**poisoned, "probe_win_rate": 0.8, "kl_probe": 0.05})
    back, stop = merged_actions(firings)
    assert back == Rollback(target)  # type: ignore[arg-type]
    assert isinstance(stop, Stop) and next(iter(poisoned)).removesuffix("_upper") in stop.reason
