"""Ray: started once for the whole chain, or joined by address."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from tasks.backends import placement, worker_logs
from tasks.backends.roles import HostSpec
from tasks.config import RuntimeConfig
from tasks.errors import ClusterError

_CLUSTER_ID_METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ANSWER_SECONDS: Final = 10.0
# What Ray says when its own processes needed more than 30 s.
_SLOW_START: Final = "timed out during startup"
_OBJECT_STORE_BYTES = 512 * 2**20
PLATFORM_MODULE = "tasks.backends.verl_platform"


# Of variables that `enter_worker_environment` set: the value before, None = there was none.
_FOUND: dict[str, str | None] = {}


def worker_environment(device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Return the environment that verl processes need, here and on every node."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": "ERROR",
        # Threads that spin while they wait make a busy machine many times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Some microseconds of waiting for the next small matrix, before the thread is put to sleep:
        # a fifth of a step of the tiny model.
        "GOMP_SPINCOUNT": "10000",
    }
    if device == "cpu":
        environment |= {
            "VERL_USE_EXTERNAL_MODULES": PLATFORM_MODULE,
            "VERL_PLATFORM": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Keep freed memory instead of giving it back and faulting it in again at every step:
            # an eighth of the time of a small model's training.
            "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
            "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
        }
    return environment


def enter_worker_environment(device: Literal["cpu", "cuda"]) -> None:
    """Set in this process what verl needs, and remember what was there."""
    for name, value in worker_environment(device).items():
        _FOUND.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def outer_environment() -> dict[str, str]:
    """Return the environment as this process found it, for programs that are no workers."""
    environment = dict(os.environ)
    for name, value in _FOUND.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def resolve_device(runtime: RuntimeConfig) -> Literal["cpu", "cuda"]:
    """Return the device that training runs on.

    Raises:
        ClusterError: ``cuda`` was asked for and neither this machine nor the cluster has a GPU.
    """
    if runtime.device == "cpu":
        return "cpu"
    connect(runtime)
    import ray

    n_gpus = int(ray.cluster_resources().get("GPU", 0))
    if runtime.device == "cuda" and n_gpus < runtime.ranks:
        raise ClusterError(
            f"The Ray cluster has {n_gpus} GPUs",
            f"{runtime.ranks} for runtime.ranks={runtime.ranks}",
            "lower runtime.ranks, set runtime.ray_address, or set runtime.device: cpu",
        )
    return "cuda" if n_gpus >= runtime.ranks else "cpu"


def make_room(runtime: RuntimeConfig, n_ranks: int) -> None:
    """Connect, to a cluster with a CPU for each rank where it is started on this machine.

    One that was started here for an earlier stage, which needed less, is replaced.

    Args:
        runtime: where Ray is.
        n_ranks: of all groups; no worker may be alive.

    Raises:
        ClusterError: as `connect`.
    """
    if runtime.ray_address is None and _started_here().get("cpus", n_ranks) < n_ranks:
        disconnect()
    connect(runtime, n_ranks)


def check_room(runtime: RuntimeConfig, groups: int) -> None:
    """Refuse a cluster that could not hold all ranks even if nothing else ran there; whoever was
    not connected is not afterwards.

    Args:
        runtime: where Ray is, and the ranks of a group.
        groups: of as many ranks.

    Raises:
        ClusterError: tells what is needed and what each node has; or as `connect`.
    """
    import ray

    was_connected = ray.is_initialized()
    try:
        connect(runtime)
        host = HostSpec.from_runtime(runtime, resolve_device(runtime), groups)
        placement.check_room(host)
    finally:
        if not was_connected:
            disconnect()


@cache
def _started_here() -> dict[str, int]:
    """Hold how many CPUs the cluster has that this process started; empty when there is none."""
    return {}


def connect(runtime: RuntimeConfig, n_ranks: int | None = None) -> None:
    """Join the cluster at ``runtime.ray_address``, or start one on this machine; do nothing when
    connected.

    Args:
        runtime: where Ray is.
        n_ranks: for which a cluster is started here; ``runtime.ranks`` unless given.

    Raises:
        ClusterError: nothing answers at the address within ``ray_start_timeout_seconds``.
    """
    address = runtime.ray_address
    if address is not None:
        _use_token(address)
    import ray

    if ray.is_initialized():
        return
    device: Literal["cpu", "cuda"] = (
        "cpu" if runtime.device == "cpu" or not _has_gpu(address) else "cuda"
    )
    options = {
        "include_dashboard": False,
        # The lines go to the run's log: see worker_logs.
        "log_to_driver": True,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": worker_environment(device)},
    }
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    with _own_signal_handler():
        _start_or_join(runtime, n_ranks or runtime.ranks, options)
    worker_logs.listen()


def _start_or_join(runtime: RuntimeConfig, n_ranks: int, options: dict[str, Any]) -> None:
    import ray

    address = runtime.ray_address
    if address is None:
        _start(max(2, n_ranks + 1, os.cpu_count() or 1), options)
        return
    _check_reachable(address, runtime.ray_start_timeout_seconds)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_answer(address, str(error)) from error


def _start(n_cpus: int, options: dict[str, Any]) -> None:
    """Start a cluster on this machine; where it is busy with other work, try once more.

    Raises:
        ClusterError: Ray gave up twice.
    """
    import ray

    for attempts_left in (1, 0):
        try:
            # "local": without it Ray joins a cluster that somebody started on this machine.
            ray.init(
                address="local",
                num_cpus=n_cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        except Exception as error:  # Ray has no class for it
            if _SLOW_START not in str(error):
                raise
            ray.shutdown()
            if not attempts_left:
                raise ClusterError(
                    "Ray did not start on this machine, twice in half a minute each",
                    "a cluster of its own",
                    "run the command again when less else runs here (`uptime` tells the load), or "
                    "name a running cluster by runtime.ray_address",
                ) from error
        else:
            _started_here()["cpus"] = n_cpus
            return


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Keep this process's answer to SIGTERM, which Ray replaces by an abort with a native dump."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _use_token(address: str) -> None:
    """Send this user's token to a cluster that asks for one: Ray 2.60 sends none unasked.

    Where it is sent it is demanded, too: a cluster without tokens, which is not let in to ask about
    the actors of this process, takes it for dead and ends them.
    """
    has_token = (Path.home() / ".ray" / "auth_token").is_file() or any(
        name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    )
    if has_token and asks_for_token(address):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def asks_for_token(address: str) -> bool:
    """Tell whether a cluster refuses who has no token; True where that cannot be found out.

    Asked before Ray is imported, which reads once whether to use tokens.
    """
    if address in ("auto", "local") or "://" in address:
        return True
    import grpc

    with grpc.insecure_channel(address) as channel:
        # A message without fields is empty.
        ask = channel.unary_unary(_CLUSTER_ID_METHOD, bytes, bytes)
        try:
            ask(b"", timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return True
    return False


def _has_gpu(address: str | None) -> bool:
    """Tell whether GPUs may be there: on this machine, or (unknown yet) on a remote cluster."""
    import torch

    return address is not None or torch.cuda.is_available()


def _check_reachable(address: str, timeout_seconds: int) -> None:
    if address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"runtime.ray_address is {address!r}",
            "host:port, ray://host:port or 'auto'",
            "correct it",
        )
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except OSError as error:
        raise _no_answer(address, str(error)) from error


def _no_answer(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"No Ray cluster answers at {address}: {reason}",
        "a running head node",
        "start it with `ray start --head` (its token belongs in ~/.ray/auth_token here too), "
        "or set runtime.ray_address to null to start one here",
    )


def disconnect() -> None:
    """Leave the cluster; a cluster that was started here ends."""
    import ray

    _started_here().clear()
    if ray.is_initialized():
        ray.shutdown()


@contextlib.contextmanager
def cluster_session() -> Iterator[None]:
    """Keep whatever cluster and workers the stages open until the end of the block, then end
    them."""
    try:
        yield
    finally:
        from tasks.backends import session

        session.close()
        disconnect()
