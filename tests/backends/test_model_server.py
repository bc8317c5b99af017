"""The server that a stage starts for a model: real processes, real HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from flows.evaluate_inputs import check_evaluation
from tasks.backends.model_server import served, server_command
from tasks.config import EvaluateConfig
from tasks.config_evaluate import VllmConfig
from tasks.errors import ClusterError, ConfigError
from tasks.workspace import Workspace

STAND_IN = str(Path(__file__).resolve().parents[1] / "vllm_stand_in.py")


def _config(*arguments: str, start_seconds: float = 60.0) -> VllmConfig:
    return VllmConfig(
        command=(sys.executable, STAND_IN, "serve"),
        arguments=arguments,
        start_seconds=start_seconds,
    )


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_command_is_that_of_vllm_serve() -> None:
    cfg = VllmConfig(command=(sys.executable, "serve"), arguments=("--dtype=bfloat16",))
    assert server_command(cfg, Path("/models/policy"), "policy", 8123) == [
        sys.executable,
        "serve",
        "/models/policy",
        "--host",
        "127.0.0.1",
        "--port",
        "8123",
        "--served-model-name",
        "policy",
        "--generation-config",
        "vllm",
        "--dtype=bfloat16",
    ]


def test_server_and_what_it_started_are_gone_after_the_block(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    cfg = _config("--leaves-a-process", str(left))
    with served(cfg, tmp_path, "policy", tmp_path / "log") as address:
        assert address.startswith("http://127.0.0.1:") and address.endswith("/v1")
        with urllib.request.urlopen(f"{address}/models") as reply:
            assert json.load(reply) == {"served": "policy", "directory": str(tmp_path)}
    _wait_gone(int(left.read_text()))
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/models")


def test_server_ends_when_the_stage_is_killed(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    script = f"""
import time
from pathlib import Path
from tasks.backends.model_server import served
from tasks.config_evaluate import VllmConfig
cfg = VllmConfig(
    command=({sys.executable!r}, {STAND_IN!r}, "serve"),
    arguments=("--leaves-a-process", {str(left)!r}),
)
with served(cfg, Path({str(tmp_path)!r}), "policy", Path({str(tmp_path / "log")!r})):
    print("ready", flush=True)
    time.sleep(600)
"""
    stage = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert stage.stdout is not None and stage.stdout.readline() == "ready\n"
    server = psutil.Process(int(left.read_text())).parent()
    assert server is not None and STAND_IN in server.cmdline()
    os.kill(stage.pid, signal.SIGKILL)
    stage.wait()
    _wait_gone(server.pid)
    _wait_gone(int(left.read_text()))


def test_server_that_ends_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"ended with status 1; it said last: CUDA error: out of"),
        served(_config("--ends"), tmp_path, "policy", tmp_path / "log"),
    ):
        pass


def test_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"was not ready in 0.5 s; it said last: nothing"),
        served(_config("--hangs", start_seconds=0.5), tmp_path, "policy", tmp_path / "log"),
    ):
        pass
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in (process.info["cmdline"] or ())
    ]


def test_missing_program_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    cfg = EvaluateConfig.model_validate(
        {"answers": {"backend": "vllm", "vllm": {"command": ["no-such-vllm", "serve"]}}}
    )
    with pytest.raises(ConfigError, match="no program 'no-such-vllm' on the path"):
        check_evaluation(cfg, Workspace(tmp_path))
