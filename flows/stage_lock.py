"""One run at a time of a stage with one fingerprint: two would share a checkpoint directory.

The kernel frees the lock with the process, so a killed run does not block the next one. Some file
systems that hosts share keep such locks to one host: there the record in the file counts too.
"""

from __future__ import annotations

import fcntl
import os
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

# No other host sees their files, whatever name this one had when it wrote them.
_LOCAL_TYPES: Final = frozenset(
    ("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
)


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
        return cls("".join(host), pid, float(created) if created.isdigit() else None)

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
        WorkspaceError: another process has it, or had it on another host and did not end well.
    """
    directory = workspace.cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{stage}-{fingerprint[:16]}"
    with file.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _held(stage, Holder.read(handle), file) from error
        holder = Holder.read(handle)
        if holder is not None and holder.is_elsewhere and not _is_local(file):
            raise _held(stage, holder, file)
        handle.truncate(0)
        handle.write(f"{socket.gethostname()}:{process_name()}")
        handle.flush()
        # Other hosts are to see it now.
        os.fsync(handle.fileno())
        try:
            yield
        finally:
            handle.truncate(0)


def _held(stage: Stage, holder: Holder | None, file: Path) -> WorkspaceError:
    fix = (
        "wait until it is done and start this run again, which reuses its result;"
        " or end that process"
    )
    if holder is not None and holder.is_elsewhere:
        fix += f"; if it no longer runs on {holder.host}, remove {file}"
    return WorkspaceError(
        f"Stage {stage} with this config is running in {holder or 'another process'} ({file})",
        "one run at a time",
        fix,
    )


def _is_local(file: Path) -> bool:
    """Tell whether a file lies where no other host can see it."""
    path = file.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    # Of two at the same place the later one counts.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return bool(mounts) and mounts[-1].fstype in _LOCAL_TYPES
