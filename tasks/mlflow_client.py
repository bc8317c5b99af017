"""The MLflow client: its environment, its addresses, its errors in the project's words."""

from __future__ import annotations

import fcntl
import logging
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
# What a command prints is for people and for programs that read its JSON.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# The client's own defaults wait for minutes before they report a server that is gone.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.errors import ClusterError, ConfigError, WorkspaceError
from tasks.loopback import bypass_proxies

# Also where flows are not started by the command.
bypass_proxies()

_CONNECT_SECONDS = 5
# An alias that nobody set, and an id that cannot be one, are the second.
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")

T = TypeVar("T")


@cache
def client_of(uri: str) -> MlflowClient:
    """Return the client of an address, one per process."""
    return MlflowClient(tracking_uri=uri)


def quieten() -> None:
    """Silence what MLflow and its database migrations say at every start."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It prints the trace of an error that it raises, too; what is raised gets one message here.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="The specified dataset source can be interpreted")


def check_uri(uri: str) -> None:
    """Refuse an address that MLflow would misread.

    Raises:
        ConfigError: a file store, or a path relative to whatever directory a worker runs in.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme.startswith("file"):
        raise ConfigError(
            f"tracking.tracking_uri is {uri!r}",
            "http://host:port or sqlite:////absolute/path.db",
            "MLflow has no file store any more; leave it null for the workspace's database",
        )
    if scheme == "sqlite" and not rest.startswith("//"):
        raise ConfigError(
            f"tracking.tracking_uri {uri!r} is relative to whatever directory a worker runs in",
            "four slashes and an absolute path",
            "write sqlite:////absolute/path.db",
        )


def check_server(uri: str) -> None:
    """Ask a server whether it is well.

    Raises:
        ClusterError: no answer within 5 s.
    """
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_CONNECT_SECONDS):
            return
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ClusterError(
            f"No MLflow server answers at {uri}: {error}",
            "a running `mlflow server`",
            "start it, correct tracking.tracking_uri, or set it to null to need no server",
        ) from error


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn MLflow's errors into the project's.

    Raises:
        ClusterError: a server refused or did not answer.
        WorkspaceError: the embedded database cannot be used.
    """
    try:
        yield
    except MlflowException as error:
        reason = str(error).splitlines()[0][:300]
        if uri.startswith("http"):
            raise ClusterError(
                f"MLflow at {uri} refused: {reason}", "a working server", "look at the server's log"
            ) from error
        raise WorkspaceError(
            f"The MLflow database {uri} cannot be used: {reason}",
            "a readable and writable database of this MLflow version",
            "free space, correct its permissions, or choose another RLHF_HOME",
        ) from error


@contextmanager
def tables_locked(uri: str) -> Iterator[None]:
    """Let one program at a time open an embedded database: two that make its tables at once fail.

    Servers see to their databases themselves.
    """
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    if not os.access(database.parent, os.W_OK):
        # No tables are made here; MLflow says what is wrong with the place.
        yield
        return
    with database.with_name(f"{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def known_or_none(read: Callable[..., T], *names: str) -> T | None:
    """Return what MLflow has under a name; None when it says that there is nothing.

    Any other error of MLflow is raised: a server that cannot be asked does not say so.
    """
    try:
        return read(*names)
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return None
        raise


def quoted(value: str) -> str:
    """Return a value for MLflow's filter language."""
    return '"' + value.replace('"', "") + '"' if "'" in value else f"'{value}'"
