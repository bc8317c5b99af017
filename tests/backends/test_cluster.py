"""An address that cannot be a cluster is told at once."""

from __future__ import annotations

import pickle
import socket
import time

import pytest

from tasks.backends.cluster import _check_reachable, even_layout, worker_environment
from tasks.errors import ClusterError


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


@pytest.mark.parametrize(
    ("available", "ranks", "expected"),
    [
        ([8, 8], 8, [8]),  # one node holds all
        ([4, 8], 8, [8]),
        ([4, 4], 8, [4, 4]),
        ([2, 1], 2, [2]),
        ([1, 1, 0], 2, [1, 1]),
        ([2, 1], 3, None),  # verl runs as many ranks on each node; 1 + 1 + 1 needs three nodes
        ([2, 1, 1], 3, [1, 1, 1]),
        ([4, 3], 6, [3, 3]),
        ([], 1, None),
    ],
)
def test_ranks_are_shared_evenly_by_few_nodes(
    available: list[int], ranks: int, expected: list[int] | None
) -> None:
    assert even_layout(available, ranks) == expected
