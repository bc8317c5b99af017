"""Whether a student is good enough, by limits that were set before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from tasks.evaluate.config import GateConfig

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
    """Return the verdict on the student: ``passed``, ``failed``, or None without limits.

    What is compared must also cover enough: a mean over the judgments that happen to be there says
    little, so the least covered figure has a check of its own.
    """
    checks, coverages = [], []
    if gate.min_score is not None:
        value = report["questions"][GATED]["mean"]
        coverages += _question_coverages(report, GATED)
        checks.append(_at_least("min_score", gate.min_score, value, "mean score"))
    if gate.min_win_rate is not None:
        value, what = _win_rate(report)
        coverages += _win_rate_coverages(report)
        checks.append(_at_least("min_win_rate", gate.min_win_rate, value, what))
    if gate.max_regression is not None:
        found = report["differences"].get(GATED)
        value = 0.0 - found["difference"] if found else None
        passed = value is not None and value <= gate.max_regression
        what = "points below the base on the same questions"
        coverages += _question_coverages(report, GATED, BASELINE)
        checks.append(Check("max_regression", gate.max_regression, value, passed, what))
    verdict = None
    if checks:
        least, what = min(coverages)
        checks.append(_at_least("min_coverage", gate.min_coverage, least, what))
        verdict = "passed" if all(check.passed for check in checks) else "failed"
    return {"model": GATED, "verdict": verdict, "checks": [asdict(check) for check in checks]}


def _at_least(name: str, limit: float, value: float | None, what: str) -> Check:
    return Check(name, limit, value, value is not None and value >= limit, what)


def _question_coverages(report: Mapping[str, Any], *models: str) -> list[tuple[float, str]]:
    """Return the share of the judgments with a score, and what it is called, of each model."""
    sections = report["questions"]
    return [(sections[name]["coverage"], f"judgments of {name} with a score") for name in models]


def _win_rate_coverages(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    if "pairwise" in report:
        return [(report["pairwise"][GATED]["coverage"], f"comparisons of {GATED} with a verdict")]
    n_prompts = report["n_held_out_prompts"]
    return [
        (report["held_out"][name]["scored"] / n_prompts, f"held-out responses of {name} scored")
        for name in (GATED, BASELINE)
    ]


def _win_rate(report: Mapping[str, Any]) -> tuple[float | None, str]:
    if "pairwise" in report:
        rate: float | None = report["pairwise"][GATED]["win_rate_adjusted"]
        return rate, "win rate against the base by the judge, ties half"
    held_out: float | None = report["held_out"][GATED]["win_rate_against_base"]
    return held_out, "win rate against the base by the reward model, ties half"
