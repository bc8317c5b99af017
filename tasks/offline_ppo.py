"""Stage offline_ppo: the policy improves on a fixed set of responses, none of them its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from tasks.artifacts import PolicyCheckpoint, PreferenceDataset, RewardModelCheckpoint
from tasks.backends.behavior import behavior_logprobs, reference_logprobs
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.ppo_loop import ACTOR, CRITIC, PPOLoop
from tasks.backends.rewards import (
    ScoreStatistics,
    function_scores,
    load_reward_function,
    rewards_of,
)
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session, open_session
from tasks.backends.trajectories import Trajectories, prompt_groups, response_rows
from tasks.config import OfflinePPOConfig
from tasks.context import StageContext
from tasks.data.hh import Pair
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.data.token_columns import TokenColumns, write_token_columns
from tasks.errors import DataError

REWARD = "reward"


@task(name="train-policy", cache_policy=NO_CACHE)
def train_policy(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    preferences: PreferenceDataset,
    reward_model: RewardModelCheckpoint,
    base: PolicyCheckpoint,
) -> PolicyCheckpoint:
    """Train the policy with re-anchored, importance-weighted PPO on the training split.

    Raises:
        RlhfError: inputs that do not fit together (before training), or training that went wrong.
    """
    renderer = _same_renderer(cfg, reward_model, base)
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    if "function" in cfg.reward.components:
        load_reward_function(str(cfg.reward.function_path), cfg.reward.function_name)
    pairs = read_pairs(preferences, "train")
    rendered, left_out = render_pairs(pairs, renderer)
    if not rendered:
        raise DataError(
            f"No training pair fits the renderer: {left_out}", "some", "raise rendering limits"
        )
    ctx.draft.counts |= {"train_pairs": len(rendered), "steps": cfg.steps, **left_out}

    session = open_session(cfg.runtime)
    kept = {pair.pair_id for pair in rendered}
    data = _collect(ctx, cfg, session, rendered, [pair for pair in pairs if pair.pair_id in kept])
    session.drop()
    session.load(*_trained_roles(cfg, reward_model, base))
    loop = PPOLoop(
        session, cfg, data, CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep), ctx.log
    )
    loop.run()
    ctx.draft.metrics |= _drift(session, data)
    return ctx.publish(PolicyCheckpoint, partial(_write, session, data, ctx.fingerprint))


def _same_renderer(
    cfg: OfflinePPOConfig, reward_model: RewardModelCheckpoint, base: PolicyCheckpoint
) -> Renderer:
    """Return the policy's renderer, having refused a reward model trained with another one."""
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    for what, artifact in (("the base model", base), ("the reward model", reward_model)):
        if artifact.manifest.renderer_fingerprint is not None:
            renderer.check_same(artifact.manifest.renderer_fingerprint, what)
    return renderer


def _trained_roles(
    cfg: OfflinePPOConfig, reward_model: RewardModelCheckpoint, base: PolicyCheckpoint
) -> list[RoleSpec]:
    actor = RoleSpec(
        ACTOR, "language_model", str(base.model_dir), cfg.seed, cfg.steps, cfg.optimizer
    )
    if cfg.advantage.estimator != "gae":
        return [actor]
    critic = RoleSpec(
        CRITIC,
        "value_model",
        str(reward_model.model_dir),
        cfg.seed,
        cfg.steps + cfg.critic.warmup_steps,
        cfg.critic.optimizer,
    )
    return [actor, critic]


def _collect(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    session: Session,
    rendered: Sequence[RenderedPair],
    pairs: Sequence[Pair],
) -> Trajectories:
    """Compute, or read back, all that is known of the stored responses before training."""
    rows, groups = response_rows(rendered), prompt_groups(rendered)
    group_ids = torch.zeros(len(rows), dtype=torch.long)
    for group, members in enumerate(groups):
        group_ids[members] = group
    ref = reference_logprobs(ctx, cfg, session, rows)
    behavior = behavior_logprobs(ctx, cfg, session, rendered, ref)
    reward_model = ctx.inputs["reward_model"]
    assert isinstance(reward_model, RewardModelCheckpoint)
    saved = reward_model.statistics
    rewards = rewards_of(
        cfg.reward,
        _components(cfg, session, reward_model, rows, pairs),
        ScoreStatistics(saved["mean"], saved["std"]),
        group_ids,
    )
    right = rewards[0::2] > rewards[1::2]
    ctx.draft.metrics["reward_agrees_with_label"] = float(right.float().mean())
    return Trajectories(rows, groups, rewards, behavior, ref)


def _components(
    cfg: OfflinePPOConfig,
    session: Session,
    reward_model: RewardModelCheckpoint,
    rows: Sequence[Row],
    pairs: Sequence[Pair],
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    wanted = cfg.reward.components
    if "reward_model" in wanted:
        session.load(
            RoleSpec(REWARD, "value_model", str(reward_model.model_dir), trained_head=True)
        )
        found["reward_model"] = session.scores(REWARD, rows)
    if "labels" in wanted:
        found["labels"] = torch.tensor([1.0, -1.0]).repeat(len(pairs))
    if "function" in wanted:
        function = load_reward_function(str(cfg.reward.function_path), cfg.reward.function_name)
        found["function"] = function_scores(function, pairs)
    return found


def _drift(session: Session, data: Trajectories) -> dict[str, float]:
    """Return how far the log-probabilities of good and bad responses moved, in nats per
    response."""
    now = session.logprobs(ACTOR, data.rows)
    moved = torch.stack([(a - b).sum() for a, b in zip(now, data.ref_logprobs, strict=True)])
    return {
        "chosen_logprob_drift": float(moved[0::2].mean()),
        "rejected_logprob_drift": float(moved[1::2].mean()),
    }


def _write(session: Session, data: Trajectories, key: str, directory: Path) -> None:
    session.export(ACTOR, directory / "model")
    columns = TokenColumns(
        [row.prompt_ids for row in data.rows],
        [row.response_ids for row in data.rows],
        {
            "behavior_logprobs": list(data.behavior_logprobs),
            "ref_logprobs": list(data.ref_logprobs),
            "reward": [
                reward.expand(len(row.response_ids))
                for reward, row in zip(data.rewards, data.rows, strict=True)
            ],
        },
    )
    write_token_columns(directory / "trajectories.parquet", columns, key)
