"""Guards of the stage: what is refused at load, what the defaults do, how memory is lowered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.algorithms.guards import Actions, Firing, GuardEngine, merge_actions
from tasks.config.loading import merge
from tasks.errors import MemoryLimitError
from tasks.offline_ppo.config import DEFAULT_RULES, GuardsConfig, OfflinePPOConfig
from tasks.offline_ppo.loop import adopt_memory, guarded, lower_memory

RULE: dict[str, Any] = {"name": "r", "when": "kl_probe > 0.1", "warn": True}


def default_engine() -> GuardEngine:
    cfg = GuardsConfig()
    return GuardEngine(cfg.to_rules(), max_rollbacks=cfg.max_rollbacks)


def merged(firings: list[Firing]) -> Actions:
    return merge_actions([firing.actions for firing in firings])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": [{**RULE, "when": "kl_probe >> 1"}]}, "rule 'r' has when 'kl_probe >> 1'"),
        (
            {"rules": [{**RULE, "when": "kl > 1"}]},
            "rule 'r' watches 'kl'.*name one of chosen_logprob",
        ),
        ({"rules": [{**RULE, "when": "klprobe > 1"}]}, "perhaps kl_probe"),
        ({"rules": [{**RULE, "when": "kl_probe > 1e400"}]}, "a number is finite"),
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
    ("fields", "actions"),
    [
        ({"rollback": "good"}, Actions("good")),
        (
            {"learning_rate_scale": 0.5, "min_learning_rate_share": 0.1},
            Actions(learning_rate_scale=0.5, min_learning_rate_share=0.1),
        ),
        (
            {"batch_scale": 2.0, "max_batch_prompts": 96},
            Actions(batch_scale=2.0, max_batch_prompts=96),
        ),
        (
            {"token_budget_scale": 0.5, "min_tokens_per_micro_batch": 640},
            Actions(token_budget_scale=0.5, min_tokens_per_micro_batch=640),
        ),
        ({"gradient_checkpointing": True}, Actions(gradient_checkpointing=True)),
        ({"reanchor": True}, Actions(reanchor=True)),
        ({"reset_sampler": True}, Actions(reset_sampler=True)),
        ({"rollback": "start", "stop": True}, Actions("start", stop=True)),
        # A bound without its scale asks for nothing.
        ({"warn": True, "max_batch_prompts": 1}, Actions(warn=True)),
    ],
)
def test_each_field_asks_for_itself_alone(fields: dict[str, Any], actions: Actions) -> None:
    rules = [{"name": "r", "when": "kl_probe > 0.1", **fields}]
    assert GuardsConfig.model_validate({"rules": rules}).to_rules()[0].actions == actions


def test_thresholds_are_changed_and_rules_turned_off_by_name() -> None:
    cfg = GuardsConfig(thresholds={"probe_kl": 0.4, "entropy_jump": None})
    rules = {rule.name: rule for rule in cfg.to_rules()}
    assert str(rules["probe_kl"].condition) == "kl_probe > 0.4"
    assert "entropy_jump" not in rules
    assert len(rules) == len(DEFAULT_RULES) - 1
    assert GuardsConfig(enabled=False).to_rules() == ()


def test_json_round_trip_and_a_schema_without_a_discriminator() -> None:
    cfg = GuardsConfig(thresholds={"probe_kl": 0.4})
    assert GuardsConfig.model_validate_json(cfg.model_dump_json()) == cfg
    assert "discriminator" not in str(GuardsConfig.model_json_schema())


@pytest.mark.parametrize(
    ("metric", "changes", "need"),
    [
        ("explained_variance", {}, "advantage.estimator gae"),
        ("explained_variance", {"advantage": {"estimator": "gae"}}, None),
        ("ess_share", {"policy_loss": "topr"}, "policy_loss ppo"),
        ("live_gradient_share", {"policy_loss": "topr"}, None),
        ("live_gradient_share", {"policy_loss": "dpo"}, "other than dpo"),
        ("entropy", {}, "loss.entropy_coef above 0"),
        ("entropy", {"loss": {"entropy_coef": 0.01}}, None),
        ("probe_win_rate", {"reward": {"components": {"labels": 1.0}}}, "beside labels"),
        ("probe_entropy", {"reward": {"components": {"labels": 1.0}}}, None),
    ],
)
def test_a_rule_on_what_the_run_never_reports_is_refused(
    metric: str, changes: dict[str, Any], need: str | None
) -> None:
    own = {"guards": {"rules": [{"name": "mine", "when": f"{metric} > 1", "warn": True}]}}
    values = merge(own, changes)
    if need is None:
        assert not OfflinePPOConfig.model_validate(values).sleeping_rules
        return
    with pytest.raises(ValidationError, match=f"mine watches {metric}, which needs .*{need}"):
        OfflinePPOConfig.model_validate(values)
    for off in ({"thresholds": {"mine": None}}, {"enabled": False}):
        assert OfflinePPOConfig.model_validate(merge(values, {"guards": off}))


def test_a_default_that_sleeps_is_known_before_training() -> None:
    assert not OfflinePPOConfig().sleeping_rules
    cfg = OfflinePPOConfig(policy_loss="topr")
    assert list(cfg.sleeping_rules.values()) == [
        "effective_samples watches ess_share, which needs policy_loss ppo"
    ]


def test_the_defaults_let_a_healthy_run_pass() -> None:
    engine = default_engine()
    assert engine.observe(0, {"reward_agrees_with_label_upper": 0.6}) == []
    for probe in range(10):
        metrics = {
            "kl_probe": 0.009 * probe,  # at most 0.081
            "probe_win_rate": 0.5 + 0.04 * probe,
            "probe_length_tokens": 10.0 + 0.4 * probe,  # at most 13.6: 0.36 above the start
            "held_out_accuracy_upper": 0.55 + 0.02 * probe,
            "probe_entropy": 2.0 - 0.1 * probe,
            "ess_share": 0.8 - 0.05 * probe,  # at least 0.35
        }
        assert engine.observe(10 * probe, metrics) == []
    assert engine.passing and engine.unobserved_metrics == ()


@pytest.mark.parametrize(
    ("metric", "good", "bad", "expected"),
    [
        (
            "kl_probe",
            0.09,
            0.11,
            Actions("good", learning_rate_scale=0.5, min_learning_rate_share=0.01),
        ),
        ("ess_share", 0.31, 0.29, Actions(reanchor=True)),
        # |3.1 - 2| / 2 = 0.55
        ("probe_entropy", 2.0, 3.1, Actions(reset_sampler=True)),
    ],
)
def test_what_each_default_does(metric: str, good: float, bad: float, expected: Actions) -> None:
    engine = default_engine()
    for step in range(8):
        assert engine.observe(step, {metric: good}) == []
    assert merged(engine.observe(8, {metric: bad})) == expected
    # twenty steps of silence
    assert all(engine.observe(step, {metric: bad}) == [] for step in range(9, 28))


def test_a_win_rate_that_stays_down_goes_back_to_the_best() -> None:
    engine = default_engine()
    engine.observe(0, {"probe_win_rate": 0.70})
    # down 0.06 from the best: once may be noise
    assert engine.observe(10, {"probe_win_rate": 0.64}) == []
    firings = engine.observe(20, {"probe_win_rate": 0.64})
    assert merged(firings) == Actions("best")


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
    assert merged(firings).stop == stops


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
    actions = merged(firings)
    assert actions.rollback == target and actions.stop
    assert next(iter(poisoned)).removesuffix("_upper") in actions.reason


def test_rules_see_metrics_by_their_own_names() -> None:
    metrics = {"live_gradient": 0.25, "ess_share": 0.5, "learning_rate": 1.0}
    assert guarded(metrics) == {"live_gradient_share": 0.25, "ess_share": 0.5}


def _loop() -> Any:
    cfg = OfflinePPOConfig()
    session = SimpleNamespace(runtime=cfg.runtime)
    session.rebuild = lambda runtime: setattr(session, "runtime", runtime)
    log = SimpleNamespace(event=lambda name, message: None)
    return SimpleNamespace(cfg=cfg, session=session, log=log, lowered=None)


def test_memory_that_ran_out_again_is_not_raised_by_the_checkpoint_between() -> None:
    loop, error = _loop(), MemoryLimitError("rank 0 ran out of memory")
    tokens = loop.session.runtime.tokens_per_micro_batch
    lower_memory(loop, error)
    checkpoint = loop.lowered
    assert checkpoint == {
        "tokens_per_micro_batch": tokens // 2,
        "gradient_checkpointing": loop.cfg.runtime.gradient_checkpointing,
    }
    lower_memory(loop, error)
    assert not adopt_memory(loop, checkpoint)
    assert loop.session.runtime.tokens_per_micro_batch == tokens // 4
    # Another process knows no better than the checkpoint.
    later = _loop()
    assert adopt_memory(later, checkpoint) and not adopt_memory(later, checkpoint)
    assert later.session.runtime.tokens_per_micro_batch == tokens // 2
    assert not adopt_memory(_loop(), None)
