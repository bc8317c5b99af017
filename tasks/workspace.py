"""The workspace: the one directory that everything is written under."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

from tasks.errors import ClusterError, DiskFullError, RlhfError, WorkspaceError

HOME_VARIABLE = "RLHF_HOME"
TRACKING_VARIABLE = "RLHF_TRACKING_URI"
DEFAULT_HOME = "var"
MIN_FREE_BYTES = 512 * 2**20
FULL_BYTES = 2**20
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Libraries, databases and other processes keep the text of the system's error, not its number.
_FULL_TEXTS = ("no space left on device", "disk is full", "os error 28", "disk quota exceeded")


@dataclass(frozen=True)
class Workspace:
    """Paths under one root directory.

    Args:
        root: absolute path, ``$RLHF_HOME`` or ``./var``.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> Workspace:
        """Return the workspace named by ``RLHF_HOME``, else ``./var``."""
        return cls(Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).expanduser().resolve())

    def artifacts_dir(self, stage: str) -> Path:
        """Return the directory of a stage's finished artefacts."""
        return self.root / ("data" if stage == "ingest" else "models") / stage

    def checkpoint_dir(self, stage: str, fingerprint: str) -> Path:
        """Return where unfinished training of exactly this stage and config keeps its state."""
        return self.root / "checkpoints" / stage / fingerprint[:16]

    @property
    def cache_dir(self) -> Path:
        """Directory of things that can be made again: downloads, generated demo files."""
        return self.root / "cache"

    @property
    def summary_path(self) -> Path:
        """The summary of the latest chain run."""
        return self.root / "summary.json"

    @property
    def database_uri(self) -> str:
        """Absolute address of the embedded MLflow database."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def tracking_uri(self) -> str:
        """MLflow address of runs that name none: ``$RLHF_TRACKING_URI``, else the database."""
        return os.environ.get(TRACKING_VARIABLE) or self.database_uri

    @property
    def mlflow_artifacts_dir(self) -> Path:
        """Directory of the embedded MLflow artifact store."""
        return self.root / "mlartifacts"

    @property
    def prefect_home(self) -> Path:
        """Directory of the temporary Prefect server's state."""
        return self.root / "prefect"

    @property
    def is_full(self) -> bool:
        """Whether the disk under the root has less than `FULL_BYTES` left."""
        return self.root.exists() and shutil.disk_usage(self.root).free < FULL_BYTES

    @contextmanager
    def space_watched(self) -> Iterator[None]:
        """Tell what fails in the block for want of space as one error with a way out.

        Raises:
            DiskFullError: instead of whatever it was, here or in a worker.
        """
        try:
            yield
        except DiskFullError:
            raise
        except Exception as error:
            reason = next(filter(None, map(_lack_of_space, _chain(error))), None)
            free = shutil.disk_usage(self.root).free
            # A server that says so may have another disk.
            is_elsewhere = isinstance(error, ClusterError) and free >= MIN_FREE_BYTES
            is_explained = isinstance(error, RlhfError) or free >= FULL_BYTES
            if is_elsewhere or (reason is None and is_explained):
                raise
            raise self._full(str(reason or error), free) from error

    def _full(self, reason: str, free: int) -> DiskFullError:
        left = f"{free / 2**20:.0f} MiB free"
        again = "start the same run again, which continues where this one stopped"
        if free >= MIN_FREE_BYTES:
            return DiskFullError(
                f"No space is left for what the run wrote, and the disk under workspace "
                f"{self.root} has {left}: {reason}",
                "room on every disk that the run writes to",
                f"free the one that the reason names (/dev/shm and /tmp/ray are Ray's, TMPDIR may "
                f"be another), or raise its limit or your quota, and {again}",
            )
        return DiskFullError(
            f"The disk under workspace {self.root} is full ({left}): {reason}",
            f"{MIN_FREE_BYTES / 2**20:.0f} MiB free to start, and room for what is made",
            f"free space and {again}; or choose another {HOME_VARIABLE}",
        )

    def prepare(self) -> None:
        """Create the root and prove that it can be written.

        Raises:
            WorkspaceError: the root is read-only, not a directory, or the disk is almost full.
        """
        fix = f"choose another directory with {HOME_VARIABLE}=/path/to/workspace, or free this one"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as probe:
                probe.write(b"0" * 4096)
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise WorkspaceError(
                f"Workspace {self.root} cannot be written: {error.strerror or error}",
                "a writable directory",
                fix,
            ) from error
        free = shutil.disk_usage(self.root).free
        if free < MIN_FREE_BYTES:
            raise WorkspaceError(
                f"Workspace {self.root} has {free / 2**20:.0f} MiB left",
                f"{MIN_FREE_BYTES / 2**20:.0f} MiB free",
                fix,
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _lack_of_space(error: BaseException) -> str | None:
    """Return what an error says of a full disk; None when it is about something else."""
    if isinstance(error, RlhfError):
        lines = [error.found]
    else:
        lines = str(error).splitlines() or [repr(error)]
    said = [line.strip() for line in lines if any(text in line.lower() for text in _FULL_TEXTS)]
    if said:
        return said[-1]
    return lines[0] if isinstance(error, OSError) and error.errno in _FULL_ERRORS else None


# This machine's own servers, where a proxy is set: none of the proxies leads here.

HOSTS: Final = ("127.0.0.1", "localhost", "::1")
# Some clients read one of the two only, and most prefer the first.
_NAMES: Final = ("no_proxy", "NO_PROXY")


def bypass_proxies() -> None:
    """Have this machine reached without a proxy, by this process and all that it starts.

    Prefect's and MLflow's clients go by these variables. Without a proxy in the environment they
    stay as they are: their presence would hide the proxies that macOS keeps elsewhere.
    """
    if not urllib.request.getproxies_environment():
        return
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    for name in _NAMES:
        value = given.get(name, next(iter(given.values()), ""))
        hosts = [host.strip() for host in value.split(",") if host.strip()]
        # Alone it means all; in a list most clients take no notice of it.
        if hosts != ["*"]:
            os.environ[name] = ",".join([*hosts, *(host for host in HOSTS if host not in hosts)])


# Where a result comes from: code version, package versions, machine.

DISTRIBUTION = "rlhf-flows"
_RECORDED = (
    DISTRIBUTION,
    "verl",
    "ray",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "pyarrow",
    "prefect",
    "mlflow",
)
_ROOT = Path(__file__).resolve().parent.parent
_COMMAND_SECONDS = 10
_CREATE_TIME_ERROR_SECONDS = 2.0


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a result; no package is imported."""
    versions: dict[str, str] = {}
    for name in _RECORDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@cache
def git_commit() -> str | None:
    """Return the commit of this source tree, ``-dirty`` when files differ; None without git."""
    lines = (_git("rev-parse", "--show-toplevel", "HEAD") or "").splitlines()
    # An installed copy inside somebody else's repository must not borrow that repository's commit.
    if len(lines) != 2 or Path(lines[0]).resolve() != _ROOT:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return lines[1] + ("-dirty" if changed else "")


def _git(*arguments: str) -> str | None:
    return _output(["git", "-C", str(_ROOT), *arguments])


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None when it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def machine() -> dict[str, str]:
    """Return what of this machine may change the bits of a result."""
    return {
        "machine.cpu": f"{_processor()}, {os.cpu_count()} cores",
        "machine.accelerators": _accelerators(),
        "machine.platform": f"{platform.platform()}, Python {platform.python_version()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerators() -> str:
    """Return the names of the GPUs and their driver; no package is imported."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = (_output(query) or "").splitlines()
    return "; ".join(line.strip() for line in lines) or "none"


def workspace_name(root: Path) -> str:
    """Return what tells this workspace from all others that report to the same MLflow server."""
    return f"{socket.gethostname()}:{root}"


def is_elsewhere(name: str) -> bool:
    """Tell whether the workspace that `workspace_name` named is on another machine."""
    host = name.partition(":")[0]
    return bool(host) and host != socket.gethostname()


def process_name() -> str:
    """Return what tells this process from all others of this machine, earlier ones included."""
    return f"{os.getpid()}:{psutil.Process().create_time():.0f}"


def is_process_alive(name: str) -> bool:
    """Tell whether the process that `process_name` named still runs on this machine."""
    pid, _, created = name.partition(":")
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(created)) <= _CREATE_TIME_ERROR_SECONDS
    except (psutil.Error, ValueError):
        return False
