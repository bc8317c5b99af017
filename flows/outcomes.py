"""Finished stages as rows of a table, for the terminal and for Prefect."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import psutil
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.context import FlowRunContext
from pydantic import BaseModel

from tasks.artifacts import Artifact, EvalReport, load_artifact, read_manifest, write_whole
from tasks.tracking.mlflow import Tracker

# What one invocation did: per stage, in total, and how much memory it took.

_SAMPLE_SECONDS = 0.5
_POPULATIONS = ("base", "policy", "student")


class StageOutcome(BaseModel):
    """A finished stage: what it made, whether it was there already, and how long that took."""

    artifact: str
    fingerprint: str
    mlflow_run_id: str | None
    seconds: float
    reused: bool


class MemorySampler:
    """Samples the memory of this process and all below it, Ray workers and servers included.

    The figure is the sum of resident set sizes (RSS). Pages that processes share, such as libraries
    and Ray's object store, count once per process, so it is an upper bound of what was used.
    """

    def __init__(self) -> None:
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def start(self) -> None:
        """Start sampling twice a second."""
        self._thread.start()

    def stop(self) -> int:
        """Stop and return the peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak_rss_bytes

    def _sample(self) -> None:
        root = psutil.Process()
        while True:
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(root))
            if self._stop.wait(_SAMPLE_SECONDS):
                return


def tree_rss_bytes(root: psutil.Process) -> int:
    """Return the summed RSS of a process and all below it; one that has ended counts nothing."""
    total = 0
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        processes = [root]
    for process in processes:
        try:
            total += int(process.memory_info().rss)
        except psutil.Error:
            continue
    return total


class RunMonitor:
    """Collects outcomes between its start and `stop`.

    Args:
        started_at: seconds since 1970 from which ``wall_seconds`` counts.
    """

    def __init__(self, started_at: float) -> None:
        self.outcomes: dict[str, StageOutcome] = {}
        self.wall_seconds = 0.0
        self.peak_rss_bytes = 0
        self.inputs_checked = False
        self._started_at = started_at
        self._memory = MemorySampler()
        self._memory.start()

    def record(self, stage: str, outcome: StageOutcome) -> None:
        """Note that a stage is finished."""
        self.outcomes[stage] = outcome

    def read(self) -> None:
        """Bring ``wall_seconds`` and ``peak_rss_bytes`` up to date."""
        self.wall_seconds = time.time() - self._started_at
        self.peak_rss_bytes = self._memory.peak_rss_bytes

    def stop(self) -> None:
        """Stop sampling."""
        self._memory.stop()
        self.read()


_CURRENT: ContextVar[RunMonitor | None] = ContextVar("rlhf_run_monitor", default=None)


def current_monitor() -> RunMonitor | None:
    """Return the monitor of the enclosing `monitored` block."""
    return _CURRENT.get()


@contextmanager
def monitored(started_at: float | None = None) -> Iterator[RunMonitor]:
    """Yield the monitor of the enclosing block, or a new one that ends with this block."""
    enclosing = _CURRENT.get()
    if enclosing is not None:
        yield enclosing
        return
    monitor = RunMonitor(started_at or time.time())
    token = _CURRENT.set(monitor)
    try:
        yield monitor
    finally:
        _CURRENT.reset(token)
        monitor.stop()


def summary_of(
    outcomes: Mapping[str, StageOutcome], wall_seconds: float, peak_rss_bytes: int
) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``demo`` figures are null outside the demo world."""
    stages = {
        stage: {
            "artifact": outcome.artifact,
            "fingerprint": outcome.fingerprint,
            "mlflow_run_id": outcome.mlflow_run_id,
            "seconds": round(outcome.seconds, 3),
            "metrics": read_manifest(Path(outcome.artifact)).metrics,
        }
        for stage, outcome in outcomes.items()
    }
    report: Mapping[str, Any] = {}
    if "evaluate" in outcomes:
        report = load_artifact(Path(outcomes["evaluate"].artifact), EvalReport).report
    return {
        "stages": stages,
        "wall_seconds": round(wall_seconds, 3),
        "peak_rss_bytes": peak_rss_bytes,
        "demo": _demo_figures(report),
    }


def _demo_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    rates = {name: _look_up(report, f"demo.oracle_good_rate.{name}") for name in _POPULATIONS}
    return {
        "oracle_good_rate": rates,
        "reward_accuracy_clean": _look_up(report, "demo.reward_accuracy_clean"),
    }


def _look_up(report: Mapping[str, Any], name: str) -> Any:
    """Return a value by dotted name, from flat or nested keys; None when it is not there."""
    value: Any = report
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return report.get(name, value)


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all.

    Raises:
        WorkspaceError: the directory cannot be written.
    """
    write_whole(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")


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


# What a run leaves in the Prefect UI: links and tables.


def _key(stage: str, suffix: str) -> str:
    return f"{stage.replace('_', '-')}-{suffix}"


def publish_link(tracker: Tracker, stage: str, run_id: str) -> None:
    """Link the Prefect run to its MLflow page, or say where the database is."""
    if FlowRunContext.get() is None:
        return
    url = tracker.run_url(run_id)
    if url is not None:
        create_link_artifact(link=url, link_text=f"MLflow run {run_id}", key=_key(stage, "mlflow"))
        return
    text = (
        f"MLflow run `{run_id}` of experiment `{tracker.experiment}`.\n\n"
        f"Open it with `mlflow server --backend-store-uri {tracker.shown_uri}`."
    )
    create_markdown_artifact(text, key=_key(stage, "mlflow"))


def publish_result(artifact: Artifact, outcome: StageOutcome) -> None:
    """Show what a stage made as a table."""
    if FlowRunContext.get() is None:
        return
    manifest = artifact.manifest
    rows = [("artifact", str(artifact.path)), ("fingerprint", manifest.fingerprint)]
    rows += [("reused" if outcome.reused else "seconds", f"{outcome.seconds:.1f} s")]
    rows += [(name, str(count)) for name, count in manifest.counts.items()]
    rows += [(name, f"{value:.4g}") for name, value in manifest.metrics.items()]
    table = [{"name": name, "value": value} for name, value in rows]
    create_table_artifact(table=table, key=_key(manifest.stage, "result"))


def publish_card(artifact: Artifact) -> None:
    """Show the data card of a dataset as a page."""
    if FlowRunContext.get() is not None:
        text = (artifact.path / "card.md").read_text(encoding="utf-8")
        create_markdown_artifact(text, key=_key(artifact.manifest.stage, "card"))


def publish_chain(summary: str, outcomes: Mapping[str, StageOutcome]) -> None:
    """Show the stages of a chain as a table, and its summary as a page."""
    if FlowRunContext.get() is not None and outcomes:
        create_table_artifact(table=chain_rows(outcomes), key="rlhf-pipeline-result")
        create_markdown_artifact(summary, key="rlhf-pipeline-summary")
