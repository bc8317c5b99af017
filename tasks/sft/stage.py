"""Stage sft: behaviour cloning on the preference data, or an instruct model taken as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.artifacts import PolicyCheckpoint, PreferenceDataset
from tasks.context import StageContext
from tasks.data.pairs import iter_pairs, read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.models.tiny import build_tiny_model
from tasks.runtime.rows import Batch, RoleSpec, Row
from tasks.runtime.session import Session, open_session
from tasks.runtime.supervised import CheckpointStore, SupervisedRun, count_steps, train_supervised
from tasks.sft.config import SftConfig

ROLE = "actor"


@task(name="train-base", cache_policy=NO_CACHE)
def train_base(
    ctx: StageContext, cfg: SftConfig, preferences: PreferenceDataset
) -> PolicyCheckpoint:
    """Clone the responses of the training split, or publish the model unchanged when disabled.

    Raises:
        RlhfError: a model or renderer that cannot be used (before training), or training that went
            wrong.
    """
    model_dir = _base_model(ctx, cfg, preferences)
    renderer = Renderer.load(model_dir, cfg.rendering)
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    if not cfg.enabled:
        return ctx.publish(PolicyCheckpoint, partial(_copy_model, model_dir))
    train, left_out = render_pairs(read_pairs(preferences, "train"), renderer)
    validation, _ = render_pairs(read_pairs(preferences, "validation"), renderer)
    steps = count_steps(len(train), cfg.batch_pairs, cfg.epochs, cfg.max_steps)
    ctx.draft.counts |= {"train_pairs": len(train), "steps": steps, **left_out}

    session = open_session(cfg.runtime, ctx.log)
    session.load(RoleSpec(ROLE, "language_model", str(model_dir), cfg.seed, steps, cfg.optimizer))
    _clone(ctx, cfg, session, train, steps)
    ctx.draft.metrics |= _held_out_nll(session, validation)
    return ctx.publish(PolicyCheckpoint, lambda path: session.export(ROLE, path / "model"))


def _clone(
    ctx: StageContext, cfg: SftConfig, session: Session, train: Sequence[RenderedPair], steps: int
) -> None:
    from tasks.runtime.verl_losses import cloning_loss

    session.set_loss(ROLE, cloning_loss)
    run = SupervisedRun(
        session,
        ROLE,
        steps,
        cfg.batch_pairs,
        lambda units: Batch(
            [row for unit in units for row in cloned_rows(train[unit], cfg.responses)]
        ),
        CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep),
        ctx.log,
    )
    lengths = [pair.longest_row_tokens for pair in train]
    sampler = LengthGroupedSampler(lengths, batch_size=cfg.batch_pairs, seed=cfg.seed)
    train_supervised(run, sampler, cfg.checkpoint)


def cloned_rows(pair: RenderedPair, responses: str) -> list[Row]:
    """Return the rows of a pair that are imitated."""
    chosen = Row(pair.prompt_ids, pair.chosen_ids)
    return [chosen] if responses == "chosen" else [chosen, Row(pair.prompt_ids, pair.rejected_ids)]


def _held_out_nll(session: Session, pairs: Sequence[RenderedPair]) -> dict[str, float]:
    """Return the validation loss per response token, in nats."""
    rows = [row for pair in pairs for row in cloned_rows(pair, "both")]
    logprobs = torch.cat(session.logprobs(ROLE, rows))
    return {"validation_nll": -float(logprobs.mean())}


def _base_model(ctx: StageContext, cfg: SftConfig, preferences: PreferenceDataset) -> Path:
    """Return the directory of the model to start from; the tiny one is built from the training
    text."""
    if cfg.model.source != "tiny":
        return Path(ctx.sources["model"].path)
    directory = ctx.checkpoint_dir / "tiny"
    if not directory.exists():
        build_tiny_model(directory, _texts(preferences), cfg.model.tiny, cfg.seed)
    return directory


def _texts(preferences: PreferenceDataset) -> Iterator[str]:
    for pair in iter_pairs(preferences, "train"):
        yield from (message.content for message in pair.prompt)
        yield pair.chosen
        yield pair.rejected


def _copy_model(model_dir: Path, directory: Path) -> None:
    # Weights in pickle files are never loaded, so they are not carried along either.
    shutil.copytree(
        model_dir, directory / "model", ignore=shutil.ignore_patterns("*.bin", "*.pt", ".git*")
    )
