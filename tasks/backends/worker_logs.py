"""What Ray workers print, in the log of the run that uses them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Logger = logging.Logger | logging.LoggerAdapter[Any]

_RAYS_HANDLER = "ray_print_logs"
_HANDLER = "rlhf_run_log"
_WINDOW_SECONDS = 60.0
_LINES_PER_WINDOW = 500
_BAR = re.compile(r"\d%\|.*\[.*\]$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LineForwarder:
    """Hands lines of workers to a logger, progress bars left out. Safe to call from any thread.

    A worker that prints without end would fill the server's database, so that of each minute only
    the first 500 lines are kept, and the others counted.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.logger: Logger | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._window_start = clock()
        self._n_lines = 0

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """Take a batch as Ray hands it out: ``lines`` of one process, ``pid``, ``ip``."""
        # Ray's own processes, such as the autoscaler, have a name where workers have a number.
        if self.logger is None or not str(batch["pid"]).isdigit():
            return
        where = f"worker {batch['pid']}"
        if not batch.get("localhost", True):
            where += f" on {batch['ip']}"
        with self._lock:
            for line in batch["lines"]:
                if not _BAR.search(str(line)):
                    self._forward(self.logger, where, _COLOUR.sub("", str(line)).rstrip())

    def _forward(self, logger: Logger, where: str, line: str) -> None:
        now = self._clock()
        if now - self._window_start >= _WINDOW_SECONDS:
            left_out = self._n_lines - _LINES_PER_WINDOW
            if left_out > 0:
                logger.warning("%d lines of workers were left out", left_out)
            self._window_start, self._n_lines = now, 0
        self._n_lines += 1
        if line and self._n_lines <= _LINES_PER_WINDOW:
            logger.info("%s: %s", where, line)


_FORWARDER = LineForwarder()


def forward_to(logger: Logger) -> None:
    """Send what workers print from now on to this logger."""
    _FORWARDER.logger = logger


def listen() -> None:
    """Take over from Ray, which would print the lines on the terminal; call after ``ray.init``."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    for name in (_RAYS_HANDLER, _HANDLER):
        dispatcher.remove_handler(name)
    dispatcher.add_handler(_HANDLER, _FORWARDER)
