"""The behaviour policy: whatever wrote the stored responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.context import StageContext
from tasks.data.hh import Pair
from tasks.data.pairs import fold_of
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.runtime.rows import (
    NUMERIC_FIELDS,
    REFERENCE,
    Batch,
    Responses,
    RoleSpec,
    Row,
    cached_logprobs,
    response_rows,
)
from tasks.runtime.session import Session
from tasks.runtime.supervised import CheckpointStore, SupervisedRun, count_steps, train_supervised

CLONE = "behavior"
FOLDS = 2


def reference_logprobs(
    ctx: StageContext, cfg: OfflinePPOConfig, session: Session, rows: Sequence[Row]
) -> list[Tensor]:
    """Return the base model's log-probabilities of all responses, computed once per base and
    dataset."""

    def compute() -> list[Tensor]:
        session.load(RoleSpec(REFERENCE, "language_model", _base_dir(ctx)))
        return session.logprobs(REFERENCE, rows)

    return cached_logprobs(
        ctx.workspace.cache_dir / "logprobs", rows, model_identity(ctx, cfg, "reference"), compute
    )


def behavior_logprobs(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    session: Session,
    train: Responses,
    ref: list[Tensor],
) -> list[Tensor]:
    """Return the behaviour policy's log-probabilities of all responses.

    Args:
        ctx: the run.
        cfg: ``behavior.policy`` says which policy.
        session: workers.
        train: the stored responses.
        ref: what the base model says, which is the answer for ``reference``.
    """
    if cfg.behavior.policy == "reference":
        return ref
    if cfg.behavior.policy == "logged":
        return logged_logprobs(train)
    pairs, rows = train.rendered, train.rows
    recipe = cfg.behavior.model_dump_json() + str(cfg.seed)
    identity = [*model_identity(ctx, cfg, "cloned"), recipe]
    return cached_logprobs(
        ctx.workspace.cache_dir / "logprobs",
        rows,
        identity,
        lambda: _cross_fit(ctx, cfg, session, pairs, rows),
    )


def check_logged(pairs: Sequence[Pair]) -> None:
    """Refuse pairs whose source does not say how likely their responses were.

    Raises:
        DataError: names the first such pair and how many there are.
    """
    missing = [pair for pair in pairs if pair.logged is None]
    if missing:
        first = missing[0]
        raise DataError(
            f"{len(missing)} of {len(pairs)} training pairs have no logged log-probabilities, the "
            f"first is {first.source_file}, line {first.source_line}",
            "chosen_logprob and rejected_logprob in every row of the source",
            "add them, or set offline_ppo.behavior.policy to reference or cloned",
        )


def logged_logprobs(train: Responses) -> list[Tensor]:
    """Return what the source says of its responses, the total of each spread evenly over its
    tokens.

    Weights of level ``sequence`` and ``geometric`` depend on the total only, so the spread changes
    nothing; ``token`` is refused by the configuration.
    """
    check_logged(train.pairs)
    totals = [total for pair in train.pairs for total in pair.logged or ()]
    return [
        torch.full((len(row.response_ids),), total / len(row.response_ids))
        for total, row in zip(totals, train.rows, strict=True)
    ]


def _cross_fit(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    session: Session,
    pairs: Sequence[RenderedPair],
    rows: Sequence[Row],
) -> list[Tensor]:
    """Score each fold with a policy cloned on the other one: a memorised response would look too
    likely."""
    scored: list[Tensor] = [Tensor()] * len(rows)
    folds = [fold_of(pair.prompt_id, FOLDS) for pair in pairs]
    for fold in range(FOLDS):
        seen = [pair for pair, own in zip(pairs, folds, strict=True) if own != fold]
        held_out = [index for index, own in enumerate(folds) if own == fold]
        if not seen or not held_out:
            raise DataError(
                f"{len(pairs)} pairs leave a fold of the behaviour policy empty",
                "prompts in both folds",
                "ingest more prompts or set offline_ppo.behavior.policy: reference",
            )
        _clone(ctx, cfg, session, seen, fold)
        indices = [2 * index + side for index in held_out for side in (0, 1)]
        logprobs = session.logprobs(CLONE, [rows[i] for i in indices])
        for index, values in zip(indices, logprobs, strict=True):
            scored[index] = values
    return scored


def _clone(
    ctx: StageContext,
    cfg: OfflinePPOConfig,
    session: Session,
    pairs: Sequence[RenderedPair],
    fold: int,
) -> None:
    from tasks.runtime.verl_losses import cloning_loss

    behavior = cfg.behavior
    steps = count_steps(len(pairs), behavior.clone_batch_pairs, behavior.clone_epochs, None)
    spec = RoleSpec(
        CLONE, "language_model", _base_dir(ctx), cfg.seed, steps, behavior.clone_optimizer
    )
    session.load(spec)
    session.set_loss(CLONE, cloning_loss)
    run = SupervisedRun(
        session,
        CLONE,
        steps,
        behavior.clone_batch_pairs,
        lambda units: Batch(response_rows([pairs[unit] for unit in units])),
        CheckpointStore(ctx.checkpoint_dir / f"behavior-{fold}", cfg.checkpoint.keep),
        ctx.log,
    )
    lengths = [pair.longest_row_tokens for pair in pairs]
    sampler = LengthGroupedSampler(
        lengths, batch_size=behavior.clone_batch_pairs, seed=cfg.seed + fold
    )
    train_supervised(run, sampler, cfg.checkpoint)


def _base_dir(ctx: StageContext) -> str:
    return str(ctx.inputs["base"].path / "model")


def model_identity(ctx: StageContext, cfg: OfflinePPOConfig, policy: str) -> list[str]:
    """Return the fingerprints of everything that log-probabilities under a policy depend on."""
    runtime = cfg.runtime.model_dump_json(include=NUMERIC_FIELDS)
    return [
        policy,
        ctx.inputs["preferences"].content_hash,
        ctx.inputs["base"].content_hash,
        str(ctx.draft.renderer_fingerprint),
        runtime,
    ]
