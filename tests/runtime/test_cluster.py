"""An address that cannot be a cluster is told at once."""

from __future__ import annotations

import pickle
import socket
import time

import pytest

from tasks.errors import ClusterError
from tasks.runtime import session as cluster
from tasks.runtime.session import _check_reachable, worker_environment


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_nobody_listens() -> None:
    address = f"127.0.0.1:{_closed_port()}"
    started = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        _check_reachable(address, 3)
    assert time.monotonic() - started < 4.0
    assert address in str(caught.value)
    assert "runtime.ray_address" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("address", ["head", "head:", "head:port", ":6379"])
def test_not_an_address(address: str) -> None:
    with pytest.raises(ClusterError, match="host:port"):
        _check_reachable(address, 1)


def test_a_listening_port_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _check_reachable(f"127.0.0.1:{server.getsockname()[1]}", 1)


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001"])
def test_what_ray_itself_resolves_is_left_to_it(address: str) -> None:
    _check_reachable(address, 1)


def test_gpus_are_hidden_from_cpu_workers_only() -> None:
    assert worker_environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment("cuda")


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_start_that_took_too_long_is_tried_once_more(
    n_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    calls: list[int] = []

    def init(**options: object) -> None:
        calls.append(len(calls))
        if len(calls) <= n_failures:
            raise Exception("The current node timed out during startup. This could happen ...")

    started: dict[str, int] = {}
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "_started_here", lambda: started)
    if n_failures == 2:
        with pytest.raises(ClusterError, match=r"did not start .* runtime\.ray_address"):
            cluster._start(3, {})
    else:
        cluster._start(3, {})
    assert (len(calls), started) == (2, {} if n_failures == 2 else {"cpus": 3})


def test_other_failures_of_a_start_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**options: object) -> None:
        raise ValueError("num_cpus")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="num_cpus"):
        cluster._start(3, {})
