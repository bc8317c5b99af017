"""Where a result comes from: code version, package versions, machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

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
