"""Offline PPO with the policy in one group of ranks and all other models in another."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from policy_runs import before_windows, fail_at, tags_of, weights_of

from flows.cli.doctor import examine
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions, check_inputs
from tasks.artifacts import PolicyCheckpoint, load_artifact
from tasks.config.loading import load_config, merge
from tasks.config.shared import RuntimeConfig
from tasks.errors import ClusterError
from tasks.offline_ppo import loop as ppo_loop
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.runtime import session
from tasks.runtime.placement import release, reserve
from tasks.runtime.rows import ACTOR, CRITIC, HostSpec
from tasks.runtime.session import make_room
from tasks.workspace import Workspace

pytestmark = pytest.mark.slow

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
CHANGES = {
    "steps": 6,
    "reanchor_steps": 2,
    "advantage": {"estimator": "gae"},
    "critic": {"force": True},
    "guards": {"enabled": False, "probe_prompts": 8, "probe_max_new_tokens": 8},
    "checkpoint": {"save_every_steps": 2},
    "report": {"prompts": 0},
}
CUT_AT_STEP = 4
# A loss that waits for another gives up after this long.
MEETING_SECONDS = 30.0


@pytest.fixture(scope="module")
def train(preferences: str, base: str) -> Any:
    """A function that runs the stage in a placement and returns the policy."""
    reuse = RunOptions(reuse=True)
    reward_model = train_reward_model(CHAIN.reward_model, preferences, base, reuse)

    def run(placement: str, **changes: Any) -> PolicyCheckpoint:
        plain = merge(CHAIN.offline_ppo.model_dump(), CHANGES)
        plain = merge(plain, {"runtime": {"placement": placement}})
        cfg = OfflinePPOConfig.model_validate(merge(plain, changes))
        path = train_offline_ppo(cfg, preferences, reward_model, base)
        return load_artifact(Path(path), PolicyCheckpoint)

    return run


@pytest.fixture(scope="module")
def weights(train: Any) -> bytes:
    """Those of an undisturbed run whose roles share one group."""
    return weights_of(train("colocated"))


def _placements(loop: ppo_loop.PPOLoop) -> list[set[str]]:
    """Return the placement groups that the ranks of each group run in, as Ray tells."""
    from ray.util import placement_group_table

    created = {
        name for name, entry in placement_group_table().items() if entry["state"] == "CREATED"
    }
    found = [
        {placement.id.hex() for placement in group.resource_pool.pgs}
        for group in loop.session.groups
    ]
    assert set().union(*found) == created
    return found


def _goes_on(
    train: Any, placements: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> PolicyCheckpoint:
    """Train in one placement until the power goes, and in the other one from there."""
    with monkeypatch.context() as patch:
        before_windows(patch, partial(fail_at, CUT_AT_STEP))
        with pytest.raises(RuntimeError, match="the power went"):
            train(placements[0])
    policy: PolicyCheckpoint = train(placements[1])
    assert tags_of(policy)["event.resumed"] == f"continuing from step {CUT_AT_STEP} of 6"
    return policy


# The tests follow one another so that few workers have to be started.


@pytest.mark.endurance
def test_a_checkpoint_of_colocated_roles_goes_on_in_separate_groups(
    train: Any, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights_of(_goes_on(train, ("colocated", "separate"), monkeypatch)) == weights


def _meet(directory: Path, own: str, other: str, loss_fn: Any, **kwargs: Any) -> Any:
    """Compute a loss once that of the other role is at work, too."""
    (directory / own).touch()
    deadline = time.monotonic() + MEETING_SECONDS
    while not (directory / other).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{own} waited for {other}")
        time.sleep(0.01)
    return loss_fn(**kwargs)


def _let_meet(loop: ppo_loop.PPOLoop, directory: Path) -> None:
    """Let the losses of actor and critic wait for one another."""
    losses = {ACTOR: ppo_loop.actor_loss, CRITIC: ppo_loop.critic_step_loss}
    for own, other in ((ACTOR, CRITIC), (CRITIC, ACTOR)):
        loss = losses[own](loop.cfg)
        loop.session.set_loss(own, partial(_meet, directory, own, other, loss))


def test_two_groups_take_their_steps_at_the_same_time_and_change_no_bit(
    train: Any, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import cloudpickle

    # Workers do not know the test modules.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    seen: list[list[set[str]]] = []
    roles: list[dict[str, int]] = []

    def look(loop: ppo_loop.PPOLoop) -> None:
        seen.append(_placements(loop))
        groups = loop.session.groups
        roles.append({role: groups.index(loop.session._of(role)) for role in loop.session.specs})
        _let_meet(loop, tmp_path)

    before_windows(monkeypatch, look)
    policy = train("separate")
    assert len(seen) == 3
    for first, second in seen:
        assert len(first) == len(second) == 1
        assert first.isdisjoint(second)
    assert roles[0] == {ACTOR: 0, CRITIC: 1, "reference": 1, "reward-preference-0": 1}
    assert {path.name for path in tmp_path.iterdir()} == {ACTOR, CRITIC}
    assert weights_of(policy) == weights


@pytest.mark.endurance
def test_a_dead_worker_of_one_group_is_replaced_and_changes_no_bit(
    train: Any, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [CUT_AT_STEP]

    def kill_once(loop: ppo_loop.PPOLoop) -> None:
        if kills and loop.state.step == kills[0]:
            kills.pop()
            os.kill(loop.session._of(CRITIC).resources()[0]["pid"], signal.SIGKILL)

    before_windows(monkeypatch, kill_once)
    policy = train("separate", max_restarts=1)
    assert not kills
    tags = tags_of(policy)
    group = "(critic, reward-preference-0, reference)"
    assert tags["event.restart"].startswith(f"1 of 1: Rank 0 of 1 {group} died")
    assert tags["event.resumed"] == f"continuing from step {CUT_AT_STEP} of 6"
    assert weights_of(policy) == weights


@pytest.mark.endurance
def test_a_checkpoint_of_separate_groups_goes_on_with_colocated_roles(
    train: Any, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights_of(_goes_on(train, ("separate", "colocated"), monkeypatch)) == weights


def _less(runtime: dict[str, Any]) -> RuntimeConfig:
    return RuntimeConfig.model_validate(runtime | {"placement": "colocated"})


def test_too_few_cpus_are_refused_before_any_work(
    train: Any, weights: bytes, workspace: Workspace
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    n_cpus = int(ray.cluster_resources()["CPU"])
    # One group of so many ranks fits, two do not.
    ranks = n_cpus // 2 + 1
    wanted = (
        f"has {n_cpus}. Expected: {2 * ranks} CPUs for runtime.placement: separate, in each of 2 "
        f"groups {ranks} CPUs on one node, one for each of {ranks} ranks. Fix: set "
        "runtime.placement: colocated"
    )
    runtime = {"ranks": ranks, "ray_address": address, "placement": "separate", "device": "cpu"}
    section = OfflinePPOConfig(runtime=RuntimeConfig(**runtime), batch_prompts=8 * ranks)
    cfg = PipelineConfig(offline_ppo=section)
    with pytest.raises(ClusterError) as caught:
        check_inputs(cfg)
    assert wanted in str(caught.value)
    (finding,) = [f for f in examine(cfg, workspace) if f.subject == "offline_ppo.runtime"]
    assert finding.status == "fail" and wanted in finding.detail
    check_inputs(PipelineConfig(offline_ppo=section.model_copy(update={"runtime": _less(runtime)})))
    with pytest.raises(ClusterError) as caught:
        train("separate", runtime=runtime, batch_prompts=8 * ranks)
    assert wanted in str(caught.value)


def test_after_a_loss_one_group_is_reserved_where_two_do_not_fit(weights: bytes) -> None:
    import ray

    session.close()
    n_cpus = int(ray.cluster_resources()["CPU"])
    two = HostSpec(n_cpus // 2, "cpu", 1, groups=2)
    assert _reserved(two) == [n_cpus // 2, n_cpus // 2]
    assert _reserved(replace(two, ranks=n_cpus), after_loss=True) == [n_cpus]


def _reserved(host: HostSpec, **how: bool) -> list[int]:
    """Reserve places and give them back; return how many each group had."""
    found = []
    for placements in reserve(host, **how):
        found.append(sum(placement.bundle_count for placement in placements))
        release(placements)
    return found


def test_a_cluster_of_this_machine_grows_for_a_stage_that_needs_more(weights: bytes) -> None:
    import ray

    session.close()
    runtime, n_cpus = RuntimeConfig(device="cpu"), int(ray.cluster_resources()["CPU"])
    make_room(runtime, n_cpus)
    assert ray.cluster_resources()["CPU"] == n_cpus
    make_room(runtime, n_cpus + 1)
    # And one for the driver's own tasks.
    assert ray.cluster_resources()["CPU"] == n_cpus + 2
