"""Training that spans two nodes, and goes on when one of them is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from policy_runs import before_windows, tags_of, weights_of
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.state import actors
from ray.cluster_utils import Cluster

from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.artifacts import PolicyCheckpoint, load_artifact
from tasks.config.loading import find_config, load_config, merge
from tasks.config.shared import RuntimeConfig
from tasks.errors import ClusterError, WorkerLostError
from tasks.offline_ppo import loop as ppo_loop
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.runtime import session
from tasks.runtime.placement import release, reserve
from tasks.runtime.rows import HostSpec, RoleSpec, Row
from tasks.runtime.session import cluster_session, connect, disconnect

pytestmark = pytest.mark.long

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
SMALL = {"object_store_memory": 80 * 2**20}
CHANGES = {
    "steps": 6,
    "reanchor_steps": 2,
    "guards": {"enabled": False, "probe_prompts": 8, "probe_max_new_tokens": 8},
    "checkpoint": {"save_every_steps": 2},
}
LOST_AT_STEP = 2
# Ray looks for silent nodes every few seconds, and starting two workers takes as long.
RECOVERY_SECONDS = 90.0


@pytest.fixture(scope="module")
def nodes(cluster: None) -> Iterator[Cluster]:
    """A head node without CPUs and two nodes with two, which this process joins."""
    session.close()
    # A process decides at its first use of Ray whether it asks for tokens: as an ordinary one.
    connect(RuntimeConfig(device="cpu"))
    disconnect()
    with pytest.MonkeyPatch.context() as patch:
        # `Cluster` starts its nodes without tokens unless told so, and this process asks for one as
        # soon as it has used Ray: nodes that have none take its actors for forgotten.
        patch.setenv("RAY_AUTH_MODE", "token")
        ensure_token_if_auth_enabled()
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
        try:
            with cluster_session():
                for _ in range(2):
                    found.add_node(num_cpus=2, **SMALL)
                connect(RuntimeConfig(device="cpu", ray_address=found.address))
                yield found
        finally:
            found.shutdown()


@pytest.fixture(scope="module")
def train(nodes: Cluster, preferences: str, base: str) -> Callable[..., PolicyCheckpoint]:
    """A function that runs the stage with one rank on each node and returns the policy."""
    reward_model = train_reward_model(CHAIN.reward_model, preferences, base, RunOptions(reuse=True))
    runtime = {"ranks": 2, "nodes": 2, "ray_address": nodes.address}

    def run(**changes: Any) -> PolicyCheckpoint:
        plain = merge(CHAIN.offline_ppo.model_dump(), CHANGES | {"runtime": runtime})
        cfg = OfflinePPOConfig.model_validate(merge(plain, changes))
        path = train_offline_ppo(cfg, preferences, reward_model, base)
        return load_artifact(Path(path), PolicyCheckpoint)

    return run


def _homes(group: Any) -> list[str]:
    """Return the node on which each rank's process runs."""
    return [actors(worker._actor_id.hex())["Address"]["NodeID"] for worker in group.workers]


def _lose_node_of(rank: int, nodes: Cluster, loop: ppo_loop.PPOLoop) -> None:
    home = _homes(loop.session.groups[0])[rank]
    lost = next(node for node in nodes.worker_nodes if node.node_id == home)
    nodes.remove_node(lost, allow_graceful=False)


def _disturb(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[ppo_loop.PPOLoop], None]
) -> list[list[str]]:
    """Do something once in the middle of training; return where the ranks ran in each window."""
    seen: list[list[str]] = []
    is_done = False

    def once(loop: ppo_loop.PPOLoop) -> None:
        nonlocal is_done
        seen.append(_homes(loop.session.groups[0]))
        if loop.state.step == LOST_AT_STEP and not is_done:
            is_done = True
            action(loop)

    before_windows(monkeypatch, once)
    return seen


def test_the_packaged_two_node_config_puts_half_its_ranks_on_each_node(
    nodes: Cluster, preferences: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a machine without GPUs and a tiny model change; the rest is the file's.
    changes = ["runtime.device=cpu", "runtime.dtype=fp32", "runtime.ranks=4", "seed=0"]
    changes += [f"runtime.ray_address={nodes.address}", "reward_model.max_steps=1"]
    changes += [f"rendering={CHAIN.sft.rendering.model_dump()}", "reward_model.batch_pairs=8"]
    changes += [
        "offline_ppo.steps=1",
        "offline_ppo.batch_prompts=8",
        "offline_ppo.report.prompts=4",
    ]
    changes += ["offline_ppo.behavior.policy=reference", "offline_ppo.guards.probe_prompts=4"]
    cfg = load_config(find_config("hh_gpu_7b_two_nodes"), changes)
    assert (cfg.offline_ppo.runtime.nodes, cfg.offline_ppo.runtime.gradient_checkpointing) == (
        2,
        True,
    )
    seen = _disturb(monkeypatch, lambda loop: None)
    reward_model = train_reward_model(cfg.reward_model, preferences, base)
    train_offline_ppo(cfg.offline_ppo, preferences, reward_model, base)
    (homes,) = seen
    expected = {node.node_id: 2 for node in nodes.worker_nodes}
    assert {home: homes.count(home) for home in homes} == expected


def test_training_goes_on_without_a_lost_node(
    train: Callable[..., PolicyCheckpoint], nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _disturb(monkeypatch, lambda loop: None)
    policy = train()
    assert [len(set(homes)) for homes in seen] == [2, 2, 2]

    monkeypatch.undo()
    # Rank 0 is lost, the one that holds the process group's store.
    seen = _disturb(monkeypatch, lambda loop: _lose_node_of(0, nodes, loop))
    started = time.monotonic()
    disturbed = train(max_restarts=1)
    assert time.monotonic() - started < RECOVERY_SECONDS
    assert [len(set(homes)) for homes in seen] == [2, 2, 1, 1]
    (left,) = nodes.worker_nodes
    assert set(seen[-1]) == {left.node_id}
    tags = tags_of(disturbed)
    assert tags["event.restart"].startswith("1 of 1 on 1 of 2 nodes: Rank 0 of 2 died")
    assert tags["event.resumed"] == f"continuing from step {LOST_AT_STEP} of 6"
    assert weights_of(disturbed) == weights_of(policy)


def test_too_few_nodes_are_told_with_what_each_has(nodes: Cluster, train: Any) -> None:
    session.close()
    (left,) = nodes.worker_nodes
    with pytest.raises(ClusterError) as caught:
        reserve(HostSpec(2, "cpu", 1, nodes=2))
    assert f"({left.node_id[:8]}) has 2" in str(caught.value)
    assert "1 CPU on each of 2 nodes" in str(caught.value)
    assert "set runtime.nodes: 1" in str(caught.value)
    with pytest.raises(ClusterError, match="2 of 3 ranks would fit on the nodes that are left"):
        reserve(HostSpec(3, "cpu", 1, nodes=3), after_loss=True)
    (placements,) = reserve(HostSpec(2, "cpu", 1, nodes=2), after_loss=True)
    release(placements)


@pytest.mark.endurance
def test_without_restarts_the_loss_ends_the_run(
    nodes: Cluster, train: Callable[..., PolicyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add_node(num_cpus=2, **SMALL)
    _disturb(monkeypatch, lambda loop: _lose_node_of(1, nodes, loop))
    with pytest.raises(WorkerLostError, match=r"Rank 1 of 2 died: its node \w{8} died.*Fix: look"):
        train(max_restarts=0)


@pytest.mark.endurance
def test_the_policy_moves_in_with_the_others_when_its_node_is_lost(
    nodes: Cluster, train: Callable[..., PolicyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    session.close()
    if len(nodes.worker_nodes) < 2:
        nodes.add_node(num_cpus=2, **SMALL)
    policy = train(runtime={"nodes": 1})
    seen: list[set[str]] = []

    def lose(loop: ppo_loop.PPOLoop) -> None:
        seen.extend(set(_homes(group)) for group in loop.session.groups)
        _lose_node_of(0, nodes, loop)

    _disturb(monkeypatch, lose)
    disturbed = train(runtime={"nodes": 1, "placement": "separate"}, max_restarts=1)
    first, second = seen
    assert len(first) == len(second) == 1 and first.isdisjoint(second)
    restart = tags_of(disturbed)["event.restart"]
    assert restart.startswith("1 of 1 in 1 of 2 groups: Rank 0, 1 of 2 (actor) died")
    assert weights_of(disturbed) == weights_of(policy)


def test_a_node_that_is_low_on_memory_is_told_in_one_line(
    nodes: Cluster, train: Any, tiny_dir: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    session.close()
    # One hundredth of the memory is in use everywhere, so this node ends whatever starts there.
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    nodes.add_node(num_cpus=4, **SMALL)
    monkeypatch.delenv("RAY_memory_usage_threshold")
    runtime = RuntimeConfig(ranks=4, device="cpu", ray_address=nodes.address, cpu_threads=1)
    with pytest.raises(WorkerLostError) as caught:
        opened = session.open_session(runtime)
        opened.load(RoleSpec("judge", "value_model", str(tiny_dir)))
        opened.scores("judge", rows)
    told = str(caught.value)
    assert "ran low on memory" in told and "Fix: free memory on that node" in told
    assert "\n" not in told
