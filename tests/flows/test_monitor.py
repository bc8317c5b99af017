"""Memory, time and the summary file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from rich.console import Console

from flows.cli.run import print_result, ui_commands
from flows.cli.runs import lineage_lines
from flows.outcomes import (
    RunMonitor,
    StageOutcome,
    chain_rows,
    current_monitor,
    monitored,
    summary_of,
    tree_rss_bytes,
)
from tasks.config.shared import TrackingConfig
from tasks.tracking.lineage import LineageNode
from tasks.workspace import Workspace

Make = Callable[..., Any]
_ALLOCATE = (
    "import time; block = bytearray(b'1') * 200_000_000; print('ready', flush=True); time.sleep(60)"
)


def _outcome(artifact: Any, *, reused: bool = False) -> StageOutcome:
    return StageOutcome(
        artifact=str(artifact.path),
        fingerprint=artifact.fingerprint,
        mlflow_run_id="r",
        seconds=1.25,
        reused=reused,
    )


def test_children_count() -> None:
    before = tree_rss_bytes(psutil.Process())
    child = subprocess.Popen([sys.executable, "-c", _ALLOCATE], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_rss_bytes(psutil.Process()) - before > 200e6
        monitor = RunMonitor(time.time() - 5)
        time.sleep(0.2)
        monitor.stop()
        assert monitor.peak_rss_bytes > 200e6
        assert 5 < monitor.wall_seconds < 60
    finally:
        child.kill()
        child.wait()


def test_inner_block_shares_the_monitor() -> None:
    assert current_monitor() is None
    with monitored() as outer, monitored() as inner:
        assert inner is outer is current_monitor()
    assert current_monitor() is None


def test_demo_figures_are_found(make_artifact: Make, workspace: Workspace) -> None:
    demo = {"oracle_good_rate": {"base": 0.4, "student": 0.8}, "reward_accuracy_clean": None}
    report = make_artifact("evaluate", report={"demo": demo})
    summary = summary_of({"evaluate": _outcome(report)}, 2.0, 3)
    assert summary["demo"] == {
        "oracle_good_rate": {"base": 0.4, "policy": None, "student": 0.8},
        "reward_accuracy_clean": None,
    }
    assert (summary["wall_seconds"], summary["peak_rss_bytes"]) == (2.0, 3)


def test_rows_say_what_was_reused(make_artifact: Make) -> None:
    outcomes = {
        "sft": _outcome(make_artifact("sft"), reused=True),
        "distill": _outcome(make_artifact("distill")),
    }
    assert [(row["stage"], row["state"]) for row in chain_rows(outcomes)] == [
        ("sft", "reused"),
        ("distill", "ran"),
    ]


def test_a_policy_that_a_guard_stopped_is_seen(make_artifact: Make) -> None:
    states = {}
    for value, reused in ((0.0, False), (1.0, False), (1.0, True)):
        policy = make_artifact("offline_ppo", value=value, reused=reused)
        path = policy.path / "artifact.json"
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "metrics": {"stopped_by_guard": value}}))
        with monitored() as monitor:
            monitor.outcomes["offline_ppo"] = _outcome(policy, reused=reused)
        (row,) = chain_rows(monitor.outcomes)
        states[value, reused] = row["state"]
        console = Console(record=True, width=200)
        print_result(console, monitor)
        shown = console.export_text()
        assert row["state"] in shown and ("stopped by a guard" in shown) == bool(value)
        summary = summary_of(monitor.outcomes, 1.0, 1)
        assert summary["stages"]["offline_ppo"]["metrics"]["stopped_by_guard"] == value
    assert states == {
        (0.0, False): "ran",
        (1.0, False): "ran, stopped by a guard",
        (1.0, True): "reused, stopped by a guard",
    }


def test_commands_open_both_uis(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_HOME")
    prefect, mlflow = ui_commands(workspace, TrackingConfig(), None)
    assert f"PREFECT_HOME={workspace.prefect_home} prefect server start" in prefect
    assert f"--backend-store-uri {workspace.tracking_uri}" in mlflow
    servers = ui_commands(workspace, TrackingConfig(tracking_uri="http://m"), "http://p/api")
    assert servers == ["Prefect UI: http://p", "MLflow UI:  http://m"]


def test_tree_shows_shared_ancestors_once() -> None:
    raw = LineageNode(kind="file", fingerprint="f0", path="/raw", status="verified")
    data = LineageNode(
        kind="preference_dataset",
        stage="ingest",
        fingerprint="f1",
        path="/data",
        status="present",
        parents={"source": raw},
    )
    base = data.model_copy(
        update={"stage": "sft", "fingerprint": "f2", "path": "/base", "parents": {"data": data}}
    )
    root = base.model_copy(
        update={"fingerprint": "f3", "path": "/root", "parents": {"base": base, "data": data}}
    )
    assert lineage_lines(root) == [
        "sft: preference_dataset f3",
        "│ /root",
        "├─ base: preference_dataset f2",
        "│  │ /base",
        "│  └─ data: preference_dataset f1",
        "│     │ /data",
        "│     └─ source: file f0 [verified]",
        "│          /raw",
        "└─ data: preference_dataset f1 (see above)",
    ]
