"""Whether a student is good enough, by limits that were set before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from tasks.config import GateConfig

GATED: Final = "student"
BASELINE: Final = "base"


@dataclass(frozen=True)
class Check:
    """One limit.

    Args:
        value: what was measured; None where nothing was, which is never good enough.
    """

    name: str
    limit: float
    value: float | None
    passed: bool
    what: str


def decide(gate: GateConfig, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict on the student: ``passed``, ``failed``, or None without limits."""
    checks = []
    if gate.min_score is not None:
        value = report["questions"][GATED]["mean"]
        checks.append(_at_least("min_score", gate.min_score, value, "mean score"))
    if gate.min_win_rate is not None:
        value, what = _win_rate(report)
        checks.append(_at_least("min_win_rate", gate.min_win_rate, value, what))
    if gate.max_regression is not None:
        found = report["differences"].get(GATED)
        value = 0.0 - found["difference"] if found else None
        passed = value is not None and value <= gate.max_regression
        what = "points below the base on the same questions"
        checks.append(Check("max_regression", gate.max_regression, value, passed, what))
    verdict = None
    if checks:
        verdict = "passed" if all(check.passed for check in checks) else "failed"
    return {"model": GATED, "verdict": verdict, "checks": [asdict(check) for check in checks]}


def _at_least(name: str, limit: float, value: float | None, what: str) -> Check:
    return Check(name, limit, value, value is not None and value >= limit, what)


def _win_rate(report: Mapping[str, Any]) -> tuple[float | None, str]:
    if "pairwise" in report:
        rate: float | None = report["pairwise"][GATED]["win_rate_adjusted"]
        return rate, "win rate against the base by the judge, ties half"
    held_out: float | None = report["held_out"][GATED]["win_rate_against_base"]
    return held_out, "win rate against the base by the reward model, ties half"
