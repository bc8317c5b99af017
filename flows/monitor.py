"""What one invocation did: per stage, in total, and how much memory it took."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

from tasks.artifacts import EvalReport, load_artifact, read_manifest
from tasks.whole_file import write_whole

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
