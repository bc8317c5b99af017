"""Stage reward_model: Bradley-Terry on the base model's backbone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.algorithms.reward_losses import (
    PairRegularization,
    bradley_terry_loss,
    pairwise_accuracy,
    split_interleaved,
)
from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardComponent,
    RewardModelCheckpoint,
    write_reward_components,
)
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.roles import Batch, RoleSpec, Row
from tasks.backends.session import Session, open_session
from tasks.backends.supervised import SupervisedRun, count_steps, train_supervised
from tasks.config import RewardModelConfig
from tasks.context import StageContext
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.errors import DataError, RewardError

ROLE = "reward"


@task(name="train-reward-model", cache_policy=NO_CACHE)
def train_reward_model(
    ctx: StageContext,
    cfg: RewardModelConfig,
    preferences: PreferenceDataset,
    base: PolicyCheckpoint,
) -> RewardModelCheckpoint:
    """Fit P(chosen beats rejected) = sigmoid(r_chosen - r_rejected).

    Raises:
        RlhfError: inputs that do not fit together (before training), or training that went wrong.
    """
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    if base.manifest.renderer_fingerprint is not None:
        renderer.check_same(base.manifest.renderer_fingerprint, "the base model")
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    splits = {
        name: _pairs_of(preferences, name, renderer, ctx)
        for name in ("train", "validation", "test")
    }
    train = splits["train"]
    steps = count_steps(len(train), cfg.batch_pairs, cfg.epochs, cfg.max_steps)
    ctx.draft.counts |= {"train_pairs": len(train), "steps": steps}

    session = open_session(cfg.runtime)
    session.load(RoleSpec(ROLE, "value_model", str(base.model_dir), cfg.seed, steps, cfg.optimizer))
    best = _fit(ctx, cfg, session, splits, steps)
    if cfg.select_best:
        ctx.draft.metrics["selected_step"] = float(best.step)
        session.load(
            RoleSpec(ROLE, "value_model", str(best.directory), cfg.seed, trained_head=True)
        )
    mean, std = _score_statistics(session, train)
    ctx.draft.metrics |= _report(session, splits) | {"score_mean": mean, "score_std": std}
    return ctx.publish(RewardModelCheckpoint, partial(_write, session, mean, std))


def pair_rows(pairs: Sequence[RenderedPair]) -> list[Row]:
    """Return interleaved rows: chosen, rejected, chosen, rejected, ..."""
    return [
        Row(pair.prompt_ids, response)
        for pair in pairs
        for response in (pair.chosen_ids, pair.rejected_ids)
    ]


def _pairs_of(
    preferences: PreferenceDataset, split: str, renderer: Renderer, ctx: StageContext
) -> list[RenderedPair]:
    pairs, left_out = render_pairs(read_pairs(preferences, split), renderer)
    for reason, count in left_out.items():
        ctx.draft.counts[f"{split}_{reason}"] = count
    if not pairs:
        raise DataError(
            f"No pair of the {split} split fits the renderer: {left_out}",
            "at least one",
            "raise rendering.max_prompt_tokens or max_response_tokens, or ingest more pairs",
        )
    return pairs


@dataclass
class _Best:
    """The step with the lowest held-out loss so far; kept on disk, so that a resumed run knows
    it."""

    root: Path
    step: int = 0
    loss: float = math.inf

    @property
    def directory(self) -> Path:
        return self.root / f"best-{self.step:08d}"

    def load(self) -> None:
        file = self.root / "best.json"
        if file.exists():
            record = json.loads(file.read_text())
            self.step, self.loss = record["step"], record["loss"]

    def offer(self, step: int, loss: float, session: Session) -> None:
        """Keep the role's weights when the loss is lower; the record names only complete
        exports."""
        if loss >= self.loss:
            return
        previous, self.step, self.loss = self.directory, step, loss
        shutil.rmtree(self.directory, ignore_errors=True)
        session.export(ROLE, self.directory)
        temporary = self.root / "best.json.tmp"
        temporary.write_text(json.dumps({"step": step, "loss": loss}))
        temporary.replace(self.root / "best.json")
        if previous != self.directory:
            shutil.rmtree(previous, ignore_errors=True)


def _fit(
    ctx: StageContext,
    cfg: RewardModelConfig,
    session: Session,
    splits: dict[str, list[RenderedPair]],
    steps: int,
) -> _Best:
    from tasks.backends.verl_losses import pairwise_loss

    regularization = PairRegularization(cfg.label_smoothing, cfg.center_coef)
    session.set_loss(ROLE, partial(pairwise_loss, regularization))
    ctx.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    best = _Best(ctx.checkpoint_dir)
    best.load()

    def evaluate(step: int) -> None:
        if step % cfg.evaluate_every_steps and step != steps:
            return
        held_out = _pair_metrics(session, splits["validation"])
        ctx.log.metrics({f"validation_{name}": value for name, value in held_out.items()}, step)
        if cfg.select_best:
            best.offer(step, held_out["log_loss"], session)

    train = splits["train"]
    run = SupervisedRun(
        session,
        ROLE,
        steps,
        cfg.batch_pairs,
        lambda units: Batch(pair_rows([train[unit] for unit in units]), group_size=2),
        CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep),
        ctx.log,
        evaluate,
    )
    lengths = [pair.longest_row_tokens for pair in train]
    sampler = LengthGroupedSampler(lengths, batch_size=cfg.batch_pairs, seed=cfg.seed)
    train_supervised(run, sampler, cfg.checkpoint)
    return best


def _pair_metrics(session: Session, pairs: Sequence[RenderedPair]) -> dict[str, float]:
    """Return accuracy (ties count half), share of ties, and log loss in nats."""
    chosen, rejected = split_interleaved(session.scores(ROLE, pair_rows(pairs)))
    loss, _ = bradley_terry_loss(chosen, rejected, total_pairs=float(len(pairs)))
    counts = pairwise_accuracy(chosen, rejected)
    return {
        "accuracy": float(counts.accuracy),
        "tie_share": float(counts.tie_sum / counts.n_pairs),
        "log_loss": float(loss),
    }


def _report(session: Session, splits: dict[str, list[RenderedPair]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for split in ("validation", "test"):
        for name, value in _pair_metrics(session, splits[split]).items():
            metrics[f"{split}_{name}"] = value
    n = len(splits["test"])
    accuracy = metrics["test_accuracy"]
    # Normal approximation of a proportion, 95 %.
    metrics["test_accuracy_ci95"] = 1.96 * math.sqrt(accuracy * (1.0 - accuracy) / n)
    return metrics


def _score_statistics(session: Session, train: Sequence[RenderedPair]) -> tuple[float, float]:
    """Return mean and standard deviation of the scores of all training responses."""
    scores = session.scores(ROLE, pair_rows(train))
    mean, std = float(scores.mean()), float(scores.std())
    # Below this the spread is rounding noise of fp32 around the mean.
    if not std > 1e-6 * max(1.0, abs(mean)):
        raise RewardError(
            f"The reward model gives every training response the score {mean}",
            "scores that differ",
            "train longer, raise the learning rate, or look at the data",
        )
    return mean, std


def _write(session: Session, mean: float, std: float, directory: Path) -> None:
    member = directory / "members" / "preference-0"
    session.export(ROLE, member)
    write_reward_components(directory, [RewardComponent("preference", (member,), mean, std)])
