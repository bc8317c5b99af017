"""vLLM's server for one model, started on loopback for a stage, and gone with it.

vLLM comes with a torch of its own, so it lives in an environment of its own and is spoken to over
HTTP. `process_keeper` stands between, so that no server outlives the stage, however that ends.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tasks.config_evaluate import VllmConfig
from tasks.errors import ClusterError, ConfigError

HOST: Final = "127.0.0.1"
_KEEPER: Final = Path(__file__).with_name("process_keeper.py")
_POLL_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 5.0
_SHOWN_LINES: Final = 5
# Nothing is to be told to anybody outside.
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def check_program(cfg: VllmConfig) -> str:
    """Return the path of the program that serves.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which(os.path.expanduser(cfg.command[0]))
    if found is None:
        raise ConfigError(
            f"evaluate.answers.vllm.command: no program {cfg.command[0]!r} on the path",
            "vLLM's command",
            "install vllm in an environment of its own and name its program, for instance "
            "command: [/opt/vllm/bin/vllm, serve]; or answers.backend: transformers",
        )
    return found


def server_command(cfg: VllmConfig, model_dir: Path, name: str, port: int) -> list[str]:
    """Return the command that serves a model directory under a name.

    Without ``--generation-config vllm`` the server would sample by the model's own
    generation_config.json wherever a request is silent.
    """
    return [
        check_program(cfg),
        *cfg.command[1:],
        str(model_dir),
        *("--host", HOST, "--port", str(port)),
        *("--served-model-name", name),
        *("--generation-config", "vllm"),
        *cfg.arguments,
    ]


@contextmanager
def served(cfg: VllmConfig, model_dir: Path, name: str, log_path: Path) -> Iterator[str]:
    """Serve a model for the block; yields the address up to ``/v1``.

    Args:
        log_path: gets what the server prints.

    Raises:
        ConfigError: no such program.
        ClusterError: the server ended, or was not ready in time; with its last lines.
    """
    port = _free_port()
    command = server_command(cfg, model_dir, name, port)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-I", str(_KEEPER), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
            # Control-C is for the stage; the server ends with it.
            start_new_session=True,
        )
    try:
        _wait_ready(keeper, f"http://{HOST}:{port}/health", cfg.start_seconds, log_path)
        yield f"http://{HOST}:{port}/v1"
    finally:
        assert keeper.stdin is not None, "it was asked for"
        keeper.stdin.close()
        keeper.wait()


def _wait_ready(keeper: subprocess.Popen[bytes], url: str, seconds: float, log_path: Path) -> None:
    deadline = time.monotonic() + seconds
    # No proxy leads to this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    found = f"was not ready in {seconds:g} s"
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            found = f"ended with status {keeper.returncode}"
            break
        try:
            with direct.open(url, timeout=_ANSWER_SECONDS):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_SECONDS)
    lines = log_path.read_text(errors="replace").strip().splitlines()
    said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing"
    raise ClusterError(
        f"The server of evaluate.answers.vllm {found}; it said last: {said}",
        f"an answer at {url}",
        f"read {log_path}; too little GPU memory: lower --gpu-memory-utilization or "
        "--max-model-len in evaluate.answers.vllm.arguments",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
