"""The surroundings of one command: settings that Prefect reads at import, and a Prefect server."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flows.services.records import (
    HEARTBEAT_SECONDS,
    HOST,
    NO_TELEMETRY,
    answers,
    running_addresses,
)
from tasks.errors import ClusterError
from tasks.workspace import TRACKING_VARIABLE, Workspace

#
# A Prefect server for the length of one command, which cannot outlive it.
#
# Prefect starts such a server by itself, but it stays behind when the command is killed, and the
# command first has to import the server's code. This one starts while other things are checked,
# keeps its history in the workspace, and ends when its parent does.

_START_SECONDS = 120
_STOP_SECONDS = 5
_POLL_SECONDS = 0.1
_PARENT_POLL_SECONDS = 1.0


class TemporaryServer:
    """A server in a process of its own.

    Args:
        log_path: where its output goes.
    """

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def api_url(self) -> str:
        """Value for ``PREFECT_API_URL``."""
        return f"http://{HOST}:{self.port}/api"

    def start(self) -> None:
        """Start the server; it stops with this process, after Prefect has sent its last logs."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "flows.services.prefect_server",
                    str(self.port),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"},
                # Control-C is for the command; the server ends after it has heard of the run's end.
                start_new_session=True,
            )
        # Prefect registers its own exit functions later, so they run before this one.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the server and wait for its end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def wait_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            ClusterError: it ended, or did not answer within 120 s.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if is_healthy(self.api_url, _POLL_SECONDS * 20):
                return
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        tail = self.log_path.read_text(errors="replace").strip().splitlines()[-3:]
        raise ClusterError(
            f"The temporary Prefect server did not start: {' | '.join(tail) or 'it said nothing'}",
            f"an answer at {self.api_url} within {_START_SECONDS} s",
            f"look at {self.log_path}, or start `prefect server start` and set PREFECT_API_URL",
        )


def is_healthy(api_url: str, timeout_seconds: float) -> bool:
    """Tell whether a Prefect server answers at ``api_url``."""
    return answers(f"{api_url.rstrip('/')}/health", timeout_seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(port: int, parent_pid: int) -> None:
    """Run the server until it is told to end or the parent is gone."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_HOME

    class OneStartAtATime(uvicorn.Server):
        """Two servers that make the tables of one database at the same time fail."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            PREFECT_HOME.value().mkdir(parents=True, exist_ok=True)
            with (PREFECT_HOME.value() / "start.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                await super().startup(sockets)

    threading.Thread(target=_follow_parent, args=(parent_pid,), daemon=True).start()
    # Prefect would also watch schedules and automations; one command has neither.
    app = create_app(ephemeral=True, final=True)
    config = uvicorn.Config(app, host=HOST, port=port, log_level="error", lifespan="on")
    OneStartAtATime(config).run()


def _follow_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))


API_URL = "PREFECT_API_URL"
_TEMPORARY = "RLHF_TEMPORARY_PREFECT_API"
_HEALTH_SECONDS = 5
_CHATTY_LOGGERS = ("torch.fx._symbolic_trace", "peft", "verl")


def prepare_environment(workspace: Workspace, *, is_debug: bool) -> None:
    """Set what Prefect, MLflow and Ray read from the environment; values of the user stay."""
    defaults = {
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_LOGGING_LEVEL": "DEBUG" if is_debug else "INFO",
        # The log goes to the Prefect run; the terminal gets progress and one message on failure.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "DEBUG" if is_debug else "CRITICAL",
        **NO_TELEMETRY,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        # The automation that notices dead runs waits for three of them.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not is_debug:
        # Bars of single files and remarks of libraries would drown the stages' own progress.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        warnings.simplefilter("ignore")
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def start_prefect_api(workspace: Workspace) -> TemporaryServer | None:
    """Point Prefect at the user's server, at that of `rlhf up`, or at a temporary one that starts
    in the background.

    Returns:
        The temporary server, which is not ready yet; None when another one is used.

    Raises:
        ClusterError: ``PREFECT_API_URL`` is set and nothing answers there.
    """
    url = os.environ.get(API_URL)
    if url:
        if not is_healthy(url, _HEALTH_SECONDS):
            raise ClusterError(
                f"No Prefect server answers at {API_URL}={url}",
                "a running `prefect server start`",
                f"start it, correct {API_URL}, or unset it to use a temporary server",
            )
        return None
    running = running_addresses(workspace)
    if running is not None:
        os.environ[API_URL], mlflow_url = running
        if mlflow_url is not None:
            os.environ.setdefault(TRACKING_VARIABLE, mlflow_url)
        return None
    server = TemporaryServer(workspace.prefect_home / "temporary-server.log")
    server.start()
    os.environ[API_URL] = server.api_url
    os.environ[_TEMPORARY] = server.api_url
    return server


def is_temporary() -> bool:
    """Tell whether the Prefect server ends with this command."""
    return os.environ.get(_TEMPORARY) is not None


def required_api_url(workspace: Workspace) -> str:
    """Return the address of the user's Prefect server, or of the one that `rlhf up` started.

    Raises:
        ClusterError: there is none.
    """
    url = os.environ.get(API_URL)
    running = None if url else running_addresses(workspace)
    if url and is_healthy(url, _HEALTH_SECONDS):
        return url.rstrip("/")
    if running is not None:
        return running[0]
    raise ClusterError(
        f"No Prefect server answers at {API_URL}={url}" if url else "No Prefect server runs here",
        "one to deploy to",
        f"run `rlhf up`, or start one and set {API_URL}",
    )


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Control-C inside the block, so that runs are ended and workers stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
