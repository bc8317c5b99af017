"""Stage offline_ppo: the policy improves on a fixed set of responses, none of them its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from tasks.algorithms.kl import kl_probe_estimate
from tasks.algorithms.statistics import Bootstrap
from tasks.artifacts import PolicyCheckpoint, PreferenceDataset, RewardModelCheckpoint
from tasks.config.shared import GenerationConfig
from tasks.context import StageContext
from tasks.data.columns import TokenColumns, write_token_columns
from tasks.data.hh import Pair
from tasks.data.rendering import Renderer
from tasks.errors import DataError
from tasks.offline_ppo.batches import check_subsets
from tasks.offline_ppo.behavior import CLONE, check_logged
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.offline_ppo.data import PolicyData
from tasks.offline_ppo.loop import PPOLoop
from tasks.offline_ppo.probe import AnswerSampler, PolicyProbe, RewardJudge
from tasks.offline_ppo.report import (
    GuardEvent,
    PolicyReport,
    write_policy_report,
)
from tasks.offline_ppo.rewards import ComponentScorer, check_components, find_weights
from tasks.report.pairs import HeldOut, ResponsePair, compare_pairs, prompt_text
from tasks.runtime.rows import (
    ACTOR,
    CRITIC,
    REFERENCE,
    Responses,
    RoleSpec,
    Row,
    Trajectories,
    mask_of,
    one_pair_per_prompt,
    pad,
)
from tasks.runtime.session import Session, open_session
from tasks.runtime.supervised import CheckpointStore

# What the trained policy says to held-out prompts, beside the base, and the report about it.


def compare_with_base(
    sampler: AnswerSampler, pairs: Sequence[Pair], base_dir: Path, scratch: Path
) -> HeldOut | None:
    """Return the policy against the base on the prompts of pairs; None where the reward is not
    defined on what they say, because it is made of labels alone.

    Args:
        base_dir: the model that training started from.
        scratch: directory for the exported policy.
    """
    session = sampler.judge.scorer.session
    policy = sampler.sample_actor(scratch, pairs)
    base = sampler.sample(base_dir, pairs)
    if policy.rewards is None or base.rewards is None:
        return None
    if REFERENCE not in session.specs:
        session.load(RoleSpec(REFERENCE, "language_model", str(base_dir)))
    now, ref = (pad(session.logprobs(role, policy.rows)) for role in (ACTOR, REFERENCE))
    compared = [
        ResponsePair(
            prompt_id=pair.prompt_id,
            prompt=prompt_text(pair.prompt),
            base_response=base.texts[i],
            policy_response=policy.texts[i],
            base_score=float(base.rewards[i]),
            policy_score=float(policy.rewards[i]),
            base_tokens=len(base.rows[i].response_ids),
            policy_tokens=len(policy.rows[i].response_ids),
            subset=pair.subset,
        )
        for i, pair in enumerate(pairs)
    ]
    return compare_pairs(
        compared,
        "the reward that it was trained on",
        Bootstrap(seed=sampler.seed),
        kl_probe_estimate(now, ref, mask_of(policy.rows)),
    )


def report_of(loop: PPOLoop, held_out: HeldOut) -> PolicyReport:
    """Return the report of a finished run."""
    weights = list(loop.recent_weights)
    return PolicyReport(
        held_out,
        loop.history.read(),
        [GuardEvent.of(event) for event in loop.state.events],
        torch.cat(weights) if weights else None,
        _bounds(loop.cfg),
        loop.clock.shares(),
        loop.cfg.seed,
    )


def _bounds(cfg: OfflinePPOConfig) -> dict[str, float]:
    """Return the thresholds that a plot can show: of rules on a metric's plain value."""
    conditions = [rule.condition for rule in cfg.guards.to_rules()]
    return {c.metric: c.threshold for c in conditions if c.reading == "value"}


# What learns from log-probabilities, one after the other; critic, reference and reward models go
# elsewhere, so that a step of the critic is taken at the same time as one of the actor.
_ALONE = (ACTOR, CLONE)


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
    check_components(cfg.reward, reward_model)
    train = Responses.of(preferences, "train", renderer)
    ctx.draft.counts |= {"train_pairs": len(train.pairs), "steps": cfg.steps, **train.left_out}
    check_subsets(cfg, {pair.subset for pair in train.pairs})
    if cfg.behavior.policy == "logged":
        check_logged(train.pairs)

    session = open_session(cfg.runtime, ctx.log, alone=_ALONE if cfg.worker_groups > 1 else ())
    scorer = ComponentScorer(cfg.reward, session, reward_model, ctx.workspace.cache_dir / "scores")
    weights = dict(cfg.reward.components)
    if cfg.reward.search is not None:
        weights = _search_weights(ctx, scorer, Responses.of(preferences, "validation", renderer))
    data = PolicyData(ctx, cfg, renderer, scorer, weights).collect(train)
    ctx.draft.metrics |= {f"weight_{name}": weight for name, weight in weights.items()}
    session.drop()
    session.load(*_trained_roles(cfg, reward_model, base))
    judge = RewardJudge(scorer, weights, renderer)
    held_out = _held_out(ctx, preferences, renderer)
    facts = {} if held_out is None else judge.agreement(held_out, cfg.guards.held_out_pairs)
    loop = PPOLoop(
        session,
        cfg,
        data,
        CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep),
        ctx.log,
        probe=None if held_out is None else _probe(ctx, cfg, held_out, judge),
        facts=facts,
    )
    loop.run()
    ctx.draft.metrics |= _drift(session, data) | loop.clock.shares() | facts
    ctx.draft.metrics["stopped_by_guard"] = float(bool(loop.state.stopped))
    ctx.draft.counts["guard_firings"] = len(loop.state.events)
    report = _report(ctx, cfg, loop, judge, preferences)
    return ctx.publish(PolicyCheckpoint, partial(_write, ctx, loop, report))


def _probe(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    held_out: Responses,
    judge: RewardJudge,
) -> PolicyProbe:
    """Return a probe on held-out prompts."""
    return PolicyProbe(
        judge.scorer.session,
        _sampler(cfg, judge, cfg.guards.probe_max_new_tokens),
        one_pair_per_prompt(held_out.pairs, cfg.guards.probe_prompts),
        held_out.first(cfg.guards.held_out_pairs),
        ctx.inputs["base"].path / "model",
        ctx.checkpoint_dir,
    )


def _held_out(
    ctx: StageContext, preferences: PreferenceDataset, renderer: Renderer
) -> Responses | None:
    """Return the validation split; None, with an event, where it is empty."""
    try:
        return Responses.of(preferences, "validation", renderer)
    except DataError as error:
        ctx.log.event("no_probe", f"the policy is not probed while it trains: {error}")
        return None


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


def _search_weights(
    ctx: StageContext, scorer: ComponentScorer, held_out: Responses
) -> dict[str, float]:
    values = scorer.score(held_out.pairs, held_out.rows).values
    weights, best = find_weights(scorer.cfg, values, ctx.log)
    ctx.draft.metrics |= {
        "search_validation_log_loss": best.log_loss,
        "search_validation_accuracy": best.accuracy,
    }
    return weights


def _drift(session: Session, data: Trajectories) -> dict[str, float]:
    """Return how far the log-probabilities of good and bad responses moved, in nats per
    response."""
    stored = data.n_stored
    now = session.logprobs(ACTOR, data.rows[:stored])
    ref = data.ref_logprobs[:stored]
    moved = torch.stack([(a - b).sum() for a, b in zip(now, ref, strict=True)])
    return {
        "chosen_logprob_drift": float(moved[0::2].mean()),
        "rejected_logprob_drift": float(moved[1::2].mean()),
    }


def _report(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    loop: PPOLoop,
    judge: RewardJudge,
    preferences: PreferenceDataset,
) -> PolicyReport | None:
    """Compare the policy with the base on test prompts, which nothing was chosen on."""
    if not cfg.report.prompts:
        return None
    renderer = judge.renderer
    try:
        held_out = Responses.of(preferences, "test", renderer)
    except DataError as error:
        ctx.log.event("no_report", f"the policy is not compared with the base: {error}")
        return None
    compared = compare_with_base(
        _sampler(cfg, judge, cfg.report.max_new_tokens),
        one_pair_per_prompt(held_out.pairs, cfg.report.prompts),
        ctx.inputs["base"].path / "model",
        ctx.checkpoint_dir / ".final-model",
    )
    if compared is None:
        ctx.log.event("no_report", "labels alone do not tell what the policy's answers are worth")
        return None
    report = report_of(loop, compared)
    ctx.draft.metrics |= report.metrics()
    return report


def _sampler(cfg: OfflinePPOConfig, judge: RewardJudge, max_new_tokens: int) -> AnswerSampler:
    """Return how models answer: at temperature 1, for which a KL is unbiased."""
    generation = GenerationConfig(temperature=1.0, max_new_tokens=max_new_tokens, batch_size=512)
    return AnswerSampler(judge, generation, cfg.seed)


def _write(ctx: StageContext, loop: PPOLoop, report: PolicyReport | None, directory: Path) -> None:
    data, key = loop.data, ctx.fingerprint
    loop.session.export(ACTOR, directory / "model")
    if report is not None:
        for file in write_policy_report(report, directory / "report"):
            ctx.log.file(file, "report")
    of_responses = {"reward": data.rewards}
    of_responses |= {f"component.{name}": v for name, v in data.components.values.items()}
    if data.components.disagreement is not None:
        of_responses["reward_disagreement"] = data.components.disagreement
    columns = TokenColumns(
        [row.prompt_ids for row in data.rows],
        [row.response_ids for row in data.rows],
        {
            "behavior_logprobs": list(data.behavior_logprobs),
            "ref_logprobs": list(data.ref_logprobs),
            **{name: _on_tokens(values, data.rows) for name, values in of_responses.items()},
        },
    )
    write_token_columns(directory / "trajectories.parquet", columns, key)


def _on_tokens(values: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """Repeat what belongs to a whole response at each of its tokens."""
    return [value.expand(len(row.response_ids)) for value, row in zip(values, rows, strict=True)]
