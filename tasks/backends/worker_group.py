"""The worker processes: how they start, and how they end."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.backends import cluster
from tasks.backends.placement import release, reserve
from tasks.backends.roles import HostSpec
from tasks.backends.worker_loss import ask, loss_of, lost_error
from tasks.errors import MemoryLimitError

_PING_SECONDS = 20.0


def start_groups(host: HostSpec, *, after_loss: bool = False) -> list[Any]:
    """Start one process per rank and return verl's handle of each group of them.

    Args:
        host: ranks, nodes, device, and how many groups.
        after_loss: take another number of nodes, or one group, where not enough is left.

    Raises:
        ClusterError: the nodes cannot hold the ranks.
        WorkerLostError: a node died meanwhile.
    """
    cluster.enter_worker_environment(host.device)
    if host.device == "cpu":
        # Registers the platform even where verl was imported before the environment was set.
        importlib.import_module(cluster.PLATFORM_MODULE)
    reserved = reserve(host, after_loss=after_loss)
    started: list[Any] = []
    try:
        for placements in reserved:
            started.append(_start_group(host, placements))
    except BaseException:
        for group in started:
            end_group(group)
        for placements in reserved[len(started) :]:
            release(placements)
        raise
    return started


def _start_group(host: HostSpec, placements: list[Any]) -> Any:
    """Start the processes of one group; they load their libraries while the next one is started."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from tasks.backends.verl_host import RoleHost

    layout = [host.ranks // len(placements)] * len(placements)
    pool = RayResourcePool(layout, use_gpu=host.device == "cuda", max_colocate_count=1)
    pool.pgs = placements
    actor = RayClassWithInitArgs(cls=ray.remote(RoleHost), threads=host.threads_per_rank)
    # On a cluster that was joined, whether there are GPUs is known only now.
    environment = cluster.worker_environment(host.device)
    try:
        return RayWorkerGroup(pool, actor, device_name=host.device, worker_env=environment)
    except ray.exceptions.RayError as error:
        raise lost_error(error, {}, host.ranks) from error


def end_group(group: Any) -> None:
    """End the processes, whatever they wait for, and give back what was reserved for them."""
    import ray

    for worker in group.workers:
        ray.kill(worker)
    # Otherwise the CPUs stay reserved, and a group of another size waits for them in vain.
    release(group.resource_pool.pgs)


@contextmanager
def watched(group: Any, whose: str = "") -> Iterator[None]:
    """Tell what an error of the block means for the workers.

    Args:
        group: that the block calls.
        whose: says which group it is, where there are several.

    Raises:
        MemoryLimitError: a rank ran out of the device's memory.
        WorkerLostError: a rank is gone, whatever the others said of the broken connection.
    """
    import ray
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"A worker ran out of memory: {str(error).splitlines()[0]}",
            "micro-batches that fit",
            "lower runtime.tokens_per_micro_batch or set runtime.gradient_checkpointing: true",
        ) from error
    except ray.exceptions.RayError as error:
        lost = loss_of(error, group.workers, whose)
        if lost is None:
            raise
        raise lost from error


def lost_ranks(group: Any) -> list[int]:
    """Return the ranks that do not answer though nothing was asked of them: they died, or they
    wait for a rank that failed."""
    answers = ask(group.workers, _PING_SECONDS)
    return sorted([*answers.dead, *answers.silent])
