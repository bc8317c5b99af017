"""The `rlhf` command: exits, messages, and one stage for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tasks.config.shared import TrackingConfig
from tasks.tracking.mlflow import PIPELINE, connect
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = 2
FAILURE = 1

Done = subprocess.CompletedProcess[str]
Rlhf = Callable[..., Done]


@pytest.fixture
def rlhf(workspace: Workspace) -> Rlhf:
    """A function that runs the command in a process of its own, as a user does."""

    def run(*arguments: str, **environment: str) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *arguments],
            env=_environment(workspace) | environment,
            cwd=workspace.root,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def _environment(workspace: Workspace) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    return clean | {
        "RLHF_HOME": str(workspace.root),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def _check_message(done: Done, code: int, *expected: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stderr
    for part in expected:
        assert part in errors[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "sft.epohcs=2"], "did you mean 'epochs'?"),
        (["-o", "sft.epochs=many"], "sft.epochs: Input should be a valid number"),
        (["-o", "seed=202402144809161001040"], "less than or equal to 9007199254740991"),
        (["--only", "distil"], "Unknown stage 'distil'"),
        (["--from", "nowhere"], "Unknown stage 'nowhere'"),
        (["--from", "sft", "--only", "sft"], "--only and --from were both given"),
        (["dmeo"], "No config file dmeo"),
    ],
)
def test_bad_configuration_is_one_message(
    workspace: Workspace, arguments: list[str], expected: str
) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == BAD_INPUT
    assert expected in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(workspace: Workspace) -> None:
    result = CliRunner().invoke(app, ["run", "--debug", "-o", "sft.epohcs=2"])
    assert "Traceback" in result.stderr
    assert "Error: " in result.stderr


def test_help_and_version() -> None:
    assert "offline_ppo" in CliRunner().invoke(app, ["run", "--help"]).stdout
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("rlhf ")


@pytest.mark.slow
def test_missing_file_is_refused_and_recorded(rlhf: Rlhf, workspace: Workspace) -> None:
    done = rlhf("run", "-o", "ingest.source=/nowhere/pairs.jsonl")
    _check_message(done, BAD_INPUT, "/nowhere/pairs.jsonl", "-o ingest.source=")
    tracker = connect(TrackingConfig(), workspace)
    (run,) = tracker.find_runs({"stage": PIPELINE})
    assert run.status == "FAILED"
    assert "/nowhere/pairs.jsonl" in run.tags["failure"]
    assert not (workspace.root / "data").exists()


@pytest.mark.slow
def test_questions_that_are_not_json_lines_are_refused(rlhf: Rlhf, tmp_path: Path) -> None:
    questions = tmp_path / "question.jsonl"
    questions.write_text("What?\n")
    _check_message(rlhf("run", "-o", f"evaluate.questions={questions}"), BAD_INPUT, str(questions))


@pytest.mark.slow
def test_workspace_that_is_a_file_is_refused(rlhf: Rlhf, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    _check_message(rlhf("run", RLHF_HOME=str(file)), BAD_INPUT, str(file), "RLHF_HOME")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        ("runtime.ray_address=127.0.0.1:9", "", "runtime.ray_address '127.0.0.1:9'"),
        ("tracking.tracking_uri=http://127.0.0.1:9", "", "No MLflow server answers"),
        ("seed=0", "http://127.0.0.1:9/api", "PREFECT_API_URL"),
    ],
)
def test_server_that_does_not_answer_is_named(
    rlhf: Rlhf, argument: str, variable: str, expected: str
) -> None:
    environment = {"PREFECT_API_URL": variable} if variable else {}
    _check_message(rlhf("run", "-o", argument, **environment), FAILURE, expected)


@pytest.mark.slow
def test_only_without_inputs_says_how_to_make_them(rlhf: Rlhf) -> None:
    _check_message(rlhf("run", "--only", "sft"), BAD_INPUT, "rlhf run --only ingest")


def _server_pids(workspace: Workspace) -> list[int]:
    home = str(workspace.prefect_home)
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if "flows.services.prefect_server" in (process.info["cmdline"] or []):
            try:
                if process.environ().get("PREFECT_HOME") == home:
                    found.append(process.pid)
            except psutil.Error:
                continue
    return found


@pytest.mark.slow
def test_one_stage_runs_without_any_server(rlhf: Rlhf, workspace: Workspace) -> None:
    small = ["-o", "ingest.demo.n_pairs=60"]
    done = rlhf("run", "--only", "ingest", *small)
    assert done.returncode == 0, done.stderr
    for part in ("ingest", "kept 60", "prefect server start", "mlflow server"):
        assert part in done.stdout
    assert _server_pids(workspace) == []

    lineage = rlhf("lineage", "latest", "--json")
    tree: dict[str, Any] = json.loads(lineage.stdout)
    assert tree["stage"] == "ingest"
    assert tree["parents"]["source"]["status"] == "verified"
    shown = rlhf("lineage", "ingest").stdout
    assert tree["fingerprint"] in shown
    assert tree["parents"]["source"]["fingerprint"] in shown

    Path(tree["parents"]["source"]["path"]).write_text("{}")
    broken = rlhf("lineage", "latest")
    assert broken.returncode == FAILURE
    assert "changed" in broken.stdout


@pytest.mark.slow
def test_killed_command_leaves_no_server(workspace: Workspace) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "run", "--only", "ingest"],
        env=_environment(workspace),
        cwd=workspace.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_until(lambda: bool(_server_pids(workspace)), "the temporary server starts")
    process.send_signal(signal.SIGKILL)
    process.wait()
    _wait_until(lambda: not _server_pids(workspace), "the temporary server ends")


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited a minute until {what}"
        time.sleep(0.1)


@pytest.mark.slow
def test_doctor_fails_only_for_what_the_config_needs(rlhf: Rlhf, tmp_path: Path) -> None:
    well = rlhf("doctor", "--json")
    findings = {entry["subject"]: entry["status"] for entry in json.loads(well.stdout)}
    assert well.returncode == 0, well.stdout
    assert "fail" not in findings.values()
    assert {"packages", "accelerators", "memory", "workspace", "ray", "prefect", "mlflow"} <= set(
        findings
    )
    ill = rlhf(
        "doctor",
        *("-o", "ingest.source=/nowhere.jsonl", "-o", "runtime.ray_address=127.0.0.1:9"),
        *("-o", f"sft.model.source={tmp_path}", "--json"),
    )
    failed = {e["subject"]: e["detail"] for e in json.loads(ill.stdout) if e["status"] == "fail"}
    assert ill.returncode == FAILURE
    assert set(failed) == {"ingest file", "ray", "model"}
    assert "/nowhere.jsonl" in failed["ingest file"]
