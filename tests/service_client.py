"""Drives a workspace's services as a user does: the command line, Prefect's API, MLflow."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
RETRIES = 5  # as PREFECT_CLIENT_MAX_RETRIES
SERVICES = ("prefect", "mlflow", "worker")
CHAIN = "rlhf-pipeline/nightly"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Services:
    """One workspace with `rlhf up`.

    Args:
        home: the workspace.
        config: what is deployed.
        project: the checkout that runs.
    """

    def __init__(self, home: Path, config: Path, project: Path = ROOT) -> None:
        self.home = home
        self.config = config
        self.project = project
        self.prefect_port, self.mlflow_port = free_port(), free_port()
        self.api = f"http://127.0.0.1:{self.prefect_port}/api"
        self.mlflow = f"http://127.0.0.1:{self.mlflow_port}"

    def rlhf(self, *arguments: str, code: int | None = 0) -> str:
        """Run a command and return what it prints, errors included."""
        environment = {**os.environ, "RLHF_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(self.project), "COLUMNS": "200"}
        # What the tests' own server is configured with is not for these.
        for name in [name for name in environment if name.startswith("PREFECT_")]:
            del environment[name]
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *arguments],
            env=environment,
            cwd=self.project,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def up(self) -> str:
        """Start what is missing."""
        ports = ["--prefect-port", str(self.prefect_port), "--mlflow-port", str(self.mlflow_port)]
        return self.rlhf("up", str(self.config), *ports)

    @contextmanager
    def running(self) -> Iterator[Services]:
        """Have everything up for the block, without the schedules."""
        try:
            self.up()
            self.pause_schedules()
            yield self
        finally:
            self.rlhf("down", code=None)

    def wait_idle(self) -> None:
        """Wait until the worker runs no flow."""
        wait_for(lambda: not psutil.Process(self.pid("worker")).children(), 60)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask Prefect's API; where its database is locked, again, as Prefect's own client does."""
        for _ in range(RETRIES):
            answer = httpx.request(method, f"{self.api}/{path}", json=body, timeout=30)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1.0)
        if not answer.is_success:
            raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
        return answer.json() if answer.content else None

    def post(self, path: str, body: Any) -> Any:
        """Ask Prefect's API for a change, or for what a filter finds."""
        return self.ask("POST", path, body)

    def deployment(self, name: str) -> dict[str, Any]:
        """Return a deployment by flow/name."""
        found: dict[str, Any] = self.ask("GET", f"deployments/name/{name}")
        return found

    def pause_schedules(self) -> None:
        """Keep the nightly and weekly runs out of whatever is tested at that hour."""
        for deployment in self.post("deployments/filter", {}):
            for schedule in deployment["schedules"]:
                path = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
                self.ask("PATCH", path, {"active": False})

    def run(self, deployment: str, **parameters: Any) -> str:
        """Start a deployment with these parameters; return the id of its flow run."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        path = f"deployments/{self.deployment(deployment)['id']}/create_flow_run"
        run_id: str = self.post(path, body)["id"]
        return run_id

    def flow_run(self, run_id: str) -> dict[str, Any]:
        """Return a flow run."""
        found: dict[str, Any] = self.ask("GET", f"flow_runs/{run_id}")
        return found

    def set_state(self, run_id: str, kind: str, name: str | None = None) -> None:
        """Do what the UI's buttons do."""
        body = {"state": {"type": kind, "name": name}, "force": True}
        self.post(f"flow_runs/{run_id}/set_state", body)

    def retry(self, run_id: str) -> None:
        """Press Retry."""
        self.set_state(run_id, "SCHEDULED", "AwaitingRetry")

    def wait(self, run_id: str, timeout_seconds: float = 300) -> str:
        """Wait for the end of a flow run; return its state's type."""
        wait_for(
            lambda: self.flow_run(run_id)["state"]["type"] in FINAL,
            timeout_seconds,
            lambda: str(self.flow_run(run_id)["state"]),
        )
        kind: str = self.flow_run(run_id)["state"]["type"]
        return kind

    def completed(self, run_id: str, timeout_seconds: float = 300) -> None:
        """Wait for a flow run that has to complete."""
        assert self.wait(run_id, timeout_seconds) == "COMPLETED", self.flow_run(run_id)["state"]

    def log_lines(self, flow: str) -> list[str]:
        """Return the log lines of all runs of a flow."""
        runs = self.post("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})
        ids = {"flow_run_id": {"any_": [run["id"] for run in runs]}}
        return [line["message"] for line in self.post("logs/filter", {"logs": ids})]

    def mlflow_runs(self, filter_string: str) -> list[dict[str, Any]]:
        """Return MLflow runs with tags, params and last metrics as dictionaries, newest first."""
        body = {"experiment_ids": ["1"], "filter": filter_string, "max_results": 200}
        url = f"{self.mlflow}/api/2.0/mlflow/runs/search"
        answer = httpx.post(url, json=body, timeout=60).raise_for_status().json()
        return [
            {
                "id": run["info"]["run_id"],
                "status": run["info"]["status"],
                **{
                    part: {entry["key"]: entry["value"] for entry in run["data"].get(part, [])}
                    for part in ("tags", "params", "metrics")
                },
            }
            for run in answer.get("runs", [])
        ]

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of each point of a metric."""
        query = {"run_id": run_id, "metric_key": metric}
        url = f"{self.mlflow}/api/2.0/mlflow/metrics/get-history"
        points = httpx.get(url, params=query, timeout=60).raise_for_status().json()
        return [(int(p["step"]), p["value"]) for p in points.get("metrics", [])]

    def pid(self, service: str) -> int:
        """Return the number of a service's process."""
        from flows.services.records import read_record

        record = read_record(self.home / "services", service)
        assert record is not None
        return record.pid

    def processes(self, *parts: str) -> list[psutil.Process]:
        """Return the living processes of these services whose command line has all these parts."""
        from flows.services.records import family

        found = []
        for service in SERVICES:
            for process in family(self.home / "services", service):
                try:
                    line = " ".join(process.cmdline())
                except psutil.Error:
                    continue
                if all(part in line for part in parts):
                    found.append(process)
        return found

    def flow_process(self) -> psutil.Process:
        """Return the process of the flow that runs."""
        worker = psutil.Process(self.pid("worker"))
        (process,) = worker.children()
        return process

    def kill(self, process: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        handle = psutil.Process(process)
        os.kill(process, signal.SIGKILL)
        psutil.wait_procs([handle], timeout=20)


class DirectRun:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def text(self) -> str:
        """Return what it has printed, errors included."""
        return self.log.read_text()

    def wait(self, timeout_seconds: float = 900) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(timeout_seconds)


class DirectHome:
    """One workspace without services, in which `rlhf run` does everything.

    Args:
        root: the workspace.
        config: what is run.
    """

    def __init__(self, root: Path, config: Path) -> None:
        self.root = root
        self.config = config
        self._started: list[DirectRun] = []

    def __enter__(self) -> DirectHome:
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, as Control-C does."""
        for run in self._started:
            if run.is_running:
                run.process.send_signal(signal.SIGINT)
                run.wait(120)

    def start(
        self, *arguments: str, program: tuple[str, ...] = ("-m", "flows.cli.main")
    ) -> DirectRun:
        """Start `rlhf run` with these arguments.

        Args:
            program: the command line, where a fault is put into it first.
        """
        environment = {**os.environ, "RLHF_HOME": str(self.root), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "COLUMNS": "200"}
        for name in [name for name in environment if name.startswith("PREFECT_")]:
            del environment[name]
        log = self.config.parent / f"run-{len(self._started)}.log"
        command = [sys.executable, *program, "run", str(self.config), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
        run = DirectRun(process, log)
        self._started.append(run)
        return run

    def finished(self, *arguments: str) -> str:
        """Run to the end, which has to be a good one; return what was printed."""
        run = self.start(*arguments)
        assert run.wait() == 0, run.text()
        return run.text()


def fill(disk: Path) -> Path:
    """Leave no byte on a disk; return the file that holds them."""
    file = disk / "filler"
    with file.open("ab", buffering=0) as handle:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    handle.write(b"0" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return file


def wait_for(
    condition: Callable[[], bool], timeout_seconds: float, seen: Callable[[], str] = str
) -> None:
    """Wait until a condition holds; servers that are away meanwhile are asked again."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_seconds} s: {seen()}")
