"""Finished stages as rows of a table, for the terminal and for Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flows.monitor import StageOutcome
from tasks.artifacts import read_manifest


def chain_rows(outcomes: Mapping[str, StageOutcome]) -> list[dict[str, str]]:
    """Return one row per stage: whether it ran, seconds, its metrics, where the result is."""
    return [
        {
            "stage": stage,
            "state": state_of(outcome),
            "seconds": f"{outcome.seconds:.1f}",
            "metrics": key_metrics(outcome),
            "artifact": outcome.artifact,
        }
        for stage, outcome in outcomes.items()
    ]


STOPPED: Final = "stopped by a guard"


def state_of(outcome: StageOutcome) -> str:
    """Return whether a stage ran, and whether a guard ended its training before the last step."""
    state = "reused" if outcome.reused else "ran"
    metrics = read_manifest(Path(outcome.artifact)).metrics
    return f"{state}, {STOPPED}" if metrics.get("stopped_by_guard") == 1.0 else state


# What people look for first in a stage; without any of them, its first metrics are shown.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward_model": ("test_accuracy", "test_accuracy_low", "test_accuracy_high", "test_ece"),
    "offline_ppo": ("reward_agrees_with_label", "chosen_logprob_drift", "rejected_logprob_drift"),
    "distill": ("teacher_same_top", "win_rate_against_base", "win_rate_against_teacher"),
    "evaluate": (
        "policy_win_rate_against_base",
        "student_win_rate_against_base",
        "policy_oracle_good_rate",
        "student_oracle_good_rate",
    ),
}


def key_metrics(outcome: StageOutcome, limit: int = 4) -> str:
    """Return the metrics that matter most in a stage as text; a dataset shows its counts
    instead."""
    manifest = read_manifest(Path(outcome.artifact))
    wanted = [n for n in HEADLINES.get(manifest.stage, ()) if n in manifest.metrics]
    names = wanted or list(manifest.metrics)[:limit]
    shown = [f"{name} {manifest.metrics[name]:.4g}" for name in names]
    if manifest.kind == "preference_dataset":
        counts = manifest.counts
        shown = [f"{name} {counts[name]}" for name in ("kept", "quarantined") if name in counts]
    return ", ".join(shown)
