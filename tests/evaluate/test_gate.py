"""The verdict on a student."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.evaluate.config import GateConfig
from tasks.evaluate.gate import decide
from tasks.evaluate.report import check_text


def _report(mean: float | None = 6.0, difference: float | None = -0.5, **more: Any) -> Any:
    differences = {} if difference is None else {"student": {"difference": difference}}
    return {
        "n_held_out_prompts": 20,
        "questions": {"student": {"mean": mean, "coverage": 1.0}, "base": {"coverage": 1.0}},
        "differences": differences,
        "held_out": {
            "student": {"win_rate_against_base": 0.55, "scored": 20},
            "base": {"scored": 20},
        },
        **more,
    }


def _passed(gate: GateConfig, report: Any) -> dict[str, bool]:
    found = decide(gate, report)
    assert found["verdict"] == ("passed" if all(c["passed"] for c in found["checks"]) else "failed")
    passed = {check["name"]: check["passed"] for check in found["checks"]}
    assert passed.pop("min_coverage")
    return passed


def test_without_limits_there_is_no_verdict() -> None:
    assert decide(GateConfig(), _report()) == {"model": "student", "verdict": None, "checks": []}


@pytest.mark.parametrize(("limit", "passed"), [(5.9, True), (6.0, True), (6.1, False)])
def test_score(limit: float, passed: bool) -> None:
    assert _passed(GateConfig(min_score=limit), _report()) == {"min_score": passed}


@pytest.mark.parametrize(("limit", "passed"), [(0.4, False), (0.5, True), (0.6, True)])
def test_regression_is_how_far_below_the_base_it_is(limit: float, passed: bool) -> None:
    assert _passed(GateConfig(max_regression=limit), _report()) == {"max_regression": passed}


def test_better_than_the_base_is_no_regression() -> None:
    assert _passed(GateConfig(max_regression=0.0), _report(difference=0.1))["max_regression"]


def test_win_rate_is_the_judges_where_it_compared_pairs() -> None:
    gate = GateConfig(min_win_rate=0.5)
    assert _passed(gate, _report()) == {"min_win_rate": True}
    pairwise = {"student": {"win_rate_adjusted": 0.45, "coverage": 1.0}}
    found = decide(gate, _report(pairwise=pairwise))
    assert found["verdict"] == "failed" and found["checks"][0]["value"] == 0.45
    # The judge was asked and failed: the reward model does not stand in for it.
    found = decide(
        gate, _report(pairwise={"student": {"win_rate_adjusted": None, "coverage": 0.0}})
    )
    assert found["verdict"] == "failed" and found["checks"][0]["value"] is None


def test_what_was_not_measured_is_not_good_enough() -> None:
    gate = GateConfig(min_score=1.0, max_regression=9.0, min_win_rate=0.1)
    found = _passed(gate, _report(mean=None, difference=None))
    assert found == {"min_score": False, "min_win_rate": True, "max_regression": False}


@pytest.mark.parametrize(
    ("limits", "change", "value", "what"),
    [
        # 36 of 40 are 0.9, 35 are less.
        ({"min_score": 5.0}, {"student": 36 / 40}, 0.9, None),
        ({"min_score": 5.0}, {"student": 35 / 40}, 0.875, "judgments of student with a score"),
        ({"min_score": 5.0}, {"base": 0.0}, 1.0, None),
        ({"max_regression": 1.0}, {"base": 0.5}, 0.5, "judgments of base with a score"),
        ({"max_regression": 1.0, "min_coverage": 0.5}, {"base": 0.5}, 0.5, None),
    ],
)
def test_what_covers_too_little_fails_and_says_so(
    limits: dict[str, float], change: dict[str, float], value: float, what: str | None
) -> None:
    report = _report()
    for name, coverage in change.items():
        report["questions"][name]["coverage"] = coverage
    found = decide(GateConfig.model_validate(limits), report)
    *others, coverage_check = found["checks"]
    assert all(check["passed"] for check in others)
    assert (coverage_check["name"], coverage_check["value"]) == ("min_coverage", value)
    assert found["verdict"] == ("failed" if what else "passed")
    if what:
        assert coverage_check["what"] == what
        assert check_text(coverage_check).startswith(f"failed, {value:.3f} ({what}), limit 0.9")


def test_win_rate_needs_coverage_of_what_it_is_taken_from() -> None:
    gate = GateConfig(min_win_rate=0.5)
    report = _report()
    report["held_out"]["base"]["scored"] = 17
    found = decide(gate, report)
    # 17 of 20 are 0.85.
    assert found["verdict"] == "failed" and found["checks"][-1]["value"] == 0.85
    pairwise = {"student": {"win_rate_adjusted": 0.6, "coverage": 0.8}}
    found = decide(gate, _report(pairwise=pairwise))
    assert found["verdict"] == "failed"
    assert found["checks"][-1]["what"] == "comparisons of student with a verdict"
