"""A disk that fills: a file system of a few hundred MiB, filled in the middle of a stage."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL_CHAIN
from service_client import DirectHome, DirectRun, fill, wait_for

from tasks.config.shared import STAGES, TrackingConfig
from tasks.context import StageContext
from tasks.errors import ClusterError, DataError, DiskFullError, WorkspaceError
from tasks.tracking.mlflow import connect
from tasks.tracking.registry import CHAMPION, Registry
from tasks.workspace import Workspace

Run = Callable[..., str]
NO_SPACE = "No space left on device"
BAD_INPUT = 2
# Long enough to be met in the middle of sft.
CONFIG = """\
extends: {small_chain}
sft:
  max_steps: 300
  checkpoint: {{save_every_steps: 20}}
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 768 MiB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no program `mount` on the path: a small file system is made with it")
    command = ["mount", "-t", "tmpfs", "-o", "size=768m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.partition("\n")[0]
        pytest.skip(
            f"user {os.geteuid()} may not mount a file system here, which takes root and, in a "
            f"container, the capability SYS_ADMIN: {why}"
        )
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _counts(workspace: Workspace) -> dict[str, int]:
    """Return how many artefacts each stage has, half-written ones included."""
    return {stage: len(list(workspace.artifacts_dir(stage).iterdir())) for stage in STAGES}


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, NO_SPACE, "/a/b"), NO_SPACE),
        (OSError(errno.EDQUOT, "over quota", "/a/b"), "over quota"),
        # What comes back from a worker has the lines of its traceback in it.
        (RuntimeError(f"ray::train()\n  File x\nOSError: [Errno 28] {NO_SPACE}\n"), NO_SPACE),
        (_caused(DataError("x"), OSError(errno.ENOSPC, NO_SPACE)), NO_SPACE),
        (WorkspaceError("The database: database or disk is full"), "database or disk is full"),
    ],
)
def test_lack_of_space_is_one_error_with_a_way_out(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    with pytest.raises(DiskFullError) as caught, workspace.space_watched():
        raise error
    # There is room under the workspace: it was another disk, or a quota.
    for part in (f"workspace {tmp_path} has", reason, "/dev/shm", "quota", "start the same run"):
        assert part in str(caught.value)
    assert "is full" not in str(caught.value) or "is full" in reason
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(DiskFullError) as caught, workspace.space_watched():
        raise error
    for part in (f"workspace {tmp_path} is full", reason, "512 MiB", "free space", "RLHF_HOME"):
        assert part in str(caught.value)
    with pytest.raises(DiskFullError) as again, workspace.space_watched():
        raise caught.value
    assert again.value is caught.value


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        OSError(errno.EACCES, "Permission denied"),
        # This disk has space: it is the server's that has none.
        ClusterError("MLflow at http://a refused: database or disk is full"),
    ],
)
def test_other_failures_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, Workspace(tmp_path).space_watched():
        raise error
    assert caught.value is error


@pytest.fixture
def small_home(
    run_chain: Run, small_disk: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow_db: Path
) -> Workspace:
    """A workspace on the small disk, in which `run_chain` works."""
    monkeypatch.setenv("RLHF_HOME", str(small_disk / "home"))
    workspace = Workspace.from_environment()
    workspace.prepare()
    shutil.copy(empty_mlflow_db, workspace.root / "mlflow.db")
    return workspace


@pytest.mark.slow
def test_disk_that_fills_within_a_stage(
    small_home: Workspace, small_disk: Path, run_chain: Run, before_publishing: Any
) -> None:
    run_chain()
    registry = Registry(connect(TrackingConfig(), small_home))
    registry.point(CHAMPION, 1)
    fillers: list[Path] = []

    def fill_once(ctx: StageContext) -> None:
        if not fillers:
            fillers.append(fill(small_disk))

    before_publishing("offline_ppo", fill_once)
    with pytest.raises(DiskFullError, match=f"workspace {small_home.root} is full"):
        run_chain("offline_ppo")
    assert _counts(small_home) == dict.fromkeys(STAGES, 1)
    assert registry.aliased(CHAMPION).version == 1

    fillers[0].unlink()
    run_chain("offline_ppo")
    again = ("offline_ppo", "distill", "evaluate")
    assert _counts(small_home) == {stage: 2 if stage in again else 1 for stage in STAGES}
    assert registry.aliased(CHAMPION).version == 1


# The command, with a disk that fills when the stage has begun to write its result.
FILLS = """
from contextlib import contextmanager
from pathlib import Path
import tasks.artifacts
from flows.cli.main import main
from service_client import fill
build = tasks.artifacts.build_artifact
@contextmanager
def build_and_fill(parent, draft):
    try:
        with build(parent, draft) as directory:
            yield directory
            (directory / "half").write_bytes(b"x" * 2**20)
            fill(Path({disk!r}))
            (directory / "more").write_bytes(b"x" * 2**20)
    finally:
        fill(Path({disk!r}))  # what was half-written has left room
tasks.artifacts.build_artifact = build_and_fill
main()
"""


@pytest.fixture
def direct(small_disk: Path, tmp_path: Path) -> Iterator[DirectHome]:
    """A workspace on the small disk, for commands: MLflow's and Prefect's databases are in it."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(small_chain=SMALL_CHAIN))
    with DirectHome(small_disk / "home", config) as home:
        yield home


def _check_refusal(home: DirectHome, run: DirectRun, stage: str) -> None:
    """Check that a command ended with one message, and with nothing half-written."""
    assert run.wait() == BAD_INPUT, run.text()
    text = run.text()
    assert f"The disk under workspace {home.root} is full" in text
    assert "Traceback" not in text and "start the same run again" in text
    directory = Workspace(home.root).artifacts_dir(stage)
    assert not directory.exists() or list(directory.iterdir()) == []


@pytest.mark.endurance
def test_command_whose_databases_are_on_the_full_disk(direct: DirectHome, small_disk: Path) -> None:
    faulty = ("-c", FILLS.format(disk=str(small_disk)))
    _check_refusal(direct, direct.start("--only", "ingest", program=faulty), "ingest")
    (small_disk / "filler").unlink()
    direct.finished("--only", "ingest")
    _check_runs(direct, "ingest")


def _check_runs(home: DirectHome, stage: str) -> None:
    """Check that the run on the full disk was ended, if only by the one after it."""
    found = connect(TrackingConfig(), Workspace(home.root)).find_runs({"stage": stage})
    second, first = found
    assert first.status in ("FAILED", "KILLED") and first.tags["failure"]
    assert second.status == "FINISHED"


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_training_goes_on_when_space_is_freed(direct: DirectHome, small_disk: Path) -> None:
    direct.finished("--only", "ingest")
    run = direct.start("--only", "sft")
    checkpoints = direct.root / "checkpoints" / "sft"
    wait_for(lambda: any(checkpoints.glob("*/step-*")) or not run.is_running, 600, run.text)
    assert run.is_running, run.text()
    filler = fill(small_disk)
    _check_refusal(direct, run, "sft")
    filler.unlink()
    direct.finished("--only", "sft")
    _check_runs(direct, "sft")
