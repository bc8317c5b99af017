"""Training of one member of a reward model: Bradley-Terry over verl workers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tasks.algorithms.label_noise import fitted_log_loss, noisy_log_loss
from tasks.algorithms.reward_losses import (
    PairRegularization,
    bradley_terry_loss,
    pairwise_accuracy,
    split_interleaved,
)
from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.frozen_backbone import FrozenStates, fit_head
from tasks.backends.labelled_pairs import LabelledPairs
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session
from tasks.backends.supervised import SupervisedRun, count_steps, train_supervised
from tasks.backends.trajectories import response_rows
from tasks.config import RewardModelConfig
from tasks.context import RunLog
from tasks.data.rendering import RenderedPair
from tasks.models.export import merge_reward_adapter, write_reward_model

ROLE = "reward"
_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class MemberTrainer:
    """Trains members on one base model.

    Args:
        session: workers.
        cfg: how to train.
        base_dir: backbone of every member.
        work_dir: where each member keeps its checkpoints and its result.
        log: where to report.
    """

    session: Session
    cfg: RewardModelConfig
    base_dir: Path
    work_dir: Path
    log: RunLog

    def fit(
        self, name: str, seed: int, train: LabelledPairs, validation: Sequence[RenderedPair]
    ) -> Path:
        """Train a member, or take it as it is when an earlier attempt finished it.

        Args:
            name: of the member, unique in the run; prefix of its metrics.
            seed: of the head, an adapter, and the order of the pairs.
            train: pairs to learn from.
            validation: pairs that choose the step.

        Returns:
            Its model, in transformers format; with an adapter, that lies in ``adapter`` beside it.
        """
        own = self.work_dir / name
        result = own / "model"
        if result.is_dir():
            return result
        own.mkdir(parents=True, exist_ok=True)
        cfg = self.cfg
        if cfg.freeze_backbone:
            self._fit_head(name, seed, train, validation)
            return result
        steps = count_steps(len(train.pairs), cfg.batch_pairs, cfg.epochs, cfg.max_steps)
        self.session.load(
            RoleSpec(
                ROLE, "value_model", str(self.base_dir), seed, steps, cfg.optimizer, lora=cfg.lora
            )
        )
        best = self._train(name, seed, train, validation, steps)
        exported = own / "exported"
        if cfg.held_out.select_best:
            exported = best.directory
        else:
            self.session.export(ROLE, exported)
        self._finish(exported, own)
        return result

    def _fit_head(
        self, name: str, seed: int, train: LabelledPairs, validation: Sequence[RenderedPair]
    ) -> None:
        own = self.work_dir / name
        cached = FrozenStates(self.session, self.base_dir, self.work_dir)
        states = cached.of(train.pairs), cached.of(validation)
        head = fit_head(self.cfg, seed, train, states)
        temporary = own / "exported"
        shutil.rmtree(temporary, ignore_errors=True)
        write_reward_model(self.base_dir, head.weight, temporary)
        if self.cfg.held_out.select_best:
            BestStep(own, head.step, head.loss).record()
        temporary.rename(own / "model")

    def selected_step(self, name: str) -> int | None:
        """Return the step whose weights a finished member has; None where it is the last."""
        best = BestStep(self.work_dir / name)
        best.load()
        return best.step or None

    def _finish(self, exported: Path, own: Path) -> None:
        """Give the result its name only when it is complete."""
        result = own / "model"
        if not (exported / _ADAPTER_CONFIG).exists():
            exported.rename(result)
            return
        merged = own / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        merge_reward_adapter(self.base_dir, exported, merged)
        shutil.rmtree(own / "adapter", ignore_errors=True)
        shutil.copytree(exported, own / "adapter")
        merged.rename(result)

    def _train(
        self,
        name: str,
        seed: int,
        train: LabelledPairs,
        validation: Sequence[RenderedPair],
        steps: int,
    ) -> BestStep:
        from tasks.backends.verl_losses import pairwise_loss

        cfg, held_out = self.cfg, self.cfg.held_out
        terms = PairRegularization(cfg.loss.label_smoothing, cfg.loss.center_coef)
        self.session.set_loss(ROLE, partial(pairwise_loss, terms))
        best = BestStep(self.work_dir / name)
        best.load()

        def look(step: int) -> bool:
            if step % held_out.evaluate_every_steps and step != steps:
                return False
            found = pair_metrics(self.session, ROLE, validation, cfg.noise.flip_rate)
            self.log.metrics({f"{name}/validation_{key}": v for key, v in found.items()}, step)
            if held_out.select_best:
                # Wrong labels among the held-out pairs would punish a model for being sure, and the
                # unit of its scores is fitted later anyway.
                best.offer(step, found["fitted_log_loss"], self.session)
            patience = held_out.stop_after
            return patience is not None and (
                step - best.step >= patience * held_out.evaluate_every_steps
            )

        run = SupervisedRun(
            self.session,
            ROLE,
            steps,
            cfg.batch_pairs,
            train.batch,
            CheckpointStore(self.work_dir / name, cfg.checkpoint.keep),
            self.log,
            look,
            name,
        )
        lengths = [pair.longest_row_tokens for pair in train.pairs]
        sampler = LengthGroupedSampler(lengths, batch_size=cfg.batch_pairs, seed=seed)
        train_supervised(run, sampler, cfg.checkpoint)
        return best


@dataclass
class BestStep:
    """The step with the lowest held-out loss so far; kept on disk, so that a resumed run knows
    it."""

    root: Path
    step: int = 0
    loss: float = field(default=math.inf)

    @property
    def directory(self) -> Path:
        """The model of that step."""
        return self.root / f"best-{self.step:08d}"

    def load(self) -> None:
        """Read what an earlier attempt found."""
        file = self.root / "best.json"
        if file.exists():
            record = json.loads(file.read_text())
            self.step, self.loss = record["step"], record["loss"]

    def record(self) -> None:
        """Write down the step."""
        temporary = self.root / "best.json.tmp"
        temporary.write_text(json.dumps({"step": self.step, "loss": self.loss}))
        temporary.replace(self.root / "best.json")

    def offer(self, step: int, loss: float, session: Session) -> None:
        """Keep the role's weights when the loss is lower; the record names only complete
        exports."""
        if loss >= self.loss:
            return
        previous, self.step, self.loss = self.directory, step, loss
        shutil.rmtree(self.directory, ignore_errors=True)
        session.export(ROLE, self.directory)
        self.record()
        if previous != self.directory:
            shutil.rmtree(previous, ignore_errors=True)


def pair_metrics(
    session: Session, role: str, pairs: Sequence[RenderedPair], flip_rate: float
) -> dict[str, float]:
    """Return accuracy (ties count half), share of ties, and log loss in nats: plain, allowing for
    wrong labels, and that at the scale that suits the scores best."""
    rows: list[Row] = response_rows(pairs)
    chosen, rejected = split_interleaved(session.scores(role, rows))
    loss, _ = bradley_terry_loss(chosen, rejected, total_pairs=float(len(pairs)))
    counts = pairwise_accuracy(chosen, rejected)
    return {
        "accuracy": float(counts.accuracy),
        "tie_share": float(counts.tie_sum / counts.n_pairs),
        "log_loss": float(loss),
        "noisy_log_loss": noisy_log_loss(chosen - rejected, flip_rate=flip_rate),
        "fitted_log_loss": fitted_log_loss(chosen - rejected, flip_rate=flip_rate),
    }
