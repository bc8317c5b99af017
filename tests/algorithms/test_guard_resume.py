"""The state of the guards: exact resumption, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from guard_helpers import engine_of, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.guards import (
    Firing,
    GuardEngine,
    ResetSampler,
    Rollback,
    ScaleLearningRate,
    Stop,
    Warn,
)
from tasks.errors import DataError

NOT_FINITE = [math.nan, math.inf, -math.inf]


RULES = [
    rule("x > 1", Rollback("good"), ScaleLearningRate(0.5), name="a", cooldown_steps=3),
    rule("drop_from_best(x) > 0.5", Rollback("best"), name="b", for_observations=2),
    rule("jump(y, 3) > 0.5", ResetSampler(), name="c", cooldown_steps=2),
    rule("rise_from_start(y) > 0.5", Warn(), name="d", for_observations=3),
    rule("drop_from_start(y) > 0.9", Stop(), name="e"),
]
METRICS = st.dictionaries(
    st.sampled_from(["x", "y"]), st.one_of(st.floats(-2.0, 2.0), st.sampled_from(NOT_FINITE))
)


def told(firings: list[Firing]) -> str:
    return json.dumps([firing.to_dict() for firing in firings])


@settings(deadline=None)
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
    engine_of(rule("jump(x, 2) > 0.9", Stop())).load_state_dict(state)
    for other in (rule("jump(x, 3) > 0.5"), rule("jump(x, 2) > 0.5", name="new")):
        with pytest.raises(DataError, match=r"jump\(x, 2\).*Fix: resume with the rules"):
            engine_of(other).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"watches": {}},
        {"watches": {"r": {"streak": 1}}},
        {"histories": {"x": [[1]]}},
        {"histories": []},
        {"n_rollbacks": None},
    ],
)
def test_a_torn_state_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    engine = engine_of(rule("x > 1"))
    engine.observe(3, {"x": 0.5})
    before = engine.state_dict()
    with pytest.raises(DataError, match="a torn guard state"):
        engine.load_state_dict({**before, **damage})
    with pytest.raises(DataError, match="a guard state of None"):
        engine.load_state_dict({})
    assert engine.state_dict() == before
