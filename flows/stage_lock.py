"""One run at a time of a stage with one fingerprint: two would share a checkpoint directory.

The kernel frees the lock with the process, on a shared file system too, so a killed run does not
block the next one. Where such locks are kept to one host the record in the file counts, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

import psutil

from tasks.config import Stage
from tasks.errors import WorkspaceError
from tasks.provenance import process_name
from tasks.workspace import Workspace

# Mount options, of NFS and Lustre, by which a host keeps flock to itself.
_LOCKS_OF_ONE_HOST: Final = frozenset(
    ("nolock", "local_lock=flock", "local_lock=all", "localflock")
)


# Of seconds since 1970; anything longer is no time.
_SECONDS: Final = re.compile(r"[0-9]{1,11}")


@dataclass(frozen=True)
class Holder:
    """The process that a lock's record names.

    Args:
        host: empty in a record of earlier versions, which has the process id only.
        started_at: in seconds since 1970; None in such a record.
    """

    host: str
    pid: str
    started_at: float | None

    @classmethod
    def read(cls, handle: TextIO) -> Holder | None:
        """Return what the record says; None when it is empty."""
        handle.seek(0)
        *host, pid = handle.read().split(":", 1)
        pid, _, created = pid.partition(":")
        if not pid:
            return None
        return cls("".join(host), pid, float(created) if _SECONDS.fullmatch(created) else None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is known to be on another host."""
        return self.host not in ("", socket.gethostname())

    def __str__(self) -> str:
        """Return its name for a message."""
        since = ""
        if self.started_at is not None:
            since = f", started {datetime.fromtimestamp(self.started_at, UTC):%Y-%m-%d %H:%M} UTC"
        return f"process {self.pid}" + (f" on host {self.host}{since}" if self.is_elsewhere else "")


@contextmanager
def exclusive(workspace: Workspace, stage: Stage, fingerprint: str) -> Iterator[None]:
    """Hold a stage's lock for the block.

    Raises:
        WorkspaceError: another process has it, or had it on another host and did not end well; or
            the file system keeps no locks.
    """
    directory = workspace.cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{stage}-{fingerprint[:16]}"
    with file.open("a+", encoding="utf-8", errors="replace") as handle:
        _lock(stage, handle, file)
        holder = Holder.read(handle)
        if holder is not None and holder.is_elsewhere and _is_kept_to_one_host(file):
            fix = f"; if it no longer runs on {holder.host}, remove {file}"
            raise _held(stage, holder, file, fix)
        try:
            handle.truncate(0)
            handle.write(f"{socket.gethostname()}:{process_name()}")
            handle.flush()
            # Other hosts are to see it now.
            os.fsync(handle.fileno())
            yield
        finally:
            handle.truncate(0)


def _lock(stage: Stage, handle: TextIO, file: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(stage, Holder.read(handle), file) from error
    except OSError as error:
        raise WorkspaceError(
            f"{file} cannot be locked: {error.strerror or error}",
            "a file system that keeps locks",
            "mount it with locks, or choose another RLHF_HOME",
        ) from error


def _held(stage: Stage, holder: Holder | None, file: Path, fix: str = "") -> WorkspaceError:
    return WorkspaceError(
        f"Stage {stage} with this config is running in {holder or 'another process'} ({file})",
        "one run at a time",
        "wait until it is done and start this run again, which reuses its result;"
        " or end that process" + fix,
    )


def _is_kept_to_one_host(file: Path) -> bool:
    """Tell whether a lock on this file says nothing about other hosts that see it."""
    path = file.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    # Of two at the same place the later one counts.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return bool(mounts) and not _LOCKS_OF_ONE_HOST.isdisjoint(mounts[-1].opts.split(","))
