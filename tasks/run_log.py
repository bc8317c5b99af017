"""Where a stage reports while it works: MLflow metrics, progress, events, files."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from tasks.errors import ClusterError
from tasks.progress import ProgressDisplay
from tasks.tracking import MetricPoint, Tracker
from tasks.tracking_values import clean_name

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


def run_logger(stage: str) -> logging.Logger | logging.LoggerAdapter[Any]:
    """Return Prefect's logger of the current run, or a plain one outside of runs."""
    try:
        logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
    except MissingContextError:
        logger = logging.getLogger(f"rlhf.{stage}")
    return logger


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
