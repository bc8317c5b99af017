"""Which nodes the ranks run on, and how their places are reserved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tasks.errors import ClusterError
from tasks.runtime.rows import HostSpec

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


def group_layouts(
    places: Sequence[int], ranks: int, counts: Sequence[int], groups: int
) -> list[list[int]] | None:
    """Return the `even_layout` of each of several groups, all on the same number of nodes; None
    when the nodes cannot hold them all.

    Each takes the nodes that are emptiest when its turn comes, so that groups share nodes last.
    """
    for count in counts:
        left, found = list(places), []
        for _ in range(groups):
            chosen = even_layout(left, ranks, [count])
            if chosen is None:
                break
            for index in chosen:
                left[index] -= ranks // count
            found.append(chosen)
        else:
            return found
    return None


def most_ranks(places: Sequence[int], groups: int = 1) -> int:
    """Return how many ranks of each group the nodes hold at most, as many on each node that takes
    part."""
    sizes = {place // share for place in places for share in range(1, groups + 1)} - {0}
    # A group has no second share on a node, and all groups have as many shares.
    shares = {n: sum(min(place // n, groups) for place in places) // groups for n in sizes}
    return max((n * count for n, count in shares.items()), default=0)


def check_room(host: HostSpec) -> None:
    """Refuse a cluster that could not hold the ranks even if nothing else ran there.

    Raises:
        ClusterError: tells what is needed and what each node has.
    """
    nodes = live_nodes(host.device)
    counts = node_counts(host.ranks, host.nodes, after_loss=False)
    if group_layouts([node.total for node in nodes], host.ranks, counts, host.groups) is None:
        raise _too_small(host, nodes, after_loss=False)


def reserve(host: HostSpec, *, after_loss: bool = False) -> list[list[Any]]:
    """Reserve a place for every rank and return, for each group of ranks, one placement group per
    node.

    Each placement group is bound to its node: verl's own only stay together, and two of them may
    meet on one node. A node that dies unnoticed while it is waited for is left out of the next try.

    Args:
        host: ranks, how many nodes share them, and how many groups of them there are.
        after_loss: take another number of nodes where the wanted one is not left, and one group
            where not all fit.

    Raises:
        ClusterError: the nodes are too small or too few, or others keep them busy.
    """
    counts = node_counts(host.ranks, host.nodes, after_loss=after_loss)
    deadline = time.monotonic() + _RESERVE_SECONDS
    while True:
        nodes = live_nodes(host.device)
        fitting = _that_fit(host, [node.total for node in nodes], counts, after_loss)
        if fitting is None:
            raise _too_small(host, nodes, after_loss)
        free = [node.free for node in nodes]
        layouts = group_layouts(free, host.ranks, counts, fitting.groups)
        if layouts is not None:
            reserved = _pinned(fitting, [[nodes[index] for index in one] for one in layouts])
            if reserved is not None:
                return reserved
        if time.monotonic() > deadline:
            raise _too_busy(fitting, nodes)
        time.sleep(_POLL_SECONDS)


def _that_fit(
    host: HostSpec, places: Sequence[int], counts: Sequence[int], after_loss: bool
) -> HostSpec | None:
    """Return the host with as many groups as the nodes hold: all of them or, after a loss, one;
    None when that does not fit either."""
    for groups in (host.groups, 1) if after_loss else (host.groups,):
        if group_layouts(places, host.ranks, counts, groups) is not None:
            return replace(host, groups=groups)
    return None


def release(groups: Sequence[Any]) -> None:
    """Give reserved places back; what runs there ends."""
    from ray.util import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _pinned(host: HostSpec, nodes: Sequence[Sequence[Node]]) -> list[list[Any]] | None:
    """Reserve places on exactly these nodes of each group; None when one of them does not give
    them."""
    from ray.util import placement_group

    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if host.device == "cuda" else {})
    per_node = host.ranks // len(nodes[0])
    reserved = [
        [
            placement_group(
                [dict(bundle) for _ in range(per_node)],
                strategy="STRICT_PACK",
                bundle_label_selector=[{_NODE_LABEL: node.node_id}] * per_node,
            )
            for node in of_group
        ]
        for of_group in nodes
    ]
    placements = [placement for of_group in reserved for placement in of_group]
    chosen = {node.node_id for of_group in nodes for node in of_group}
    deadline = time.monotonic() + _PIN_SECONDS
    while time.monotonic() < deadline:
        if all(placement.wait(timeout_seconds=_POLL_SECONDS) for placement in placements):
            return reserved
        if not chosen <= {node.node_id for node in live_nodes(host.device)}:
            break
    release(placements)
    return None


def _wanted(host: HostSpec) -> str:
    per_node = host.ranks // host.nodes
    unit = _unit(host)[:-1] if per_node == 1 else _unit(host)
    where = "one node" if host.nodes == 1 else f"each of {host.nodes} nodes"
    of_group = f"{per_node} {unit} on {where}, one for each of {host.ranks} ranks"
    if host.groups == 1:
        return of_group
    in_all = f"{host.groups * host.ranks} {_unit(host)}"
    return f"{in_all} for runtime.placement: separate, in each of {host.groups} groups {of_group}"


def _unit(host: HostSpec) -> str:
    return "CPUs" if host.device == "cpu" else "GPUs"


def _list(nodes: Sequence[Node], what: str) -> str:
    told = [f"{node} has {getattr(node, what)}" for node in nodes[:_NODES_TOLD]]
    rest = [f"{len(nodes) - _NODES_TOLD} more"] if len(nodes) > _NODES_TOLD else []
    return ", ".join(told + rest) or "none"


def _too_small(host: HostSpec, nodes: Sequence[Node], after_loss: bool) -> ClusterError:
    places = [node.total for node in nodes]
    # After a loss, one group was tried last.
    groups = 1 if after_loss else host.groups
    fit = most_ranks(places, groups)
    listed = f"{_unit(host)} of the Ray cluster's live nodes: {_list(nodes, 'total')}"
    counts = node_counts(host.ranks, host.nodes, after_loss=True)
    other = group_layouts(places, host.ranks, counts, groups)
    if after_loss:
        listed = f"{fit} of {host.ranks} ranks would fit on the nodes that are left. {listed}"
    fix = f"set runtime.nodes: {len(other[0])}" if other else f"lower runtime.ranks to {fit}"
    if not other and not fit:
        fix = "set runtime.ray_address to another cluster"
    if groups > 1 and group_layouts(places, host.ranks, [host.nodes], 1) is not None:
        fix = f"set runtime.placement: colocated, or {fix}"
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
