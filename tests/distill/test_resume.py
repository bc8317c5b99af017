"""Stage distill, killed among the teacher's labels and in training, ends with the same adapter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_runs import newest_step

from flows.distill import distill
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.config.loading import load_config
from tasks.config.shared import TrackingConfig
from tasks.data import teacher_labels
from tasks.tracking.mlflow import connect
from tasks.workspace import Workspace

pytestmark = pytest.mark.endurance

CONFIG = Path(__file__).parents[1] / "small_chain.yaml"
CHAIN = load_config(CONFIG)
REUSE = RunOptions(reuse=True)
# So few that there is time to kill the run between the first file of labels and the last.
ROWS_PER_PART = 4
STEPS = 60  # of the 72 that five passes over 230 responses take, 16 at a time
OVERRIDES = [
    "distill.epochs=5",
    f"distill.max_steps={STEPS}",
    "distill.data=all",
    "distill.report.prompts=0",
    "distill.checkpoint.save_every_steps=4",
]
LONG_CHAIN = load_config(CONFIG, OVERRIDES)

PROGRAM = """
import sys
from pathlib import Path

from flows.distill import distill
from flows.stages import RunOptions
from tasks.runtime.session import cluster_session
from tasks.data import teacher_labels
from tasks.config.loading import load_config

config, rows_per_part, preferences, base, reward_model, *overrides = sys.argv[1:]
teacher_labels.ROWS_PER_PART = int(rows_per_part)
cfg = load_config(Path(config), overrides).distill
with cluster_session():
    distill(cfg, preferences, base, base, reward_model, RunOptions(reuse=True))
"""


@pytest.fixture(scope="module")
def upstream(home: Path, preferences: str, base: str) -> list[str]:
    """Dataset, base model, which is the teacher too, and reward model."""
    return [preferences, base, train_reward_model(CHAIN.reward_model, preferences, base, REUSE)]


def _workspace(root: Path, database: Path) -> Path:
    root.mkdir()
    shutil.copy(database, root / "mlflow.db")
    return root


def _run_here(home: Path, upstream: list[str]) -> Path:
    """Run the stage in this process, as the program does; return the adapter's file."""
    preferences, base, reward_model = upstream
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(home))
        patch.setattr(teacher_labels, "ROWS_PER_PART", ROWS_PER_PART)
        path = distill(LONG_CHAIN.distill, preferences, base, base, reward_model, REUSE)
    return Path(path) / "adapter" / "adapter_model.safetensors"


def _kill_when(is_time: Callable[[], bool], home: Path, upstream: list[str], log: Path) -> None:
    """Run the program until a condition holds, and kill it."""
    from prefect.settings import PREFECT_API_URL

    api_url = str(PREFECT_API_URL.value())
    environment = {**os.environ, "RLHF_HOME": str(home), "PREFECT_API_URL": api_url}
    command = [sys.executable, "-c", PROGRAM, str(CONFIG), str(ROWS_PER_PART), *upstream]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *OVERRIDES], stdout=output, stderr=output, env=environment
        )
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if is_time():
                process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait(30)
    pytest.fail(f"it was never time to kill the program:\n{log.read_text()[-3000:]}")


def _parts(home: Path) -> dict[str, int]:
    """Return when each file of labels was written, by name."""
    # A part that was being written has another name.
    files = (home / "cache" / "teacher").glob("*/[0-9]*.parquet")
    return {file.name: file.stat().st_mtime_ns for file in files}


def test_killed_among_labels_and_in_training_and_equal_in_the_end(
    upstream: list[str], empty_mlflow_db: Path, tmp_path: Path
) -> None:
    from tasks.runtime.session import cluster_session

    log = tmp_path / "program.log"
    killed, straight = (_workspace(tmp_path / n, empty_mlflow_db) for n in ("killed", "straight"))
    with cluster_session():
        pass  # the programs start clusters of their own, so that of this process ends here
    _kill_when(lambda: len(_parts(killed)) >= 3, killed, upstream, log)
    first = _parts(killed)
    assert newest_step(killed, "distill") == -1
    _kill_when(lambda: newest_step(killed, "distill") >= 4, killed, upstream, log)
    labels, step = _parts(killed), newest_step(killed, "distill")
    # The first kill came before the labels were complete, the second before training was.
    assert len(first) < len(labels) and 4 <= step < STEPS
    assert first.items() <= labels.items()
    assert list((killed / "models" / "distill").glob("*")) == []
    with cluster_session():
        resumed, expected = (_run_here(home, upstream) for home in (killed, straight))
    assert resumed.read_bytes() == expected.read_bytes()
    assert _parts(killed) == labels
    assert set(_parts(straight)) == set(labels)
    runs = connect(TrackingConfig(), Workspace(killed)).find_runs({"stage": "distill"})
    assert [run.status for run in runs] == ["FINISHED", "KILLED", "KILLED"]
    assert runs[0].tags["event.resumed"] == f"continuing from step {step} of {STEPS}"
