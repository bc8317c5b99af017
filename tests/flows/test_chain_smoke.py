"""The chain as a user starts it: real Prefect, MLflow, Ray and verl, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.config.shared import STAGES

pytestmark = pytest.mark.slow
CONFIG = Path(__file__).parent.parent / "small_chain.yaml"


@dataclass(frozen=True)
class Home:
    """A workspace and the command that works in it."""

    root: Path

    def rlhf(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        environment = {**os.environ, "RLHF_HOME": str(self.root), "OMP_NUM_THREADS": "1"}
        environment.pop("PREFECT_API_URL", None)
        return subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *args],
            env=environment,
            cwd=CONFIG.parent.parent.parent,
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )

    def summary(self) -> dict[str, Any]:
        """Return what the last chain left."""
        loaded: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return loaded


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A workspace in which the chain ran once."""
    home = Home(tmp_path_factory.mktemp("smoke") / "home")
    result = home.rlhf("run", str(CONFIG))
    assert result.returncode == 0, result.stderr[-3000:]
    return home


def test_the_summary_names_what_every_stage_made(finished: Home) -> None:
    summary = finished.summary()
    assert list(summary["stages"]) == list(STAGES)
    for stage in summary["stages"].values():
        assert Path(stage["artifact"]).is_dir()
        assert len(stage["fingerprint"]) == 64
        assert stage["mlflow_run_id"]
        assert stage["seconds"] > 0
        assert stage["metrics"] is not None
    assert set(summary["demo"]["oracle_good_rate"]) == {"base", "policy", "student"}
    assert 0.0 <= summary["demo"]["reward_accuracy_clean"] <= 1.0
    assert summary["peak_rss_bytes"] > 2**28  # Ray's workers are in it
    assert summary["wall_seconds"] > 1


def test_lineage_leads_from_the_student_to_the_raw_file(finished: Home) -> None:
    student = finished.summary()["stages"]["distill"]["artifact"]
    result = finished.rlhf("lineage", student, "--json")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    for part in ("student_adapter", "policy_checkpoint", "reward_model_checkpoint", "jsonl"):
        assert part in text
    assert "preference_dataset" in text


def test_the_same_command_reuses_everything_and_says_so(finished: Home) -> None:
    before = finished.summary()
    start = time.monotonic()
    result = finished.rlhf("run", str(CONFIG))
    seconds = time.monotonic() - start
    assert result.returncode == 0, result.stderr[-3000:]
    assert "reused" in result.stdout.lower()
    assert seconds < 30
    after = finished.summary()
    assert [s["artifact"] for s in after["stages"].values()] == [
        s["artifact"] for s in before["stages"].values()
    ]


@pytest.mark.endurance
def test_one_stage_runs_alone_on_the_newest_inputs(finished: Home) -> None:
    student = finished.summary()["stages"]["distill"]["artifact"]
    result = finished.rlhf("run", str(CONFIG), "--only", "distill")
    assert result.returncode == 0, result.stderr[-3000:]
    made = sorted(path.name for path in Path(student).parent.iterdir())
    fingerprints = {name[:16] for name in made if not name.startswith(".")}
    assert len(made) == 2 and len(fingerprints) == 1  # run again, and the first one kept
