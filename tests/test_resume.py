"""A killed training run goes on from its last checkpoint and ends with the very same weights."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed_runs import newest_step

from flows.ingest import ingest
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.sft import sft
from flows.stages import RunOptions
from tasks.config.loading import load_config
from tasks.config.shared import TrackingConfig
from tasks.tracking.mlflow import RunRecord, connect
from tasks.workspace import Workspace

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parent / "small_chain.yaml"
CHAIN = load_config(CONFIG)
REUSE = RunOptions(reuse=True)
STAGES = ("reward_model", "offline_ppo")

# Checkpoints come early and often, and there is time to kill the run behind the first one.
OVERRIDES = [
    "reward_model.max_steps=60",
    "offline_ppo.steps=60",
    "reward_model.checkpoint.save_every_steps=4",
    "offline_ppo.checkpoint.save_every_steps=4",
]
LONG_CHAIN = load_config(CONFIG, OVERRIDES)

# Both stages, one after the other; a finished one is reused.
PROGRAM = """
import sys
from pathlib import Path

from flows.offline_ppo import train_offline_ppo
from flows.stages import RunOptions
from flows.reward_model import train_reward_model
from tasks.runtime.session import cluster_session
from tasks.config.loading import load_config

config, preferences, base, *overrides = sys.argv[1:]
chain = load_config(Path(config), overrides)
reuse = RunOptions(reuse=True)
with cluster_session():
    reward_model = train_reward_model(chain.reward_model, preferences, base, reuse)
    train_offline_ppo(chain.offline_ppo, preferences, reward_model, base, reuse)
"""


@pytest.fixture(scope="module")
def upstream(
    tmp_path_factory: pytest.TempPathFactory, empty_mlflow_db: Path, prefect_server: None
) -> list[str]:
    """Dataset and base model, from the workspace that the stage tests share."""
    root = tmp_path_factory.getbasetemp() / "stages"
    if not root.exists():
        _make_workspace(root, empty_mlflow_db)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(root))
        preferences = ingest(CHAIN.ingest, REUSE)
        return [preferences, sft(CHAIN.sft, preferences, REUSE)]


def _run_here(home: Path, upstream: list[str]) -> None:
    """Run both stages in this process, as the program does."""
    preferences, base = upstream
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(home))
        reward_model = train_reward_model(LONG_CHAIN.reward_model, preferences, base, REUSE)
        train_offline_ppo(LONG_CHAIN.offline_ppo, preferences, reward_model, base, REUSE)


def _make_workspace(root: Path, database: Path) -> Path:
    root.mkdir()
    shutil.copy(database, root / "mlflow.db")
    return root


def _start(home: Path, upstream: list[str], log: Path) -> subprocess.Popen[bytes]:
    from prefect.settings import PREFECT_API_URL

    environment = {
        **os.environ,
        "RLHF_HOME": str(home),
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
    }
    command = [sys.executable, "-c", PROGRAM, str(CONFIG), *upstream, *OVERRIDES]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _kill_at_new_checkpoint(
    stage: str, home: Path, upstream: list[str], log: Path, after: int = -1
) -> int:
    """Run the program until a checkpoint behind a step appears, wait for a random moment, kill it,
    and return the step of the newest checkpoint that it left."""
    process = _start(home, upstream, log)
    deadline = time.monotonic() + 180
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if newest_step(home, stage) > after:
                time.sleep(random.random() * 0.3)
                process.send_signal(signal.SIGKILL)
                process.wait(30)
                # It may have written another one meanwhile, at which the next run must not end.
                return newest_step(home, stage)
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait(30)
    pytest.fail(f"no checkpoint of {stage}:\n{log.read_text()[-3000:]}")


def _weights(home: Path, stage: str) -> bytes:
    (file,) = (home / "models" / stage).rglob("model.safetensors")
    return file.read_bytes()


def _runs(home: Path, stage: str) -> list[RunRecord]:
    tracker = connect(TrackingConfig(), Workspace(home))
    return tracker.find_runs({"stage": stage})


def test_killed_at_random_moments_and_equal_in_the_end(
    upstream: list[str], empty_mlflow_db: Path, tmp_path: Path
) -> None:
    from tasks.runtime.session import cluster_session

    log = tmp_path / "program.log"
    killed, straight = (
        _make_workspace(tmp_path / name, empty_mlflow_db) for name in ("killed", "straight")
    )
    with cluster_session():
        pass  # the programs start clusters of their own, so that of this process ends here
    moments = {"reward_model": 1, "offline_ppo": 3}
    for stage, n_kills in moments.items():
        step = -1
        for _ in range(n_kills):
            step = _kill_at_new_checkpoint(stage, killed, upstream, log, after=step)
            assert list((killed / "models" / stage).glob("*")) == []
    with cluster_session():
        _run_here(killed, upstream)
        _run_here(straight, upstream)
    for stage in STAGES:
        assert _weights(killed, stage) == _weights(straight, stage)
        assert list((killed / "checkpoints" / stage).glob("*")) == []
        finished = [run for run in _runs(killed, stage) if run.status == "FINISHED"]
        ended = [run for run in _runs(killed, stage) if run.status == "KILLED"]
        assert (len(finished), len(ended)) == (1, moments[stage])
        assert finished[0].tags["event.resumed"].endswith("of 60")
        assert all("failure" in run.tags for run in ended)
        assert "event.resumed" not in _runs(straight, stage)[0].tags
