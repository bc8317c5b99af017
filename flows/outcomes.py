"""Finished stages as rows of a table, for the terminal and for Prefect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
from pydantic import BaseModel

from flows.stages import STAGE_SPECS
from tasks.artifacts import (
    Artifact,
    EvalReport,
    PreferenceDataset,
    load_artifact,
    read_manifest,
)
from tasks.tracking.mlflow import Tracker

# What one invocation did: per stage, in total, and how much memory it took.

_SAMPLE_SECONDS = 0.5
_METRICS = 4
_COUNTS = ("kept", "quarantined")


class StageOutcome(BaseModel):
    """A finished stage: what it made, whether it was there already, and how long that took."""

    artifact: str
    fingerprint: str
    mlflow_run_id: str | None
    seconds: float
    reused: bool


class RunMonitor:
    """Collects outcomes between its start and `stop`, and samples the memory of this process and
    all below it twice a second, Ray workers and servers included.

    The figure is the sum of resident set sizes (RSS). Pages that processes share, such as libraries
    and Ray's object store, count once per process, so it is an upper bound of what was used.

    Args:
        started_at: seconds since 1970 from which ``wall_seconds`` counts.
    """

    def __init__(self, started_at: float) -> None:
        self.outcomes: dict[str, StageOutcome] = {}
        self.wall_seconds = 0.0
        self.peak_rss_bytes = 0
        self.inputs_checked = False
        self._started_at = started_at
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        root = psutil.Process()
        while True:
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(root))
            if self._stop.wait(_SAMPLE_SECONDS):
                return

    def read(self) -> None:
        """Bring ``wall_seconds`` up to date."""
        self.wall_seconds = time.time() - self._started_at

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()
        self.read()


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
    """Return the content of ``summary.json``."""
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
    return {
        "stages": stages,
        "wall_seconds": round(wall_seconds, 3),
        "peak_rss_bytes": peak_rss_bytes,
        "demo": demo_figures(outcomes),
    }


def demo_figures(outcomes: Mapping[str, StageOutcome]) -> dict[str, Any]:
    """Return what the demo's oracle says; outside the demo world all figures are null."""
    figures: Mapping[str, Any] = {}
    if "evaluate" in outcomes:
        report = load_artifact(Path(outcomes["evaluate"].artifact), EvalReport).report
        figures = report.get("demo") or {}
    rates = figures.get("oracle_good_rate", {})
    return {
        "oracle_good_rate": {name: rates.get(name) for name in ("base", "policy", "student")},
        "reward_accuracy_clean": figures.get("reward_accuracy_clean"),
    }


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


def headlines(stage: str, names: Sequence[str], limit: int) -> list[str]:
    """Return the metrics that people look for first; without any of them, the first ones."""
    wanted = [name for name in STAGE_SPECS[stage].headlines if name in names]
    return wanted or list(names)[:limit]


def key_metrics(outcome: StageOutcome) -> str:
    """Return the metrics that matter most in a stage as text; a dataset shows its counts."""
    manifest = read_manifest(Path(outcome.artifact))
    counts, metrics = manifest.counts, manifest.metrics
    if manifest.kind == PreferenceDataset.KIND:
        return ", ".join(f"{name} {counts[name]}" for name in _COUNTS if name in counts)
    names = headlines(manifest.stage, list(metrics), _METRICS)
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names)


# What a run leaves in the Prefect UI: links and tables.


def _key(stage: str, suffix: str) -> str:
    return f"{stage.replace('_', '-')}-{suffix}"


def publish_link(tracker: Tracker, stage: str, run_id: str) -> None:
    """Link the Prefect run to its MLflow page, or say where the database is."""
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
    manifest = artifact.manifest
    rows = [("artifact", str(artifact.path)), ("fingerprint", manifest.fingerprint)]
    rows += [("reused" if outcome.reused else "seconds", f"{outcome.seconds:.1f} s")]
    rows += [(name, str(count)) for name, count in manifest.counts.items()]
    rows += [(name, f"{value:.4g}") for name, value in manifest.metrics.items()]
    table = [{"name": name, "value": value} for name, value in rows]
    create_table_artifact(table=table, key=_key(manifest.stage, "result"))


def publish_card(artifact: Artifact) -> None:
    """Show the data card of a dataset as a page."""
    text = (artifact.path / "card.md").read_text(encoding="utf-8")
    create_markdown_artifact(text, key=_key(artifact.manifest.stage, "card"))


def publish_chain(summary: str, outcomes: Mapping[str, StageOutcome]) -> None:
    """Show the stages of a chain as a table, and its summary as a page."""
    create_table_artifact(table=chain_rows(outcomes), key="rlhf-pipeline-result")
    create_markdown_artifact(summary, key="rlhf-pipeline-summary")
