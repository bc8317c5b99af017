"""The worker processes: how they start, how they end, and what their failures mean."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.backends import cluster
from tasks.backends.roles import HostSpec
from tasks.errors import MemoryLimitError, WorkerLostError

_PING_SECONDS = 20.0


def start_group(host: HostSpec) -> Any:
    """Start one process per rank and return verl's handle of them."""
    os.environ.update(cluster.worker_environment(host.device))
    if host.device == "cpu":
        # Registers the platform even where verl was imported before the environment was set.
        importlib.import_module(cluster.PLATFORM_MODULE)
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from tasks.backends.verl_host import RoleHost

    use_gpu = host.device == "cuda"
    pool = RayResourcePool(cluster.node_layout(host), use_gpu=use_gpu, max_colocate_count=1)
    actor = RayClassWithInitArgs(cls=ray.remote(RoleHost), threads=host.threads_per_rank)
    # On a cluster that was joined, whether there are GPUs is known only now.
    environment = cluster.worker_environment(host.device)
    return RayWorkerGroup(pool, actor, device_name=host.device, worker_env=environment)


def end_group(group: Any) -> None:
    """End the processes and give back what was reserved for them."""
    import ray
    from ray.util import remove_placement_group

    for worker in group.workers:
        ray.kill(worker)
    # Otherwise the CPUs stay reserved, and a group of another size waits for them for ever.
    for placement_group in group.resource_pool.pgs:
        remove_placement_group(placement_group)


@contextmanager
def watched(group: Any) -> Iterator[None]:
    """Tell what an error of the block means for the workers.

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
        lost = lost_ranks(group)
        if not lost:
            raise
        raise WorkerLostError(
            f"Rank {', '.join(map(str, lost))} of {len(group.workers)} died: "
            f"{str(error).strip().splitlines()[-1]}",
            "workers that live until the stage ends",
            "look at the node's log; the stage continues from its last checkpoint",
        ) from error


def lost_ranks(group: Any) -> list[int]:
    """Return the ranks whose processes are gone."""
    return [rank for rank, worker in enumerate(group.workers) if not _is_alive(worker)]


def _is_alive(worker: Any) -> bool:
    """Ask a worker; one that is busy for long counts as alive."""
    import ray

    try:
        ray.get(worker.__ray_ready__.remote(), timeout=_PING_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return True
    except ray.exceptions.RayError:
        return False
    return True
