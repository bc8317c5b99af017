"""A Prefect server for the length of one command, which cannot outlive it.

Prefect starts such a server by itself, but it stays behind when the command is killed, and the
command first has to import the server's code. This one starts while other things are checked,
keeps its history in the workspace, and ends when its parent does.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tasks.errors import ClusterError

HOST = "127.0.0.1"
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
                [sys.executable, "-m", "flows.temporary_server", str(self.port), str(os.getpid())],
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
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=timeout_seconds):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


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
