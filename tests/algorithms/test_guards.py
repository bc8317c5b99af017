"""The rule engine over training metrics."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.guards import (
    HISTORY_OBSERVATIONS,
    Actions,
    Condition,
    Firing,
    GuardEngine,
    Rule,
    after_out_of_memory,
    merge_actions,
    parse_condition,
)
from tasks.errors import ConfigError, DataError, TrainingError

NOT_FINITE = [math.nan, math.inf, -math.inf]
TO_GOOD, TO_BEST, WARN = Actions("good"), Actions("best"), Actions(warn=True)


def rule(when: str, actions: Actions = WARN, name: str = "r", **rest: Any) -> Rule:
    return Rule(name, parse_condition(when, rule=name), actions, **rest)


def engine_of(*rules: Rule, max_rollbacks: int = 100) -> GuardEngine:
    return GuardEngine(rules, max_rollbacks=max_rollbacks)


def merged(firings: list[Firing]) -> Actions:
    return merge_actions([firing.actions for firing in firings])


def fired_at(engine: GuardEngine, values: list[float], metric: str = "x") -> list[int]:
    """Observe values at steps 1, 2, ... and return the steps that fired."""
    return [step for step, v in enumerate(values, 1) if engine.observe(step, {metric: v})]


# --- conditions and their text -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl_probe > 0.1", Condition("kl_probe", ">", 0.1)),
        ("  kl_probe>=1e-1 ", Condition("kl_probe", ">=", 0.1)),
        ("actor/grad.norm < -.5", Condition("actor/grad.norm", "<", -0.5)),
        ("drop_from_best(win) > 0.05", Condition("win", ">", 0.05, "drop_from_best")),
        ("drop_from_start( acc ) <= 2.", Condition("acc", "<=", 2.0, "drop_from_start")),
        ("rise_from_start(len) > 0.5", Condition("len", ">", 0.5, "rise_from_start")),
        ("jump(entropy, 8) > 0.5", Condition("entropy", ">", 0.5, "jump", 8)),
    ],
)
def test_conditions_are_parsed_and_written_back(text: str, expected: Condition) -> None:
    parsed = parse_condition(text, rule="r")
    assert parsed == expected
    assert parse_condition(str(parsed), rule="r") == expected


@given(
    threshold=st.floats(allow_nan=False, allow_infinity=False),
    comparison=st.sampled_from([">", ">=", "<", "<="]),
)
def test_every_finite_threshold_survives_its_text(threshold: float, comparison: str) -> None:
    condition = Condition("x", comparison, threshold)  # type: ignore[arg-type]
    assert parse_condition(str(condition), rule="r").threshold == threshold


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl_probe",
        "kl_probe >> 0.1",
        "kl_probe = 0.1",
        "0.1 < kl_probe",
        "kl_probe > nan",
        "kl_probe > inf",
        "kl_probe > 1e999",
        "kl_probe > 0.1 or entropy > 1",
        "kl_probe > 0.1.2",
        "kl_probe > entropy",
        "jump(entropy) > 1",
        "jump(entropy, 0) > 1",
        "jump(entropy, 1001) > 1",
        "jump(entropy, 2.0) > 1",
        f"jump(entropy, {'9' * 5000}) > 1",
        "jump(entropy, 2 > 1",
        "drop_from_best(entropy, 8) > 1",
        "value(entropy) > 1",
        "__import__('os') > 1",
    ],
)
def test_bad_conditions_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_condition(text, rule="my_rule")
    said = str(caught.value)
    assert "rule 'my_rule'" in said and repr(text) in said and "jump(metric, window)" in said


@pytest.mark.parametrize(
    ("comparison", "below", "equal", "above"),
    [
        (">", False, False, True),
        (">=", False, True, True),
        ("<", True, False, False),
        ("<=", True, True, False),
    ],
)
def test_comparisons(comparison: str, below: bool, equal: bool, above: bool) -> None:
    engines = [engine_of(rule(f"x {comparison} 1")) for _ in range(3)]
    seen = [bool(e.observe(1, {"x": v})) for e, v in zip(engines, (0.5, 1.0, 1.5), strict=True)]
    assert seen == [below, equal, above]


# --- actions -------------------------------------------------------------------------------------


def test_merging_by_hand() -> None:
    asked = [
        Actions(reset_sampler=True),
        Actions(learning_rate_scale=0.5, min_learning_rate_share=0.01),
        Actions(batch_scale=2.0, max_batch_prompts=128),
        Actions("good", learning_rate_scale=0.25, min_learning_rate_share=0.1, warn=True),
        Actions("best", batch_scale=4.0, max_batch_prompts=64, reanchor=True),
        Actions(token_budget_scale=0.5, min_tokens_per_micro_batch=600),
        Actions(token_budget_scale=0.25, min_tokens_per_micro_batch=500),
    ]
    assert merge_actions(asked) == Actions(
        "best",
        learning_rate_scale=0.125,  # 0.5 * 0.25
        min_learning_rate_share=0.1,
        batch_scale=4.0,
        max_batch_prompts=64,
        token_budget_scale=0.25,
        min_tokens_per_micro_batch=600,
        reanchor=True,
        reset_sampler=True,
        warn=True,
    )
    stops = [Actions(stop=True, reason="b"), Actions(stop=True, reason="a")]
    assert merge_actions([*asked, *stops]) == Actions("best", stop=True, reason="a; b")
    assert merge_actions([Actions(warn=True), stops[1]]) == stops[1]
    assert merge_actions([Actions("start"), Actions("best")]) == Actions("start")
    assert merge_actions([]) == Actions()


def test_actions_applied_to_settings() -> None:
    # 0.4 * 0.5; not below 0.1; never raised to a minimum above the present share
    slower = Actions(learning_rate_scale=0.5, min_learning_rate_share=0.1)
    assert [slower.lr_scale(share) for share in (0.4, 0.15, 0.05)] == [0.2, 0.1, 0.05]
    larger = Actions(batch_scale=2.0, max_batch_prompts=128)
    assert [larger.batch_prompts(n) for n in (48, 100, 128, 200)] == [96, 128, 128, 200]
    smaller = Actions(token_budget_scale=0.5, min_tokens_per_micro_batch=300)
    assert [smaller.token_budget(n) for n in (1000, 500, 200)] == [500, 300, 200]
    nothing = Actions(warn=True)
    assert (nothing.lr_scale(0.3), nothing.batch_prompts(7), nothing.token_budget(9)) == (0.3, 7, 9)


def test_a_warning_changes_nothing_and_all_else_does() -> None:
    assert not Actions().change_run and not Actions(warn=True).change_run
    assert Actions(reanchor=True, warn=True).change_run
    assert Actions(stop=True).doubt_policy and Actions("good").doubt_policy
    assert not Actions(reanchor=True).doubt_policy


# --- out of memory -------------------------------------------------------------------------------


def test_what_memory_is_lowered_to_by_hand() -> None:
    tokens, checkpointing, seen = 2000, False, []
    for _ in range(3):
        actions = after_out_of_memory(tokens, checkpointing, minimum_tokens=600, scale=0.5)
        tokens = actions.token_budget(tokens)
        checkpointing = checkpointing or actions.gradient_checkpointing
        seen.append((tokens, checkpointing))
    # 2000 / 2 = 1000, 1000 / 2 = 500 but not below 600, then checkpointing
    assert seen == [(1000, False), (600, False), (600, True)]
    with pytest.raises(TrainingError, match=r"600 tokens per micro-batch.*max_prompt_tokens"):
        after_out_of_memory(tokens, checkpointing, minimum_tokens=600, scale=0.5)


@given(
    tokens=st.integers(1, 10**6),
    minimum=st.integers(1, 10**6),
    scale=st.floats(0.01, 0.99),
    checkpointing=st.booleans(),
)
def test_lowering_memory_ends(tokens: int, minimum: int, scale: float, checkpointing: bool) -> None:
    at = (tokens, checkpointing)
    for _ in range(2000):
        try:
            actions = after_out_of_memory(*at, minimum_tokens=minimum, scale=scale)
        except TrainingError:
            break
        after = (actions.token_budget(at[0]), at[1] or actions.gradient_checkpointing)
        assert after != at and after[0] <= at[0]
        at = after
    else:
        pytest.fail("nothing ends this")
    assert at == (min(tokens, minimum), True)


# --- readings ------------------------------------------------------------------------------------


def readings(when: str, values: list[float]) -> list[float | None]:
    """Return what each observation is read as, under a rule that always holds."""
    engine = engine_of(rule(when))
    fired = [engine.observe(step, {"x": value}) for step, value in enumerate(values, 1)]
    return [firings[0].reading if firings else None for firings in fired]


def test_drop_from_best() -> None:
    # best 0.5, 0.7, 0.7, 0.7, 0.75
    expected = [0.0, 0.0, 0.1, 0.2, 0.0]
    seen = readings("drop_from_best(x) > -1", [0.5, 0.7, 0.6, 0.5, 0.75])
    assert seen == pytest.approx(expected)


def test_drop_from_start() -> None:
    seen = readings("drop_from_start(x) > -9", [0.6, 0.9, 0.5])
    # 0.6 - 0.6, 0.6 - 0.9, 0.6 - 0.5
    assert seen == pytest.approx([0.0, -0.3, 0.1])


def test_rise_from_start() -> None:
    # 10/10 - 1, 16/10 - 1, 4/10 - 1
    assert readings("rise_from_start(x) > -9", [10, 16, 4]) == pytest.approx([0.0, 0.6, -0.6])
    # from -10 to -5 is a rise: (-5 + 10) / 10
    assert readings("rise_from_start(x) > -9", [-10, -5]) == pytest.approx([0.0, 0.5])
    # nothing to compare with: any rise from 0 is infinite, none is 0
    assert readings("rise_from_start(x) > -9", [0, 0, 0.01]) == [0.0, 0.0, math.inf]


def test_jump_compares_with_the_mean_of_the_observations_before() -> None:
    # window 2; mean(1, 3) = 2: |5 - 2| / 2 = 1.5; mean(3, 5) = 4: |2 - 4| / 4 = 0.5;
    # mean(5, 2) = 3.5: 0
    assert readings("jump(x, 2) > -1", [1, 3, 5, 2, 3.5]) == [None, None, 1.5, 0.5, 0.0]
    # mean(-2) = -2: |-3 + 2| / 2
    assert readings("jump(x, 1) > -1", [-2, -3]) == [None, 0.5]
    assert readings("jump(x, 1) > -1", [0, 0, 1]) == [None, 0.0, math.inf]
    assert readings("jump(x, 8) > -1", [1e308] * 9)[-1] == pytest.approx(0.0, abs=1e-12)


# --- when a rule fires ---------------------------------------------------------------------------


def test_a_rule_waits_for_consecutive_observations() -> None:
    engine = engine_of(rule("x > 1", for_observations=3))
    # streaks 1 2 0 1 2 3! 1 2 3! (a firing starts the count anew)
    assert fired_at(engine, [2, 2, 0, 2, 2, 2, 2, 2, 2]) == [6, 9]


def test_an_absent_metric_keeps_the_streak() -> None:
    engine = engine_of(rule("x > 1", for_observations=2))
    assert not engine.observe(1, {"x": 2.0})
    assert not engine.observe(2, {"y": 9.0})
    assert [firing.step for firing in engine.observe(3, {"x": 2.0})] == [3]


def test_cool_down_counts_steps() -> None:
    engine = engine_of(rule("x > 1", cooldown_steps=3))
    # fires at 1, silent before 1 + 3 = 4, and so on
    assert fired_at(engine, [2] * 8) == [1, 4, 7]
    sparse = engine_of(rule("x > 1", cooldown_steps=20))
    assert [step for step in (10, 20, 29, 30, 49, 50) if sparse.observe(step, {"x": 2})] == [
        10,
        30,
        50,
    ]


def test_cool_down_goes_on_after_the_loop_went_back() -> None:
    engine = engine_of(rule("x > 1", TO_GOOD, cooldown_steps=3))
    assert engine.observe(100, {"x": 2.0})
    # the loop restores step 40: 41, 42, 43 are the 1st, 2nd and 3rd step after the firing
    assert [bool(engine.observe(step, {"x": 2.0})) for step in (41, 42, 43)] == [False, False, True]


def test_several_observations_of_one_step_do_not_shorten_the_cool_down() -> None:
    engine = engine_of(rule("x > 1", cooldown_steps=2))
    fired = [bool(engine.observe(step, {"x": 2.0})) for step in (1, 1, 1, 2, 2, 3)]
    assert fired == [True, False, False, False, False, True]


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("comparison", [">", "<"])
@pytest.mark.parametrize("reading", ["x", "drop_from_best(x)", "rise_from_start(x)", "jump(x, 3)"])
def test_a_value_that_is_not_finite_fires_at_once(
    bad: float, comparison: str, reading: str
) -> None:
    engine = engine_of(rule(f"{reading} {comparison} 0.5", cooldown_steps=50, for_observations=4))
    assert len(engine.observe(1, {"x": bad})) == 1
    # neither the cool-down nor the streak holds it back
    (again,) = engine.observe(2, {"x": bad})
    assert again.value == bad or math.isnan(bad)
    assert math.isnan(again.reading)
    json.dumps(again.to_dict(), allow_nan=False)
    json.dumps(engine.state_dict(), allow_nan=False)


def test_a_value_that_is_not_finite_enters_no_memory() -> None:
    seen = readings("drop_from_start(x) > -9", [math.nan, 0.5, math.inf, 0.25])
    assert math.isnan(seen[0] or 0.0) and math.isnan(seen[2] or 0.0)
    # the start is 0.5: 0.5 - 0.25
    assert (seen[1], seen[3]) == (0.0, 0.25)


WITHIN = st.floats(-1.0, 1.0)


@given(values=st.lists(WITHIN, max_size=30), cooldown=st.integers(0, 5), wait=st.integers(1, 3))
def test_a_metric_within_bounds_never_fires(values: list[float], cooldown: int, wait: int) -> None:
    # of values in [-1, 1], no drop exceeds 2; a constant neither rises nor jumps
    bounds = ["x > 1", "x < -1", "drop_from_best(x) > 2", "drop_from_start(x) > 2"]
    still = ["rise_from_start(c) > 0.0", "jump(c, 2) > 1e-9"]
    rules = [
        rule(text, name=f"r{i}", cooldown_steps=cooldown, for_observations=wait)
        for i, text in enumerate(bounds + still)
    ]
    engine = engine_of(*rules)
    for step, value in enumerate(values, 1):
        assert engine.observe(step, {"x": value, "c": 0.3, "other": math.nan}) == []
    assert engine.passing


@given(
    values=st.lists(WITHIN, max_size=12),
    place=st.integers(0, 12),
    bad=st.sampled_from(NOT_FINITE),
    cooldown=st.integers(0, 30),
    wait=st.integers(1, 9),
)
def test_a_value_that_is_not_finite_never_passes(
    values: list[float], place: int, bad: float, cooldown: int, wait: int
) -> None:
    rules = [
        rule(text, TO_GOOD, name=f"r{i}", cooldown_steps=cooldown, for_observations=wait)
        for i, text in enumerate(["x > 0", "x < 0", "jump(x, 3) > 0.5", "drop_from_best(x) >= 0"])
    ]
    engine = engine_of(*rules)
    place = min(place, len(values))
    for step, value in enumerate([*values[:place], bad, *values[place:]], 1):
        fired = {firing.rule for firing in engine.observe(step, {"x": value})}
        assert step != place + 1 or fired == {"r0", "r1", "r2", "r3"}


# --- rollbacks -----------------------------------------------------------------------------------


def test_after_a_rollback_streaks_and_windows_restart_and_best_stays() -> None:
    engine = engine_of(
        rule("x > 1", TO_GOOD, name="back"),
        rule("s > 1", name="streak", for_observations=2),
        rule("j > -1", name="seen"),
        rule("jump(j, 2) > -1", name="jump"),
        rule("drop_from_best(b) > 0.05", name="best"),
    )
    engine.observe(1, {"s": 2.0, "j": 1.0, "b": 0.9})
    engine.observe(2, {"x": 2.0, "j": 1.0, "b": 0.9})  # rolls back
    names = [f.rule for f in engine.observe(1, {"s": 2.0, "j": 5.0, "b": 0.8})]
    # the streak is 1, the window of j is empty, the best of b is still 0.9: 0.9 - 0.8 > 0.05
    assert names == ["seen", "best"]
    assert [f.rule for f in engine.observe(2, {"s": 2.0})] == ["streak"]
    engine.observe(2, {"j": 5.0})
    assert "jump" in [f.rule for f in engine.observe(3, {"j": 5.0})]
    assert engine.n_rollbacks == 1


def test_one_rollback_too_many_ends_the_run_with_the_best_checkpoint() -> None:
    ordinary = Actions("good", learning_rate_scale=0.5)
    engine = engine_of(rule("x > 1", ordinary), max_rollbacks=2)
    assert [merged(engine.observe(step, {"x": 2})) for step in (1, 2)] == [ordinary] * 2
    (last,) = engine.observe(3, {"x": 2.0})
    reason = "r asks for a rollback after 2 of them"
    assert last.actions == Actions("best", stop=True, reason=reason)
    assert engine.n_rollbacks == 2
    assert "stop (r asks for a rollback after 2 of them)" in last.message


def test_no_rollback_is_allowed_when_the_limit_is_zero() -> None:
    engine = engine_of(rule("x > 1", Actions("start")), max_rollbacks=0)
    final = merged(engine.observe(1, {"x": 2.0}))
    reason = "r asks for a rollback after 0 of them"
    assert final == Actions("start", stop=True, reason=reason)


def test_rollbacks_of_one_observation_count_once() -> None:
    engine = engine_of(rule("x > 1", TO_GOOD, name="a"), rule("x > 1", TO_BEST, name="b"))
    assert merged(engine.observe(1, {"x": 2.0})) == TO_BEST
    assert engine.n_rollbacks == 1


def test_a_loop_that_rolled_the_state_back_too_would_never_stop() -> None:
    """The weights go back to where the metric is bad again: only the memory ends this."""
    rules = [rule("x > 1", TO_GOOD)]
    kept, forgetful = (GuardEngine(rules, max_rollbacks=2) for _ in range(2))
    start = forgetful.state_dict()
    endings = []
    for _ in range(6):
        endings.append(merged(kept.observe(5, {"x": 2})).stop)
        firings = forgetful.observe(5, {"x": 2})
        assert merged(firings) == TO_GOOD
        forgetful.load_state_dict(start)
    # two rollbacks, then the end
    assert endings == [False, False, True, True, True, True]


def test_a_checkpoint_is_good_only_when_no_rule_that_doubts_the_policy_holds() -> None:
    engine = engine_of(
        rule("x > 1", TO_GOOD, name="doubt", for_observations=2, cooldown_steps=9),
        rule("y > 1", Actions(reanchor=True), name="care"),
    )
    assert engine.passing
    engine.observe(1, {"x": 2.0})
    assert not engine.passing  # out of bounds once, and still waiting for the second time
    engine.observe(2, {"y": 2.0})
    assert not engine.passing  # absent: what was seen last counts
    engine.observe(3, {"x": 1.0, "y": 2.0})
    assert engine.passing  # a rule that keeps the policy does not doubt it
    engine.observe(4, {"x": 2.0})
    assert engine.observe(5, {"x": 2.0}) and not engine.passing  # what was seen is to go
    engine.observe(6, {"y": 0.0})
    assert engine.passing  # and is gone
    engine.observe(7, {"x": 2.0})
    assert not engine.passing  # in the cool-down as well


def test_no_checkpoint_is_good_while_a_metric_is_not_finite() -> None:
    engine = engine_of(rule("x > 1", Actions(stop=True)))
    engine.observe(1, {"x": math.nan})
    assert not engine.passing


def test_metrics_that_never_came_are_told() -> None:
    engine = engine_of(rule("x > 1", name="a"), rule("jump(y, 2) > 1", name="b"))
    assert list(engine.unobserved_metrics) == ["x", "y"]
    engine.observe(1, {"y": 0.0, "z": 0.0})
    assert list(engine.unobserved_metrics) == ["x"]


# --- several rules at once -----------------------------------------------------------------------

ACTIONS = st.builds(
    Actions,
    rollback=st.sampled_from([None, "good", "best", "start"]),
    learning_rate_scale=st.floats(0.1, 1.0),
    min_learning_rate_share=st.floats(0.0, 0.1),
    batch_scale=st.floats(1.0, 4.0),
    max_batch_prompts=st.integers(64, 256),
    token_budget_scale=st.floats(0.1, 1.0),
    min_tokens_per_micro_batch=st.integers(1, 2048),
    gradient_checkpointing=st.booleans(),
    reanchor=st.booleans(),
    stop=st.sampled_from([False, False, False, True]),
)


@given(wishes=st.lists(ACTIONS, max_size=6), data=st.data())
def test_the_order_of_rules_does_not_change_the_merged(
    wishes: list[Actions], data: st.DataObject
) -> None:
    rules = [rule("x > 1", actions, name=f"r{i}") for i, actions in enumerate(wishes)]
    other = data.draw(st.permutations(rules))
    limit = data.draw(st.integers(0, 2))
    one, two = GuardEngine(rules, max_rollbacks=limit), GuardEngine(other, max_rollbacks=limit)
    for step in range(1, 5):
        assert merged(one.observe(step, {"x": 2.0})) == merged(two.observe(step, {"x": 2.0}))


# --- the state -----------------------------------------------------------------------------------

RULES = [
    rule("x > 1", Actions("good", learning_rate_scale=0.5), name="a", cooldown_steps=3),
    rule("drop_from_best(x) > 0.5", TO_BEST, name="b", for_observations=2),
    rule("jump(y, 3) > 0.5", Actions(reset_sampler=True), name="c", cooldown_steps=2),
    rule("rise_from_start(y) > 0.5", Actions(warn=True), name="d", for_observations=3),
    rule("drop_from_start(y) > 0.9", Actions(stop=True), name="e"),
]
METRICS = st.dictionaries(
    st.sampled_from(["x", "y"]), st.one_of(st.floats(-2.0, 2.0), st.sampled_from(NOT_FINITE))
)


def told(firings: list[Firing]) -> str:
    return json.dumps([firing.to_dict() for firing in firings])


@given(
    run=st.lists(st.tuples(st.integers(0, 4), METRICS), max_size=25),
    goes_back=st.integers(0, 25),
    limit=st.integers(0, 4),
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    run: list[tuple[int, dict[str, float]]], goes_back: int, limit: int
) -> None:
    steps, step = [], 50
    for index, (ahead, _) in enumerate(run):
        step = step - 10 if index == goes_back else step + ahead
        steps.append(step)
    whole = GuardEngine(RULES, max_rollbacks=limit)
    saved, expected = [json.dumps(whole.state_dict(), allow_nan=False)], []
    for step, (_, metrics) in zip(steps, run, strict=True):
        expected.append(told(whole.observe(step, metrics)))
        saved.append(json.dumps(whole.state_dict(), allow_nan=False))
    for split in range(len(run) + 1):
        resumed = GuardEngine(RULES, max_rollbacks=limit)
        resumed.load_state_dict(json.loads(saved[split]))
        tail = zip(steps[split:], run[split:], strict=True)
        assert [told(resumed.observe(step, m)) for step, (_, m) in tail] == expected[split:]
        assert json.dumps(resumed.state_dict()) == saved[-1]


def test_a_saved_state_does_not_change_with_the_engine() -> None:
    engine = engine_of(rule("jump(x, 3) > 1"))
    engine.observe(1, {"x": 1.0})
    state = engine.state_dict()
    before = json.dumps(state)
    engine.observe(2, {"x": 2.0})
    assert json.dumps(state) == before
    other = engine_of(rule("jump(x, 3) > 1"))
    other.load_state_dict(state)
    other.observe(2, {"x": 2.0})
    assert json.dumps(state) == before


def test_a_threshold_may_change_on_resumption_a_reading_may_not() -> None:
    state = engine_of(rule("jump(x, 2) > 0.5")).state_dict()
    engine_of(rule("jump(x, 2) > 0.9", Actions(stop=True))).load_state_dict(state)
    for other in (rule("jump(x, 3) > 0.5"), rule("jump(x, 2) > 0.5", name="new")):
        with pytest.raises(DataError, match=r"jump\(x, 2\).*Fix: resume with the rules"):
            engine_of(other).load_state_dict(state)
    with pytest.raises(DataError, match="a guard state of None"):
        engine_of().load_state_dict({})


def test_a_state_as_checkpoints_have_it_goes_on() -> None:
    rules = [
        rule("kl_probe > 0.1", Actions("good", learning_rate_scale=0.5), "probe_kl"),
        rule("drop_from_best(win) > 0.05", TO_BEST, "win", for_observations=2, cooldown_steps=20),
        rule("jump(entropy, 3) > 0.5", Actions(reset_sampler=True), "entropy_jump"),
    ]
    state = json.loads("""{
        "readings": {"probe_kl": "kl_probe", "win": "drop_from_best(win)",
                     "entropy_jump": "jump(entropy, 3)"},
        "watches": {
            "probe_kl": {"streak": 0, "cooldown_left_steps": 5, "holds": false, "first": 0.0,
                         "best": 0.05, "window": []},
            "win": {"streak": 1, "cooldown_left_steps": 0, "holds": true, "first": 0.5,
                    "best": 0.75, "window": []},
            "entropy_jump": {"streak": 0, "cooldown_left_steps": 0, "holds": false, "first": 2.0,
                             "best": 2.5, "window": [2.0, 2.0]}},
        "histories": {"kl_probe": [[0, 0.0], [10, "nan"], [20, 0.05]],
                      "entropy": [[0, 2.0], [10, 2.0]],
                      "win": [[0, 0.5], [10, 0.75], [20, 0.625]]},
        "last_step": 25, "n_rollbacks": 1, "condemned": false}""")
    engine = engine_of(*rules, max_rollbacks=1)
    engine.load_state_dict(state)
    assert engine.state_dict() == state
    assert not engine.passing  # the win rate was down at the last probe
    # The cool-down of probe_kl ends at 30, and the window of the entropy is full only then.
    assert engine.observe(29, {"kl_probe": 0.2, "entropy": 2.0}) == []
    fired = {firing.rule: firing for firing in engine.observe(30, {"win": 0.625, "entropy": 4.0})}
    assert fired["win"].reading == 0.125  # 0.75 - 0.625, for the second time
    assert fired["win"].history == ((0, 0.5), (10, 0.75), (20, 0.625), (30, 0.625))
    assert fired["win"].actions.reason == "win asks for a rollback after 1 of them"
    assert fired["entropy_jump"].reading == 1.0  # |4 - 2| / 2
    (later,) = engine.observe(31, {"kl_probe": 0.2})
    assert math.isnan(later.history[1][1])


# --- what is told --------------------------------------------------------------------------------


def test_a_firing_tells_the_history_and_what_is_done() -> None:
    actions = Actions("best", learning_rate_scale=0.5, min_learning_rate_share=0.01)
    engine = engine_of(rule("drop_from_best(win) > 0.05", actions, name="w"))
    values = [0.5, 0.6, 0.625, 0.5]
    for step, value in enumerate(values[:-1], 1):
        assert engine.observe(10 * step, {"win": value}) == []
    (firing,) = engine.observe(40, {"win": 0.5})
    assert firing == Firing(
        step=40,
        rule="w",
        condition=Condition("win", ">", 0.05, "drop_from_best"),
        value=0.5,
        reading=0.125,  # 0.625 - 0.5
        actions=actions,
        history=((10, 0.5), (20, 0.6), (30, 0.625), (40, 0.5)),
    )
    assert firing.message == (
        "Guard w at step 40: drop_from_best(win) > 0.05 (win is 0.5, the reading 0.125; before: "
        "0.5, 0.6, 0.625). Action: roll back to the best checkpoint; multiply the learning rate "
        "by 0.5, not below 0.01 of the configured one."
    )
    told = json.loads(json.dumps(firing.to_dict(), allow_nan=False))
    assert (told["step"], told["rule"]) == (40, "w")
    assert told["history"][-1] == [40, 0.5]


def test_the_history_is_bounded_and_shared_by_rules_of_one_metric() -> None:
    engine = engine_of(rule("x > 98", name="a"), rule("x > 98.5", name="b"))
    for step in range(100):
        firings = engine.observe(step, {"x": float(step)})
    # the last 20 of 0..99, each once although two rules watch them
    expected = tuple((step, float(step)) for step in range(80, 100))
    assert [firing.history for firing in firings] == [expected] * 2
    assert len(expected) == HISTORY_OBSERVATIONS


def test_a_stop_gives_its_reason() -> None:
    engine = engine_of(rule("agree < 0.55", Actions(stop=True), name="labels"))
    (firing,) = engine.observe(0, {"agree": 0.125})
    reason = "labels: agree < 0.55, agree is 0.125"
    assert firing.actions == Actions(stop=True, reason=reason)


def test_guards_need_the_standard_library_only() -> None:
    code = (
        "import sys, tasks.algorithms.guards; print(sorted({'torch', 'pydantic'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
