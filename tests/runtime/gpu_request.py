"""Run by test_gpu_request.py in a process of its own: what Ray gives to the ranks on two nodes that
say they have a GPU each, first to one group of two and then to two groups of one."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

from tasks.config.shared import RuntimeConfig
from tasks.errors import ClusterError
from tasks.runtime import session as cluster
from tasks.runtime import session as worker_group
from tasks.runtime import verl_host
from tasks.runtime.rows import HostSpec


class Probe(Worker):  # type: ignore[misc]
    """Stands where `RoleHost` does, which needs a GPU that works."""

    def __init__(self, threads: int) -> None:
        Worker.__init__(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def given(self) -> dict[str, Any]:
        """Return what Ray gave to this rank."""
        return {
            "gpus": len(ray.get_gpu_ids()),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "node": ray.get_runtime_context().get_node_id(),
            "platform": os.environ.get("VERL_PLATFORM"),
            "rank": self.rank,
        }


def main() -> None:
    # `Cluster` starts its nodes without tokens, so the driver must not ask for one.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    nodes.add_node(num_cpus=2, num_gpus=1)
    try:
        runtime = RuntimeConfig(ranks=2, nodes=2, device="auto", ray_address=nodes.address)
        device = cluster.resolve_device(runtime)
        host = HostSpec.from_runtime(runtime, device)
        verl_host.RoleHost = Probe  # type: ignore[misc]
        (group,) = worker_group.start_groups(host)
        layout = group.resource_pool.store
        ranks = group.given()
        worker_group.end_group(group)
        separate = worker_group.start_groups(HostSpec(1, device, 1, groups=2))
        apart = [rank for group in separate for rank in group.given()]
        found = {"device": device, "layout": layout, "ranks": ranks, "apart": apart}
        try:
            cluster.check_room(runtime.model_copy(update={"nodes": 1}), 2)
        except ClusterError as error:
            found["refused"] = str(error)
        json.dump(found, sys.stdout)
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()
