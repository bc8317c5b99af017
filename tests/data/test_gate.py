"""The verdict on a student."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.config import GateConfig
from tasks.data.gate import decide


def _report(mean: float | None = 6.0, difference: float | None = -0.5, **more: Any) -> Any:
    differences = {} if difference is None else {"student": {"difference": difference}}
    return {
        "questions": {"student": {"mean": mean}},
        "differences": differences,
        "held_out": {"student": {"win_rate_against_base": 0.55}},
        **more,
    }


def _passed(gate: GateConfig, report: Any) -> dict[str, bool]:
    found = decide(gate, report)
    assert found["verdict"] == ("passed" if all(c["passed"] for c in found["checks"]) else "failed")
    return {check["name"]: check["passed"] for check in found["checks"]}


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
    pairwise = {"student": {"win_rate_adjusted": 0.45}}
    found = decide(gate, _report(pairwise=pairwise))
    assert found["verdict"] == "failed" and found["checks"][0]["value"] == 0.45
    # The judge was asked and failed: the reward model does not stand in for it.
    found = decide(gate, _report(pairwise={"student": {"win_rate_adjusted": None}}))
    assert found["verdict"] == "failed" and found["checks"][0]["value"] is None


def test_what_was_not_measured_is_not_good_enough() -> None:
    gate = GateConfig(min_score=1.0, max_regression=9.0, min_win_rate=0.1)
    found = _passed(gate, _report(mean=None, difference=None))
    assert found == {"min_score": False, "min_win_rate": True, "max_regression": False}
