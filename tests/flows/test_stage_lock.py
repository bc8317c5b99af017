"""One run at a time of a stage, on this host and where several share a file system."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flows.stage_run import exclusive
from tasks.errors import WorkspaceError
from tasks.workspace import Workspace, process_name

PRINT = "0123456789abcdef" * 4
# 1764547200 is 2025-12-01 00:00 UTC.
ELSEWHERE = "host-elsewhere:4242:1764547200"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock of a stage that no run has had yet."""
    path = Workspace(tmp_path).cache_dir / "locks" / "sft-0123456789abcdef"
    path.parent.mkdir(parents=True)
    return path


def _mounted_with(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [SimpleNamespace(mountpoint=m, opts=o) for m, o in (("/", options), ("/proc", "rw"))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


def test_record_names_host_and_process_while_the_stage_runs(tmp_path: Path, lock: Path) -> None:
    with exclusive(Workspace(tmp_path), "sft", PRINT):
        assert lock.read_text() == f"{socket.gethostname()}:{process_name()}"
    with pytest.raises(ZeroDivisionError), exclusive(Workspace(tmp_path), "sft", PRINT):
        raise ZeroDivisionError
    assert lock.read_text() == ""


def test_run_of_another_host_is_met_where_its_lock_is_not_seen(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mounted_with("rw,vers=3,nolock,addr=h", monkeypatch)
    lock.write_text(ELSEWHERE)
    with (
        pytest.raises(WorkspaceError) as caught,
        exclusive(Workspace(tmp_path), "sft", PRINT),
    ):
        pass
    assert "process 4242 on host host-elsewhere, started 2025-12-01 00:00 UTC" in str(caught.value)
    assert f"if it no longer runs on host-elsewhere, remove {lock}" in str(caught.value)
    assert lock.read_text() == ELSEWHERE
    lock.unlink()
    with exclusive(Workspace(tmp_path), "sft", PRINT):
        pass


@pytest.mark.parametrize(
    ("options", "record"),
    [
        # The kernel knows: that host, a container for instance, is gone, on its own disk or on one
        # that hosts share with their locks.
        ("rw,vers=4.2,local_lock=none", ELSEWHERE),
        ("rw,nolock", f"{socket.gethostname()}:4242:1"),
        # An earlier version named no host; its lock is free.
        ("rw,nolock", "4242"),
        ("rw,nolock", "\ufffd"),
        ("rw", "host-elsewhere:1:99999999999999999999"),
    ],
)
def test_killed_run_does_not_block_the_next_one(
    options: str, record: str, tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mounted_with(options, monkeypatch)
    lock.write_text(record)
    with exclusive(Workspace(tmp_path), "sft", PRINT):
        assert lock.read_text().startswith(f"{socket.gethostname()}:{os.getpid()}:")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (ELSEWHERE, "process 4242 on host host-elsewhere"),
        ("h:1:99999999999999999999", "process 1 on host h ("),
        ("4242", "process 4242 ("),
        ("", "another process ("),
    ],
)
def test_lock_that_is_held_names_its_holder(
    record: str, named: str, tmp_path: Path, lock: Path
) -> None:
    lock.write_text(record)
    with lock.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with (
            pytest.raises(WorkspaceError) as caught,
            exclusive(Workspace(tmp_path), "sft", PRINT),
        ):
            pass
    assert f"Stage sft with this config is running in {named}" in str(caught.value)
    # The kernel says that it is held, so the file is no leftover.
    assert "remove" not in str(caught.value)


def test_file_system_without_locks_is_named(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(WorkspaceError, match="cannot be locked: No locks available") as caught,
        exclusive(Workspace(tmp_path), "sft", PRINT),
    ):
        pass
    assert "running" not in str(caught.value)


def test_record_that_cannot_be_written_is_not_left(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"), exclusive(Workspace(tmp_path), "sft", PRINT):
        pass
    assert lock.read_text() == ""
