"""Load, memory, disk and network of this machine, recorded beside a run's own metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import tasks.mlflow_client  # noqa: F401 - it sets what MLflow reads when it is imported

# isort: split
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from tasks.errors import RlhfError
from tasks.run_log import StageLog, run_logger

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
