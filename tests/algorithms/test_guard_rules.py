"""Conditions of guards, their text form, and the actions they ask for."""

from __future__ import annotations

import math

import pytest
from guard_helpers import engine_of, rule
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.guards import (
    Condition,
    GrowBatch,
    LowerTokenBudget,
    MemorySettings,
    OomLadder,
    Reanchor,
    ResetSampler,
    Rollback,
    Rule,
    ScaleLearningRate,
    Stop,
    Warn,
    merge_actions,
    parse_condition,
)
from tasks.errors import ConfigError, TrainingError

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
    ("text", "message"),
    [
        # columns from 1: "kl_probe >" has 10 characters, so the second '>' is the 11th
        ("kl_probe >> 0.1", r"'>' at position 11.*Expected: a number"),
        ("kl_probe = 0.1", "'=' at position 10.*one of > >= < <="),
        ("kl_probe", "nothing at position 9.*one of > >= < <="),
        ("", "nothing at position 1.*a metric or a reading"),
        ("0.1 < kl_probe", "'0.1' at position 1.*a metric or a reading"),
        ("kl_probe > nan", "'nan' at position 12.*a number"),
        ("kl_probe > inf", "'inf' at position 12.*a number"),
        ("kl_probe > 1e999", "'1e999' at position 12.*finite in double precision"),
        ("kl_probe > 0.1 or entropy > 1", "'or' at position 16.*the end of the text"),
        ("kl_probe > 0.1.2", r"'\.2' at position 15.*the end of the text"),
        ("kl_probe > entropy", "'entropy' at position 12.*a number"),
        ("jump(entropy) > 1", r"'\)' at position 13.*','"),
        ("jump(entropy, 0) > 1", "'0' at position 15.*a window from 1 to 1000"),
        ("jump(entropy, 1001) > 1", "'1001' at position 15.*a window from 1 to 1000"),
        ("jump(entropy, 2.0) > 1", r"'2\.0' at position 15.*a window"),
        (f"jump(entropy, {'9' * 5000}) > 1", "at position 15.*a window"),
        ("drop_from_best(entropy, 8) > 1", r"',' at position 23.*'\)'"),
        ("value(entropy) > 1", r"'value' at position 1.*drop_from_best.*before '\('"),
        ("__import__('os') > 1", "'__import__' at position 1.*drop_from_best"),
        ("klprobe > 0.1", "'klprobe' at position 1.*reports, perhaps kl_probe"),
        ("jump(oracle, 2) > 0.1", "'oracle' at position 6.*a metric that training reports"),
    ],
)
def test_bad_conditions_say_where_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_condition(text, rule="my_rule", known_metrics={"kl_probe", "entropy"})
    said = str(caught.value)
    assert "rule 'my_rule'" in said and repr(text) in said
    assert "jump(metric, window)" in said and "metrics: entropy, kl_probe" in said


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
        ResetSampler(),
        ScaleLearningRate(0.5, 0.01),
        GrowBatch(2.0, 128),
        Rollback("good"),
        ScaleLearningRate(0.25, 0.1),
        Warn(),
        GrowBatch(4.0, 64),
        Rollback("best"),
        Reanchor(),
    ]
    assert merge_actions(asked) == (
        Rollback("best"),
        ScaleLearningRate(0.125, 0.1),  # 0.5 * 0.25
        GrowBatch(4.0, 64),
        Reanchor(),
        ResetSampler(),
        Warn(),
    )
    assert merge_actions([*asked, Stop("b"), Stop("a")]) == (Rollback("best"), Stop("a; b"))
    assert merge_actions([Warn(), Stop("a")]) == (Stop("a"),)
    assert merge_actions([Rollback("start"), Rollback("best")]) == (Rollback("start"),)
    assert merge_actions([]) == ()


def test_actions_applied_to_settings() -> None:
    # 0.4 * 0.5; not below 0.1; never raised to a minimum above the present share
    assert ScaleLearningRate(0.5, 0.1).apply(0.4) == 0.2
    assert ScaleLearningRate(0.5, 0.1).apply(0.15) == 0.1
    assert ScaleLearningRate(0.5, 0.1).apply(0.05) == 0.05
    assert [GrowBatch(2.0, 128).apply(n) for n in (48, 100, 128, 200)] == [96, 128, 128, 200]
    assert [LowerTokenBudget(0.5, 300).apply(n) for n in (1000, 500, 200)] == [500, 300, 200]


# --- settings that cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rollback("last"), "rollback to 'last'"),  # type: ignore[arg-type]
        (lambda: ScaleLearningRate(1.0), "learning rate factor is 1.0"),
        (lambda: ScaleLearningRate(math.nan), "learning rate factor is nan"),
        (lambda: ScaleLearningRate(0.5, 2.0), "share is 2.0"),
        (lambda: GrowBatch(1.0, 10), "batch factor is 1.0"),
        (lambda: GrowBatch(math.inf, 10), "batch factor is inf"),
        (lambda: GrowBatch(2.0, 0), "maximum batch is 0"),
        (lambda: LowerTokenBudget(0.0), "token budget factor is 0.0"),
        (lambda: LowerTokenBudget(0.5, 0), "minimum token budget is 0"),
        (lambda: Condition("x", ">", math.nan), "threshold of x is nan"),
        (lambda: Condition("x", "==", 1.0), "x with '=='"),  # type: ignore[arg-type]
        (lambda: Condition("x", ">", 1.0, "jump"), "window of 0"),
        (lambda: Condition("x", ">", 1.0, "value", 3), "window of 3"),
        (lambda: Rule("r", Condition("x", ">", 1.0), ()), r"rule 'r' has 0 action\(s\)"),
        (lambda: rule("x > 1", cooldown_steps=-1), "cooldown_steps of rule 'r' is -1"),
        (lambda: rule("x > 1", for_observations=0), "for_observations of rule 'r' is 0"),
        (lambda: engine_of(rule("x > 1"), rule("y > 1")), "several rules are named r"),
        (lambda: engine_of(max_rollbacks=-1), "max_rollbacks is -1"),
        (lambda: OomLadder(0), "minimum token budget is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ConfigError, match=message):
        build()


# --- out of memory -------------------------------------------------------------------------------


def test_the_ladder_by_hand() -> None:
    ladder = OomLadder(minimum_tokens=600)
    at = MemorySettings(2000, gradient_checkpointing=False)
    seen = []
    for _ in range(3):
        at = ladder.after(at, ladder.on_oom(at))
        seen.append((at.tokens_per_micro_batch, at.gradient_checkpointing))
    # 2000 / 2 = 1000, 1000 / 2 = 500 but not below 600, then checkpointing
    assert seen == [(1000, False), (600, False), (600, True)]
    with pytest.raises(TrainingError, match=r"600 tokens per micro-batch.*max_prompt_tokens"):
        ladder.on_oom(at)


@given(
    tokens=st.integers(1, 10**6),
    minimum=st.integers(1, 10**6),
    factor=st.floats(0.01, 0.99),
    checkpointing=st.booleans(),
)
def test_the_ladder_ends(tokens: int, minimum: int, factor: float, checkpointing: bool) -> None:
    ladder, at = OomLadder(minimum, factor), MemorySettings(tokens, checkpointing)
    for _ in range(2000):
        try:
            action = ladder.on_oom(at)
        except TrainingError:
            break
        after = ladder.after(at, action)
        assert after != at and after.tokens_per_micro_batch <= at.tokens_per_micro_batch
        at = after
    else:
        pytest.fail("the ladder did not end")
    assert at == MemorySettings(min(tokens, minimum), True)
