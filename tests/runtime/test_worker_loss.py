"""What errors of the ranks mean, by the texts that Ray and gloo give them."""

from __future__ import annotations

import pytest
import torch
from ray import exceptions

from tasks.runtime.session import _is_broken_connection, lost_error

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: \
192.0.2.2, ID: 17ce9da47190b2069f11) was 22.60GB used / 23.54GB limit (0.960068)
OOM kill reason: Memory usage 24266539008B exceeded threshold of 24012684697B
Object store memory usage: [- objects spillable: 0
- bytes spillable: 0
Top 10 memory users: PID	MEM(GB)	COMMAND
22617	2.75	ray::RoleHost.train
Refer to the documentation on how to address the out of memory issue."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Read error [127.0.0.1]:9639: Connection reset by peer. GLHF!"),
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:9639"),
        RuntimeError(GLOO + "Timed out waiting 1800000ms for recv operation to complete"),
        torch.distributed.DistBackendError(
            "NCCL error: remote process exited or there was a network error, NCCL version 2.21"
        ),
        torch.distributed.DistNetworkError("The client socket has timed out after 60s"),
    ],
)
def test_another_rank_broke_the_connection(error: Exception) -> None:
    assert _is_broken_connection(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        OSError("Connection reset by peer"),  # a download, for instance
        RuntimeError(GLOO + "op.preamble.length <= op.nbytes. 800 vs 400"),
        torch.distributed.DistBackendError("NCCL error: invalid usage"),
    ],
)
def test_the_code_itself_failed(error: Exception) -> None:
    assert not _is_broken_connection(error)


def test_little_memory_of_the_node_is_told_in_one_line() -> None:
    connection = RuntimeError(GLOO + "Connection closed by peer")
    for error, dead in (
        (exceptions.OutOfMemoryError(MEMORY), {}),
        (connection, {1: exceptions.OutOfMemoryError(MEMORY)}),
    ):
        told = str(lost_error(error, dead, 2))
        assert "node 192.0.2.2 ran low on memory (22.60GB of 23.54GB in use)" in told
        assert "Fix: free memory on that node" in told
        assert "\n" not in told


def test_ranks_and_node_are_named() -> None:
    died = exceptions.NodeDiedError("The actor died because its node has died. Node Id: 4a3ee04321")
    told = str(lost_error(RuntimeError("x"), {3: died, 2: died}, 4))
    assert told.startswith("Rank 2, 3 of 4 died: its node 4a3ee043 died.")
    assert told.endswith("the stage, started again, continues from its last checkpoint.")
