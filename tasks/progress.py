"""Progress on a terminal: a bar where there is one, a line now and then where there is not."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

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
