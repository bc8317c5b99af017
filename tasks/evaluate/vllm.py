"""vLLM's server for one model, started on loopback for a stage, and gone with it.

vLLM comes with a torch of its own, so it lives in an environment of its own and is spoken to over
HTTP. `process_keeper` stands between, so that no server outlives the stage, however that ends.
"""

from __future__ import annotations

import json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tasks.errors import ClusterError, ConfigError
from tasks.evaluate.config import VllmConfig
from tasks.runtime.session import outer_environment

HOST: Final = "127.0.0.1"
_KEEPER: Final = Path(__file__).with_name("process_keeper.py")
_POLL_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 5.0
# The keeper asks for 20 s and then no more.
_STOP_SECONDS: Final = 60.0
# Of a shell's status: a signal's number is added to it.
_SIGNALLED: Final = 128
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


@dataclass(frozen=True)
class ModelServer:
    """A server that is up.

    Args:
        address: up to ``/v1``.
        keeper: process that ends when the server does.
    """

    address: str
    keeper: subprocess.Popen[bytes]
    log_path: Path

    def failure(self) -> ClusterError | None:
        """Return why it has ended, or None while it runs."""
        if self.keeper.poll() is None:
            return None
        return _failure(_ending(self.keeper.returncode), self.address, self.log_path)


@contextmanager
def served(cfg: VllmConfig, model_dir: Path, name: str, log_path: Path) -> Iterator[ModelServer]:
    """Serve a model for the block.

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
            env=_environment(),
            # Control-C is for the stage; the server ends with it.
            start_new_session=True,
        )
    server = ModelServer(f"http://{HOST}:{port}/v1", keeper, log_path)
    try:
        _wait_ready(server, name, cfg.start_seconds)
        yield server
    finally:
        assert keeper.stdin is not None, "it was asked for"
        keeper.stdin.close()
        try:
            keeper.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()


def _environment() -> dict[str, str]:
    """Return this process's own environment, without what is for its Python and its workers.

    Workers on CPUs see no GPU. A key would make the server refuse the stage.
    """
    found = outer_environment()
    for name in ("PYTHONPATH", "PYTHONHOME", "VLLM_API_KEY"):
        found.pop(name, None)
    return found | _ENVIRONMENT


def _wait_ready(server: ModelServer, name: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # No proxy leads to this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        failure = server.failure()
        if failure is not None:
            raise failure
        try:
            with direct.open(f"{server.address}/models", timeout=_ANSWER_SECONDS) as reply:
                # Another program may have taken the port.
                if name in {model["id"] for model in json.load(reply)["data"]}:
                    return
        except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError):
            pass
        time.sleep(_POLL_SECONDS)
    raise _failure(f"was not ready in {seconds:g} s", server.address, server.log_path)


def _ending(status: int) -> str:
    if status > _SIGNALLED:
        return f"was ended by signal {status - _SIGNALLED}"
    return f"ended with status {status}"


def _failure(found: str, address: str, log_path: Path) -> ClusterError:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing"
    return ClusterError(
        f"The server of evaluate.answers.vllm {found}; it said last: {said}",
        f"a server at {address} until all is answered",
        f"read {log_path}; too little GPU memory: lower --gpu-memory-utilization or "
        "--max-model-len in evaluate.answers.vllm.arguments; then run again: what was answered "
        "is not asked again",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
