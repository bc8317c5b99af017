"""Which nodes the ranks run on, and how their places are reserved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.backends.roles import HostSpec
from tasks.errors import ClusterError

_RESERVE_SECONDS = 60.0
_PIN_SECONDS = 10.0
_POLL_SECONDS = 0.5
_NODE_LABEL = "ray.io/node-id"
_NODES_TOLD = 16


@dataclass(frozen=True)
class Node:
    """A live node of the cluster.

    Args:
        node_id: Ray's.
        address: of its machine.
        total: ranks that it holds when nothing else runs there.
        free: ranks that it holds now.
    """

    node_id: str
    address: str
    total: int
    free: int

    def __str__(self) -> str:
        return f"{self.address} ({self.node_id[:8]})"


def live_nodes(device: Literal["cpu", "cuda"]) -> list[Node]:
    """Return the nodes that Ray believes alive; it may learn of a death a minute late."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            _places(node["Resources"], device),
            _places(available.get(node["NodeID"], {}), device),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _places(resources: Mapping[str, float], device: Literal["cpu", "cuda"]) -> int:
    n_cpus = int(resources.get("CPU", 0))
    return n_cpus if device == "cpu" else min(n_cpus, int(resources.get("GPU", 0)))


def node_counts(ranks: int, nodes: int, *, after_loss: bool) -> list[int]:
    """Return how many nodes may share the ranks, best first: only ``nodes`` at the start; after a
    loss any number that shares them evenly, fewer before more, near before far."""
    if not after_loss:
        return [nodes]
    even = [count for count in range(1, ranks + 1) if ranks % count == 0]
    return sorted(even, key=lambda count: (count > nodes, abs(count - nodes)))


def even_layout(places: Sequence[int], ranks: int, counts: Sequence[int]) -> list[int] | None:
    """Return the indices of the nodes that run the same number of ranks each, as verl needs it;
    None when the nodes cannot hold them so.

    Args:
        places: ranks that each node holds; of several nodes that fit, the emptiest are taken.
        ranks: in all.
        counts: how many nodes may take part, best first; each divides ``ranks``.
    """
    emptiest = sorted(range(len(places)), key=lambda index: -places[index])
    for count in counts:
        fitting = [index for index in emptiest if places[index] >= ranks // count]
        if len(fitting) >= count:
            return fitting[:count]
    return None


def most_ranks(places: Sequence[int]) -> int:
    """Return how many ranks the nodes hold at most, as many on each that takes part."""
    return max((n * sum(place >= n for place in places) for n in set(places)), default=0)


def reserve(host: HostSpec, *, after_loss: bool = False) -> list[Any]:
    """Reserve a place for every rank and return one placement group per node.

    Each group is bound to its node: verl's own groups only stay together, and two of them may meet
    on one node. A node that dies unnoticed while it is waited for is left out of the next try.

    Args:
        host: ranks, and how many nodes share them.
        after_loss: take another number of nodes where the wanted one is not left.

    Raises:
        ClusterError: the nodes are too small or too few, or others keep them busy.
    """
    counts = node_counts(host.ranks, host.nodes, after_loss=after_loss)
    deadline = time.monotonic() + _RESERVE_SECONDS
    while True:
        nodes = live_nodes(host.device)
        if even_layout([node.total for node in nodes], host.ranks, counts) is None:
            raise _too_small(host, nodes, after_loss)
        chosen = even_layout([node.free for node in nodes], host.ranks, counts)
        groups = _pinned(host, [nodes[index] for index in chosen]) if chosen else None
        if groups is not None:
            return groups
        if time.monotonic() > deadline:
            raise _too_busy(host, nodes)
        time.sleep(_POLL_SECONDS)


def release(groups: Sequence[Any]) -> None:
    """Give reserved places back; what runs there ends."""
    from ray.util import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _pinned(host: HostSpec, nodes: Sequence[Node]) -> list[Any] | None:
    """Reserve places on exactly these nodes; None when one of them does not give them."""
    from ray.util import placement_group

    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if host.device == "cuda" else {})
    per_node = host.ranks // len(nodes)
    groups = [
        placement_group(
            [dict(bundle) for _ in range(per_node)],
            strategy="STRICT_PACK",
            bundle_label_selector=[{_NODE_LABEL: node.node_id}] * per_node,
        )
        for node in nodes
    ]
    chosen = {node.node_id for node in nodes}
    deadline = time.monotonic() + _PIN_SECONDS
    while time.monotonic() < deadline:
        if all(group.wait(timeout_seconds=_POLL_SECONDS) for group in groups):
            return groups
        if not chosen <= {node.node_id for node in live_nodes(host.device)}:
            break
    release(groups)
    return None


def _wanted(host: HostSpec) -> str:
    per_node = host.ranks // host.nodes
    unit = _unit(host)[:-1] if per_node == 1 else _unit(host)
    where = "one node" if host.nodes == 1 else f"each of {host.nodes} nodes"
    return f"{per_node} {unit} on {where}, one for each of {host.ranks} ranks"


def _unit(host: HostSpec) -> str:
    return "CPUs" if host.device == "cpu" else "GPUs"


def _list(nodes: Sequence[Node], what: str) -> str:
    told = [f"{node} has {getattr(node, what)}" for node in nodes[:_NODES_TOLD]]
    rest = [f"{len(nodes) - _NODES_TOLD} more"] if len(nodes) > _NODES_TOLD else []
    return ", ".join(told + rest) or "none"


def _too_small(host: HostSpec, nodes: Sequence[Node], after_loss: bool) -> ClusterError:
    places = [node.total for node in nodes]
    fit = most_ranks(places)
    listed = f"{_unit(host)} of the Ray cluster's live nodes: {_list(nodes, 'total')}"
    other = even_layout(places, host.ranks, node_counts(host.ranks, host.nodes, after_loss=True))
    if after_loss:
        listed = f"{fit} of {host.ranks} ranks would fit on the nodes that are left. {listed}"
    fix = f"set runtime.nodes: {len(other)}" if other else f"lower runtime.ranks to {fit}"
    if not other and not fit:
        fix = "set runtime.ray_address to another cluster"
    return ClusterError(
        listed, _wanted(host), f"{fix} (the same in all stages), or add nodes and start again"
    )


def _too_busy(host: HostSpec, nodes: Sequence[Node]) -> ClusterError:
    return ClusterError(
        f"Free {_unit(host)} of the Ray cluster's live nodes after {_RESERVE_SECONDS:.0f} seconds: "
        f"{_list(nodes, 'free')}",
        _wanted(host),
        "wait for the other jobs of the cluster to end (`ray status`), give all stages the same "
        "runtime.ranks, or add nodes",
    )
