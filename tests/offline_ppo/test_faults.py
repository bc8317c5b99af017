"""What goes wrong while the policy trains: dead workers, little memory, rewards that poison it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_runs import before_windows, fail_at, tags_of, weights_of

from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.artifacts import PolicyCheckpoint, load_artifact
from tasks.config.loading import load_config, merge
from tasks.errors import TrainingError, WorkerLostError
from tasks.models.loading import load_causal_lm
from tasks.offline_ppo import loop as ppo_loop
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.runtime.session import Session

pytestmark = pytest.mark.slow

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
PLAIN = {
    "steps": 12,
    "reanchor_steps": 3,
    # A few steps of a tiny model give rules that act on noise.
    "guards": {
        "enabled": False,
        "probe_every_steps": 3,
        "probe_prompts": 8,
        "probe_max_new_tokens": 16,
    },
}


@pytest.fixture(scope="module")
def train(preferences: str, base: str) -> Any:
    """A function that runs the stage with some changes and returns the policy."""
    reuse = RunOptions(reuse=True)
    reward_model = train_reward_model(CHAIN.reward_model, preferences, base, reuse)

    def run(**changes: Any) -> PolicyCheckpoint:
        plain = merge(CHAIN.offline_ppo.model_dump(), PLAIN)
        cfg = OfflinePPOConfig.model_validate(merge(plain, changes))
        path = train_offline_ppo(cfg, preferences, reward_model, base)
        return load_artifact(Path(path), PolicyCheckpoint)

    return run


@pytest.fixture(scope="module")
def policy(train: Any) -> PolicyCheckpoint:
    """The policy of a run that nothing disturbs."""
    found: PolicyCheckpoint = train()
    return found


def _kill_worker(loop: ppo_loop.PPOLoop) -> None:
    os.kill(loop.session.groups[0].resources()[0]["pid"], signal.SIGKILL)


def test_dead_workers_are_replaced_and_nothing_changes(
    train: Any, policy: PolicyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [6, 9]

    def kill_twice(loop: ppo_loop.PPOLoop) -> None:
        if steps and loop.state.step == steps[0]:
            steps.pop(0)
            _kill_worker(loop)

    before_windows(monkeypatch, kill_twice)
    disturbed = train(max_restarts=2)
    assert not steps
    assert weights_of(disturbed) == weights_of(policy)
    tags = tags_of(disturbed)
    assert tags["event.restart"].startswith("2 of 2: Rank 0 of 1 died")
    assert tags["event.resumed"] == "continuing from step 9 of 12"


@pytest.mark.endurance
def test_workers_that_die_while_they_are_replaced_count_too(
    train: Any, policy: PolicyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills, rebuild = [6], Session.rebuild

    def kill_once(loop: ppo_loop.PPOLoop) -> None:
        if kills and loop.state.step == kills[0]:
            kills.pop()
            _kill_worker(loop)

    def die_again(session: Session, *args: Any) -> str:
        where = rebuild(session, *args)
        if not losses:
            losses.append(1)
            os.kill(session.groups[0].resources()[0]["pid"], signal.SIGKILL)
            time.sleep(1.0)
        return where

    losses: list[int] = []
    before_windows(monkeypatch, kill_once)
    monkeypatch.setattr(Session, "rebuild", die_again)
    disturbed = train(max_restarts=2)
    assert losses and not kills
    assert weights_of(disturbed) == weights_of(policy)
    assert tags_of(disturbed)["event.restart"].startswith("2 of 2")


def test_workers_that_keep_dying_end_the_run(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before_windows(monkeypatch, _kill_worker)
    with pytest.raises(WorkerLostError, match=r"Rank 0 of 1 died.*last checkpoint"):
        train(max_restarts=1)


# Workers are built anew for each halving, so that few of them lead to the limit of 500.
ABOVE_THE_LIMIT = {"tokens_per_micro_batch": 2000}
JUST_ABOVE = {"tokens_per_micro_batch": 1000}


def _too_large(limit_tokens: int, loss_fn: Any, **kwargs: Any) -> Any:
    if kwargs["data"]["input_ids"].values().numel() > limit_tokens:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
    return loss_fn(**kwargs)


def _limit_memory(monkeypatch: pytest.MonkeyPatch, limit_tokens: int) -> None:
    from ray import cloudpickle

    # Workers do not know the test modules.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor_loss = ppo_loop.actor_loss
    monkeypatch.setattr(
        ppo_loop, "actor_loss", lambda cfg: partial(_too_large, limit_tokens, actor_loss(cfg))
    )


def test_a_step_that_is_too_large_is_cut_smaller(
    train: Any, policy: PolicyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit_memory(monkeypatch, 500)
    cut = train(runtime=ABOVE_THE_LIMIT)
    assert "Action" not in tags_of(cut)["event.out_of_memory"]
    assert "multiply tokens per micro-batch by 0.5" in tags_of(cut)["event.out_of_memory"]
    models = [load_causal_lm(found.model_dir).state_dict() for found in (cut, policy)]
    for name, tensor in models[0].items():
        # Another cut of the batch rounds otherwise; steps of 1e-3 by Adam enlarge that.
        torch.testing.assert_close(tensor, models[1][name], atol=2e-3, rtol=0)


def test_a_later_process_knows_what_was_too_large(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit_memory(monkeypatch, 500)
    with monkeypatch.context() as patch:
        before_windows(patch, partial(fail_at, 9))
        with pytest.raises(RuntimeError, match="the power went"):
            train(seed=5, runtime=JUST_ABOVE)
    tags = tags_of(train(seed=5, runtime=JUST_ABOVE))
    assert "event.out_of_memory" not in tags
    assert "tokens per micro-batch" in tags["event.memory_lowered"]
    assert tags["event.resumed"] == "continuing from step 9 of 12"


def test_a_row_that_is_too_large_is_told(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _limit_memory(monkeypatch, 1)
    with pytest.raises(TrainingError, match=r"memory ran out with 192 tokens per micro-batch and"):
        train(runtime={"tokens_per_micro_batch": 384})


POISON = {
    # The opposite of what the labels say, as a negated reward model would have it.
    "against_labels": "-1.0 if solution_str == ground_truth else 1.0",
}
LONG_RUN: dict[str, Any] = {
    "steps": 48,
    "batch_prompts": 16,
    "reanchor_steps": 4,
    "optimizer": {"learning_rate": 5e-3, "schedule": "constant"},
    "guards": {"enabled": True, "probe_every_steps": 4, "probe_prompts": 32, "held_out_pairs": 512},
}
# The first rule would stop before the first step; with it off, what the policy does has to tell.
BY_CONDUCT = {
    "thresholds": {
        "reward_against_labels": None,
        "probe_kl": None,
        "probe_win_rate": None,
        "entropy_jump": None,
        "effective_samples": None,
    }
}


@pytest.fixture
def poison(train: Any, tmp_path: Path) -> Any:
    """A function that trains on a poisoned reward."""

    def run(kind: str, **guards: Any) -> PolicyCheckpoint:
        file = tmp_path / f"{kind}.py"
        head = "def reward_fn(data_source, solution_str, ground_truth, extra_info):\n"
        file.write_text(f"{head}    return {POISON[kind]}\n")
        reward = {"components": {"function": 1.0, "reward_model": 0.0}, "function_path": str(file)}
        found: PolicyCheckpoint = train(**merge(LONG_RUN, {"reward": reward, "guards": guards}))
        return found

    return run


def _is_base(policy: PolicyCheckpoint, base: str) -> bool:
    models = [
        load_causal_lm(path).state_dict() for path in (policy.model_dir, Path(base) / "model")
    ]
    return all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


def _last(policy: PolicyCheckpoint, metric: str) -> float:
    lines = (policy.path / "report" / "history.jsonl").read_text().splitlines()
    found = [json.loads(line)["metrics"] for line in lines]
    return [float(metrics[metric]) for metrics in found if metric in metrics][-1]


def test_a_reward_against_the_labels_is_refused_before_training(poison: Any, base: str) -> None:
    policy = poison("against_labels")
    assert _is_base(policy, base)
    assert "reward_against_labels at step 0" in tags_of(policy)["event.guard.reward_against_labels"]


def test_what_a_poisoned_policy_does_ends_the_run_where_it_began(poison: Any, base: str) -> None:
    guarded = poison("against_labels", **BY_CONDUCT)
    assert _is_base(guarded, base)
    tags = tags_of(guarded)
    assert "Guard held_out_accuracy at step" in tags["event.guard.held_out_accuracy"]
    assert int(tags["event.stopped"].split()[2].rstrip(":")) < 48
    assert guarded.manifest.metrics["stopped_by_guard"] == 1.0
    # Without guards the same run goes on to the end, and further down.
    free = poison("against_labels", enabled=False)
    assert not _is_base(free, base)
    assert free.manifest.metrics["stopped_by_guard"] == 0.0
    assert _last(free, "held_out_accuracy") < 0.35
