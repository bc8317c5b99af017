"""The surroundings of one command: settings that Prefect reads at import, and a Prefect server."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flows.temporary_server import TemporaryServer, is_healthy
from tasks.errors import ClusterError
from tasks.workspace import Workspace

API_URL = "PREFECT_API_URL"
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
    """Point Prefect at the user's server, or at a temporary one that starts in the background.

    Returns:
        The temporary server, which is not ready yet; None when the user has one.

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
    server = TemporaryServer(workspace.prefect_home / "temporary-server.log")
    server.start()
    os.environ[API_URL] = server.api_url
    return server


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
