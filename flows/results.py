"""Finished stages as rows of a table, for the terminal and for Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.monitor import StageOutcome
from tasks.artifacts import read_manifest


def chain_rows(outcomes: Mapping[str, StageOutcome]) -> list[dict[str, str]]:
    """Return one row per stage: whether it ran, seconds, its metrics, where the result is."""
    return [
        {
            "stage": stage,
            "state": "reused" if outcome.reused else "ran",
            "seconds": f"{outcome.seconds:.1f}",
            "metrics": key_metrics(outcome),
            "artifact": outcome.artifact,
        }
        for stage, outcome in outcomes.items()
    ]


def key_metrics(outcome: StageOutcome, limit: int = 4) -> str:
    """Return the first metrics of a stage as text; a dataset shows its counts instead."""
    manifest = read_manifest(Path(outcome.artifact))
    shown = [f"{name} {value:.4g}" for name, value in list(manifest.metrics.items())[:limit]]
    if manifest.kind == "preference_dataset":
        counts = manifest.counts
        shown = [f"{name} {counts[name]}" for name in ("kept", "quarantined") if name in counts]
    return ", ".join(shown)
