"""Where a stage reports while it works: MLflow metrics, progress, events, files."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import tasks.tracking.mlflow  # noqa: F401 - it sets what MLflow reads when it is imported
from tasks.context import run_logger
from tasks.errors import ClusterError, RlhfError
from tasks.tracking.mlflow import MetricPoint, Tracker, clean_name

# Progress on a terminal: a bar where there is one, a line now and then where there is not.

_SECONDS_BETWEEN_LINES = 15.0


class ProgressDisplay:
    """Shows one stage's progress on standard error. Safe to call from any thread; picklable.

    Args:
        title: what is running.
        console: where to write; standard error when None.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self._console = console or Console(stderr=True)
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"title": self.title}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["title"])  # type: ignore[misc]

    def update(self, done: float, total: float, message: str = "") -> None:
        """Show that ``done`` of ``total`` is finished."""
        with self._lock:
            if self._console.is_terminal:
                self._update_bar(done, total, message)
            else:
                self._print_line(done, total, message)

    def note(self, message: str) -> None:
        """Print a line that stays, above the bar."""
        with self._lock:
            self._console.print(f"{self.title}: {message}", highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None

    def _update_bar(self, done: float, total: float, message: str) -> None:
        if self._bar is None or self._task is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(self.title, total=total, note=message)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, note=message)

    def _print_line(self, done: float, total: float, message: str) -> None:
        now = time.monotonic()
        if now - self._last_line_at < _SECONDS_BETWEEN_LINES:
            return
        self._last_line_at = now
        text = f"{self.title}: {done:,.0f}/{total:,.0f} {message}".rstrip()
        print(text, file=sys.stderr, flush=True)


_FLUSH_POINTS = 500
_FLUSH_SECONDS = 5.0
_PREFECT_SECONDS = 5.0


class StageLog:
    """Reports of one run; implements `tasks.context.RunLog`.

    Metrics are buffered and written in batches. A copy that was unpickled in another process writes
    to the same run at once, because nobody closes it.

    Args:
        tracker: where the run is.
        run_id: MLflow id of the run.
        stage: stem of the stage.
        display: what the user sees.
    """

    def __init__(self, tracker: Tracker, run_id: str, stage: str, display: ProgressDisplay) -> None:
        self.tracker = tracker
        self.run_id = run_id
        self.stage = stage
        self.display = display
        self._start(is_copy=False)

    def _start(self, is_copy: bool) -> None:
        self._is_copy = is_copy
        self._lock = threading.RLock()
        self._points: list[MetricPoint] = []
        self._has_warned = False
        self._refused: dict[str, tuple[int, int]] = {}
        self._events: list[dict[str, str]] = []
        self._flushed_at = time.monotonic()
        self._prefect_progress = None if is_copy else _PrefectProgress(self.stage)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "tracker": self.tracker,
            "run_id": self.run_id,
            "stage": self.stage,
            "display": self.display,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(is_copy=True)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record metrics of one step; non-finite ones are refused by name and counted."""
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            for name, value in values.items():
                number = float(value)
                if math.isfinite(number):
                    self._points.append(MetricPoint(clean_name(name), number, step, now_ms))
                else:
                    self._refuse(clean_name(name), step)
            is_due = time.monotonic() - self._flushed_at >= _FLUSH_SECONDS
            if self._is_copy or is_due or len(self._points) >= _FLUSH_POINTS:
                self.flush()

    def _refuse(self, name: str, step: int) -> None:
        count, first_step = self._refused.get(name, (0, step))
        self._refused[name] = (count + 1, first_step)
        if count == 0:
            self.event(f"nonfinite.{name}", f"{name} is not finite at step {step}")

    def flush(self, is_last: bool = False) -> None:
        """Write what is buffered.

        Raises:
            ClusterError: on the last flush only; before it a server that is away for a while costs
                a warning, and the points wait for the next flush.
        """
        with self._lock:
            self._flushed_at = time.monotonic()
            try:
                if self._points:
                    self.tracker.log_points(self.run_id, self._points)
                    self._points = []
                if self._refused:
                    self.tracker.set_tags(self.run_id, self._refused_tags())
            except ClusterError as error:
                if is_last or self._is_copy:
                    raise
                self._warn_once(error)

    def _refused_tags(self) -> dict[str, str]:
        return {
            f"nonfinite.{name}": f"{count}, first at step {step}"
            for name, (count, step) in self._refused.items()
        }

    def _warn_once(self, error: ClusterError) -> None:
        if not self._has_warned:
            self._has_warned = True
            run_logger(self.stage).warning("Metrics are kept back until MLflow answers: %s", error)
            self.display.note(f"metrics are kept back until MLflow answers: {error.found}")

    def progress(self, done: float, total: float, message: str = "") -> None:
        """Show how far a long piece of work is, on the terminal and in Prefect."""
        self.display.update(done, total, message)
        if self._prefect_progress is not None:
            with self._lock:
                self._prefect_progress.update(done, total)

    def event(self, name: str, message: str) -> None:
        """Record something that happened: a tag, a line of ``events.jsonl``, a line in the log."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._lock:
            self._events.append({"at": stamp, "name": name, "message": message})
        if not name.startswith("nonfinite."):
            self._tag_event(clean_name(name), message)
        run_logger(self.stage).info("%s: %s", name, message)
        self.display.note(message)
        if self._is_copy:
            self._write_events()

    def _tag_event(self, name: str, message: str) -> None:
        try:
            self.tracker.set_tags(self.run_id, {f"event.{name}": message})
        except ClusterError as error:
            # The message is not lost: it is in the log, and in events.jsonl when the run is closed.
            self._warn_once(error)

    def trial(self, name: str, params: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Record one finished attempt of a search as a run nested under this one."""
        self.tracker.log_trial(self.run_id, name, params, metrics)

    def file(self, path: Path, directory: str = "") -> None:
        """Attach a file (a plot, a table) to the run."""
        self.tracker.log_file(self.run_id, path, directory)

    def close(self) -> None:
        """Write everything that is left; the run itself stays open."""
        with self._lock:
            self.display.close()
            self.flush(is_last=True)
            if self._events:
                self._write_events()

    def _write_events(self) -> None:
        lines = "".join(json.dumps(event) + "\n" for event in self._events)
        name = f"events-{os.getpid()}.jsonl" if self._is_copy else "events.jsonl"
        self.tracker.log_text(self.run_id, lines, name)


class _PrefectProgress:
    """The progress artifact of the current Prefect run; it stops with a warning when that fails."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._artifact_id: UUID | None = None
        self._updated_at = 0.0
        self._is_off = False

    def update(self, done: float, total: float) -> None:
        now = time.monotonic()
        is_last = total > 0 and done >= total
        if self._is_off or (now - self._updated_at < _PREFECT_SECONDS and not is_last):
            return
        self._updated_at = now
        percent = 100.0 * min(1.0, max(0.0, done / total)) if total > 0 else 0.0
        try:
            self._write(percent)
        except Exception as error:
            # Training goes on without the bar in the UI; the log says why it stands still.
            self._is_off = True
            run_logger(self.stage).warning("The progress artifact stopped: %r", error)

    def _write(self, percent: float) -> None:
        if self._artifact_id is not None:
            update_progress_artifact(artifact_id=self._artifact_id, progress=percent)
            return
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            return
        created = create_progress_artifact(
            progress=percent,
            key=f"{self.stage.replace('_', '-')}-progress",
            description=f"Progress of {self.stage}",
        )
        assert isinstance(created, UUID)
        self._artifact_id = created


# Load, memory, disk and network of this machine, recorded beside a run's own metrics.

# MLflow shows names with this prefix on a page of their own.
PREFIX = "system/"


@contextmanager
def machine_watched(log: StageLog, interval_seconds: float | None) -> Iterator[None]:
    """Record the machine's metrics inside the block, the last time at its end; None is never."""
    if interval_seconds is None:
        yield
        return
    sampler = _Sampler(log, interval_seconds)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


class _Sampler:
    """Takes samples in a thread; they go through the run's own buffer, so a server that is away
    costs none of them."""

    def __init__(self, log: StageLog, interval_seconds: float) -> None:
        self.log = log
        self.interval_seconds = interval_seconds
        self._step = 0
        self._monitors = _monitors()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self.interval_seconds)
            try:
                self.log.metrics(self._sample(), self._step)
            except RlhfError as error:
                run_logger(self.log.stage).warning("System metrics stopped: %s", error)
                return
            self._step += 1

    def _sample(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= {f"{PREFIX}{k}": float(v) for k, v in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return values


def _monitors() -> list[BaseMetricsMonitor]:
    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    # There may be no GPU, or the extra `gpu` is not installed.
    with suppress(ImportError, RuntimeError):
        monitors.append(GPUMonitor())
    for monitor in monitors:
        # The first sample of a load is the load since the last one: this one starts the clock.
        monitor.collect_metrics()
        monitor.clear_metrics()
    return monitors
