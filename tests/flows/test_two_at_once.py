"""Two programs that share one workspace."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_CHAIN
from service_client import DirectHome

from flows.outcomes import StageOutcome
from tasks.artifacts import EvalReport, newest_artifact, read_manifest
from tasks.config.shared import STAGES, TrackingConfig
from tasks.errors import WorkspaceError
from tasks.tracking.lineage import lineage_tree
from tasks.tracking.mlflow import PIPELINE, Tracker, connect
from tasks.workspace import Workspace, process_name

Run = Callable[..., str]
BAD_INPUT = 2
# Says that it is ready, and opens the database when it is told to.
OPEN = (
    "import sys\n"
    "from tasks.pipeline_config import TrackingConfig\n"
    "from tasks.tracking.mlflow import connect\n"
    "from tasks.workspace import Workspace\n"
    "print('ready', flush=True)\n"
    "sys.stdin.readline()\n"
    "print(connect(TrackingConfig(), Workspace.from_environment()).experiment_id)\n"
)


@pytest.mark.slow
def test_two_programs_make_one_database(tmp_path: Path) -> None:
    environment = {**os.environ, "RLHF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("RLHF_TRACKING_URI", None)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for program in programs:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    said = [program.communicate(timeout=300) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    assert {out for out, _ in said} == {"1\n"}


@pytest.mark.slow
def test_chain_that_meets_another_one_says_what_to_do(
    run_chain: Run, workspace: Workspace, tracker: Tracker
) -> None:
    report = Path(run_chain())
    student = read_manifest(report).parents["student"]
    lock = workspace.cache_dir / "locks" / f"distill-{student.fingerprint[:16]}"
    # A chain that ended leaves nothing in it.
    assert lock.read_text() == ""
    with lock.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        lock.write_text(f"{socket.gethostname()}:{process_name()}")
        with pytest.raises(WorkspaceError) as caught:
            run_chain("distill")
    for part in (f"Stage distill with this config is running in process {os.getpid()}", "wait"):
        assert part in str(caught.value)
    chain = tracker.find_runs({"stage": PIPELINE})[0]
    assert (chain.status, chain.tags["failure"]) == ("FAILED", str(caught.value))
    # Nothing was lost: the finished student answers.
    run_chain()
    assert newest_artifact(report.parent, EvalReport, read_manifest(report).fingerprint)


@pytest.mark.endurance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seeds", [(0, 0), (1, 2)], ids=["the same", "two seeds"])
def test_two_direct_chains_at_once(seeds: tuple[int, int], tmp_path: Path) -> None:
    """In a workspace that neither has prepared: databases, caches and Ray are made by both."""
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {SMALL_CHAIN}\n")
    with DirectHome(tmp_path / "home", config) as home:
        runs = [home.start("-o", f"seed={seed}") for seed in seeds]
        codes = [run.wait(2000) for run in runs]
        texts = [run.text() for run in runs]
        assert 0 in codes and (seeds[0] == seeds[1] or codes == [0, 0]), texts
        for code, text in zip(codes, texts, strict=True):
            if code:
                # The other one was at the same stage.
                assert code == BAD_INPUT and "is running in process" in text, text
                assert "start this run again, which reuses its result" in text
        for seed in seeds:
            # Nothing has to be run again, and each chain has its own upstreams.
            assert "All stages were reused" in home.finished("-o", f"seed={seed}")
            _one_line(Workspace(home.root), seed)


def _one_line(workspace: Workspace, seed: int) -> None:
    """Check that the newest chain's report leads to artefacts of its own seed only."""
    tracker = connect(TrackingConfig(), workspace)
    tags = tracker.find_runs({"stage": PIPELINE})[0].tags
    report = StageOutcome.model_validate_json(tags["outcome.evaluate"]).artifact
    made = [node for node in lineage_tree(tracker, report).walk() if node.stage is not None]
    assert {node.stage for node in made} == set(STAGES)
    assert {read_manifest(Path(node.path)).config["seed"] for node in made} == {seed}
