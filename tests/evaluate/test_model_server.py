"""The server that a stage starts for a model: real processes, real HTTP."""

from __future__ import annotations

import contextlib
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

from flows.inputs import check_evaluation
from tasks.config.shared import GenerationConfig
from tasks.data.hh import Message
from tasks.errors import ClusterError, ConfigError
from tasks.evaluate.answers import Dialogue, EndpointAnswerer
from tasks.evaluate.config import AnswersConfig, EvaluateConfig, VllmConfig
from tasks.evaluate.endpoint import ChatEndpoint
from tasks.evaluate.vllm import served, server_command
from tasks.runtime import session as cluster
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
    with contextlib.suppress(psutil.NoSuchProcess):  # gone between two looks
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
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
    with served(cfg, tmp_path, "policy", tmp_path / "log") as server:
        assert server.address.startswith("http://127.0.0.1:") and server.failure() is None
        with urllib.request.urlopen(f"{server.address}/models") as reply:
            assert json.load(reply) == {"data": [{"id": "policy", "root": str(tmp_path)}]}
        assert psutil.pid_exists(int(left.read_text()))
    _wait_gone(int(left.read_text()))
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.address}/models")


def test_server_sees_the_gpus_that_workers_on_cpus_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_FOUND", {})
    for name in cluster.worker_environment("cpu"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.setenv("VLLM_API_KEY", "sk-other")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    for _ in range(2):
        cluster.enter_worker_environment("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    written = tmp_path / "environment.json"
    cfg = _config("--writes-environment", str(written))
    with served(cfg, tmp_path, "policy", tmp_path / "log"):
        seen = json.loads(written.read_text())
    assert seen["CUDA_VISIBLE_DEVICES"] == "3" and seen["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"VERL_PLATFORM", "VLLM_API_KEY", "PYTHONPATH"} & seen.keys()


def test_server_that_ends_among_the_answers_is_named_with_its_last_words(tmp_path: Path) -> None:
    cfg = AnswersConfig(vllm=_config("--ends-when-asked"))
    log_path = tmp_path / "log"
    with (
        pytest.raises(
            ClusterError, match=r"vllm was ended by signal 9; it said last: .*CUDA error: out of"
        ),
        served(cfg.vllm, tmp_path, "policy", log_path) as server,
    ):
        endpoint = ChatEndpoint(cfg.endpoint_at(server.address, "policy"), failure=server.failure)
        answerer = EndpointAnswerer(lambda: endpoint, GenerationConfig())
        prompts = [Dialogue(i, (Message("user", "Hello"),), (), 0.0) for i in range(40)]
        answerer.answer(prompts, 0, lambda dialogue, responses: None)
    # The first requests at most: nobody waits for the retries of all forty.
    assert endpoint.usage.requests < 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_its_keeper(tmp_path: Path, number: int) -> None:
    with served(_config(), tmp_path, "policy", tmp_path / "log") as server:
        (found,) = psutil.Process(server.keeper.pid).children()
        assert STAND_IN in found.cmdline()
        os.kill(server.keeper.pid, number)
        _wait_gone(found.pid)
        server.keeper.wait(30)
        assert server.failure() is not None


def test_server_ends_when_the_stage_is_killed(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    script = f"""
import time
from pathlib import Path
from tasks.evaluate.vllm import served
from tasks.evaluate.config import VllmConfig
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
