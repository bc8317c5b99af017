"""The rule engine over training metrics."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from guard_helpers import engine_of, rule
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.guards import (
    HISTORY_OBSERVATIONS,
    Action,
    EnableGradientCheckpointing,
    Firing,
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

NOT_FINITE = [math.nan, math.inf, -math.inf]


def fired_at(engine: GuardEngine, values: list[float], metric: str = "x") -> list[int]:
    """Observe values at steps 1, 2, ... and return the steps that fired."""
    return [step for step, v in enumerate(values, 1) if engine.observe(step, {metric: v})]


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
    engine = engine_of(rule("x > 1", Rollback("good"), cooldown_steps=3))
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
        rule(text, Rollback("good"), name=f"r{i}", cooldown_steps=cooldown, for_observations=wait)
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
        rule("x > 1", Rollback("good"), name="back"),
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
    engine = engine_of(rule("x > 1", Rollback("good"), ScaleLearningRate(0.5)), max_rollbacks=2)
    ordinary = (Rollback("good"), ScaleLearningRate(0.5))
    assert [merged_actions(engine.observe(step, {"x": 2})) for step in (1, 2)] == [ordinary] * 2
    (last,) = engine.observe(3, {"x": 2.0})
    assert last.actions == (Rollback("best"), Stop("r asks for a rollback after 2 of them"))
    assert engine.n_rollbacks == 2
    assert "stop (r asks for a rollback after 2 of them)" in last.message


def test_no_rollback_is_allowed_when_the_limit_is_zero() -> None:
    engine = engine_of(rule("x > 1", Rollback("start")), max_rollbacks=0)
    final = merged_actions(engine.observe(1, {"x": 2.0}))
    assert final == (Rollback("start"), Stop("r asks for a rollback after 0 of them"))


def test_rollbacks_of_one_observation_count_once() -> None:
    engine = engine_of(
        rule("x > 1", Rollback("good"), name="a"), rule("x > 1", Rollback("best"), name="b")
    )
    assert merged_actions(engine.observe(1, {"x": 2.0})) == (Rollback("best"),)
    assert engine.n_rollbacks == 1


def test_a_loop_that_rolled_the_state_back_too_would_never_stop() -> None:
    """The weights go back to where the metric is bad again: only the memory ends this."""
    rules = [rule("x > 1", Rollback("good"))]
    kept, forgetful = (GuardEngine(rules, max_rollbacks=2) for _ in range(2))
    start = forgetful.state_dict()
    endings = []
    for _ in range(6):
        endings.append(any(isinstance(a, Stop) for a in merged_actions(kept.observe(5, {"x": 2}))))
        firings = forgetful.observe(5, {"x": 2})
        assert merged_actions(firings) == (Rollback("good"),)
        forgetful.load_state_dict(start)
    # two rollbacks, then the end
    assert endings == [False, False, True, True, True, True]


def test_a_checkpoint_is_good_only_when_no_rule_that_doubts_the_policy_holds() -> None:
    engine = engine_of(
        rule("x > 1", Rollback("good"), name="doubt", for_observations=2, cooldown_steps=9),
        rule("y > 1", Reanchor(), name="care"),
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
    engine = engine_of(rule("x > 1", Stop()))
    engine.observe(1, {"x": math.nan})
    assert not engine.passing


def test_metrics_that_never_came_are_told() -> None:
    engine = engine_of(rule("x > 1", name="a"), rule("jump(y, 2) > 1", name="b"))
    assert list(engine.unobserved_metrics) == ["x", "y"]
    engine.observe(1, {"y": 0.0, "z": 0.0})
    assert list(engine.unobserved_metrics) == ["x"]


# --- several rules at once -----------------------------------------------------------------------

ACTIONS = st.one_of(
    st.sampled_from(
        [
            Rollback("good"),
            Rollback("best"),
            Rollback("start"),
            ResetSampler(),
            Reanchor(),
            Warn(),
            EnableGradientCheckpointing(),
        ]
    ),
    st.builds(ScaleLearningRate, st.floats(0.1, 0.9), st.floats(0.0, 0.1)),
    st.builds(GrowBatch, st.floats(1.5, 4.0), st.integers(64, 256)),
    st.builds(LowerTokenBudget, st.floats(0.1, 0.9), st.integers(1, 2048)),
)


@given(wishes=st.lists(st.lists(ACTIONS, min_size=1, max_size=3), max_size=6), data=st.data())
def test_the_order_of_rules_does_not_change_the_merged_actions(
    wishes: list[list[Action]], data: st.DataObject
) -> None:
    rules = [rule("x > 1", *actions, name=f"r{i}") for i, actions in enumerate(wishes)]
    other = data.draw(st.permutations(rules))
    limit = data.draw(st.integers(0, 2))
    one, two = GuardEngine(rules, max_rollbacks=limit), GuardEngine(other, max_rollbacks=limit)
    for step in range(1, 5):
        first = merged_actions(one.observe(step, {"x": 2.0}))
        assert first == merged_actions(two.observe(step, {"x": 2.0}))
        assert len({type(action) for action in first}) == len(first)


# --- what is told --------------------------------------------------------------------------------


def test_a_firing_tells_the_history_and_what_is_done() -> None:
    engine = engine_of(
        rule("drop_from_best(win) > 0.05", Rollback("best"), ScaleLearningRate(0.5, 0.01), name="w")
    )
    values = [0.5, 0.6, 0.625, 0.5]
    for step, value in enumerate(values[:-1], 1):
        assert engine.observe(10 * step, {"win": value}) == []
    (firing,) = engine.observe(40, {"win": 0.5})
    assert firing == Firing(
        step=40,
        rule="w",
        condition="drop_from_best(win) > 0.05",
        metric="win",
        value=0.5,
        reading=0.125,  # 0.625 - 0.5
        threshold=0.05,
        actions=(Rollback("best"), ScaleLearningRate(0.5, 0.01)),
        history=((10, 0.5), (20, 0.6), (30, 0.625), (40, 0.5)),
    )
    assert firing.message == (
        "Guard w at step 40: drop_from_best(win) > 0.05 (win is 0.5, the reading 0.125; before: "
        "0.5, 0.6, 0.625). Action: roll back to the best checkpoint; multiply the learning rate "
        "by 0.5, not below 0.01 of the configured one."
    )
    told = json.loads(json.dumps(firing.to_dict(), allow_nan=False))
    assert told["actions"][0] == {"action": "rollback", "to": "best"}
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
    engine = engine_of(rule("agree < 0.55", Stop(), name="labels"))
    (firing,) = engine.observe(0, {"agree": 0.125})
    assert firing.actions == (Stop("labels: agree < 0.55, agree is 0.125"),)


def test_guards_need_the_standard_library_only() -> None:
    code = (
        "import sys, tasks.algorithms.guards; print(sorted({'torch', 'pydantic'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
