"""The surroundings of one command: settings that Prefect reads at import, and a Prefect server."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flows.services import HEARTBEAT_SECONDS, running_addresses
from flows.temporary_server import TemporaryServer, is_healthy
from tasks.errors import ClusterError
from tasks.workspace import TRACKING_VARIABLE, Workspace

API_URL = "PREFECT_API_URL"
_TEMPORARY = "RLHF_TEMPORARY_PREFECT_API"
_HEALTH_SECONDS = 5
_CHATTY_LOGGERS = ("torch.fx._symbolic_trace", "peft", "verl")


def prepare_environment(workspace: Workspace, *, is_debug: bool) -> None:
    """Set what Prefect, MLflow and Ray read from the environment; values of the user stay."""
    defaults = {
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "DEBUG" if is_debug else "INFO",
        # The log goes to the Prefect run; the terminal gets progress and one message on failure.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "DEBUG" if is_debug else "CRITICAL",
        "DO_NOT_TRACK": "1",
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
