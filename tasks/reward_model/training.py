"""Training of one member of a reward model: Bradley-Terry over verl workers."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from tasks.algorithms.reward_losses import (
    bradley_terry_loss,
    fit_noisy_scale,
    fitted_log_loss,
    label_trust,
    noisy_log_loss,
    pairwise_accuracy,
    split_interleaved,
)
from tasks.algorithms.samplers import GroupSampler, LengthGroupedSampler
from tasks.artifacts import appearing, write_whole
from tasks.config.shared import OptimizerConfig
from tasks.context import RunLog
from tasks.data.pairs import fold_of
from tasks.data.rendering import RenderedPair
from tasks.errors import DataError
from tasks.models.loading import merge_reward_adapter, write_reward_model
from tasks.reward_model.config import RewardModelConfig
from tasks.runtime.rows import Batch, RoleSpec, Row, response_rows
from tasks.runtime.session import Session
from tasks.runtime.supervised import CheckpointStore, SupervisedRun, count_steps, train_supervised

# Pairs to learn a reward from, with what is known of each label.


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs to learn from.

    Args:
        pairs: P pairs.
        weights: (P,) above 0, or None for all 1.
        trust: (P,) probability that the label is right, or None for 1.
        margins: (P,) rated margin, NaN where unknown, or None.
    """

    pairs: Sequence[RenderedPair]
    weights: Tensor | None = None
    trust: Tensor | None = None
    margins: Tensor | None = None

    def subset(self, indices: Sequence[int]) -> LabelledPairs:
        """Return the pairs at these indices."""
        chosen = list(indices)
        return LabelledPairs(
            [self.pairs[i] for i in chosen],
            *(
                None if column is None else column[chosen]
                for column in (self.weights, self.trust, self.margins)
            ),
        )

    def batch(self, units: Sequence[int]) -> Batch:
        """Return interleaved rows of these pairs, with what is known of each."""
        part = self.subset(units)
        known = {"weight": part.weights, "trust": part.trust, "margin": part.margins}
        columns = {
            name: [value.float().reshape(1) for value in values for _ in range(2)]
            for name, values in known.items()
            if values is not None
        }
        scalars = {} if part.weights is None else {"total_weight": float(part.weights.sum())}
        return Batch(response_rows(part.pairs), columns, group_size=2, scalars=scalars)


def rated_margins(margins: Sequence[float | None], scale: float) -> Tensor | None:
    """Return scaled margins, (P,), NaN where unknown; None where they are off or none is known."""
    if scale == 0.0 or all(margin is None for margin in margins):
        return None
    return torch.tensor([math.nan if m is None else scale * m for m in margins])


# A value head on a backbone that does not learn: its states are computed once and kept.

_ROLE = "backbone"


@dataclass(frozen=True)
class Head:
    """A linear score: ``states @ weight``; a bias would cancel in every pair.

    Args:
        weight: (H,) fp32.
        step: optimizer step that it was taken from.
        loss: its held-out loss.
    """

    weight: Tensor
    step: int
    loss: float


@dataclass(frozen=True)
class FrozenStates:
    """Last-token states of responses, computed once per run and base and kept on disk.

    Args:
        session: workers.
        base_dir: the backbone.
        cache_dir: where states are kept.
    """

    session: Session
    base_dir: Path
    cache_dir: Path

    def of(self, pairs: Sequence[RenderedPair]) -> Tensor:
        """Return (2P, H) fp32, chosen, rejected, chosen, ..."""
        key = hashlib.sha256("|".join(pair.pair_id for pair in pairs).encode()).hexdigest()[:16]
        file = self.cache_dir / f"states-{key}.safetensors"
        if not file.exists():
            self.session.load(RoleSpec(_ROLE, "value_model", str(self.base_dir)))
            states = self.session.last_states(_ROLE, response_rows(pairs)).float()
            with appearing(file) as temporary:
                save_file({"states": states.contiguous()}, temporary)
        kept: Tensor = load_file(file)["states"]
        return kept


def fit_head(
    cfg: RewardModelConfig, seed: int, train: LabelledPairs, states: tuple[Tensor, Tensor]
) -> Head:
    """Fit the head on pairs whose states are known.

    Args:
        cfg: steps, batches, loss and optimizer, as for training through workers.
        seed: of the start and of the order of the pairs.
        train: P pairs.
        states: (2P, H) of their responses, and (2V, H) of the validation responses.

    Returns:
        The head with the lowest held-out loss, or the last one.
    """
    known, held_out = states
    steps = count_steps(len(train.pairs), cfg.batch_pairs, cfg.epochs, cfg.max_steps)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(known.shape[1], generator=generator) / math.sqrt(known.shape[1])
    weight.requires_grad_()
    optimizer, schedule = _optimizer(weight, cfg.optimizer, steps)
    sampler = GroupSampler(len(train.pairs), seed=seed)
    best = last = Head(weight.detach().clone(), steps, math.inf)
    for step in range(1, steps + 1):
        units = sampler.next_batch(cfg.batch_pairs)
        loss = _loss(cfg, train.subset(units), known.view(-1, 2, known.shape[1])[units] @ weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([weight], cfg.optimizer.clip_grad_norm)
        optimizer.step()
        schedule.step()
        if step % cfg.held_out.evaluate_every_steps and step != steps:
            continue
        margins = (held_out.view(-1, 2, held_out.shape[1]) @ weight.detach()).diff(dim=1)[:, 0]
        found = fitted_log_loss(-margins, flip_rate=cfg.noise.flip_rate)
        last = Head(weight.detach().clone(), step, found)
        if found < best.loss:
            best = last
        elif _is_late(cfg, step, best.step):
            break
    return best if cfg.held_out.select_best else last


def _is_late(cfg: RewardModelConfig, step: int, best_step: int) -> bool:
    patience = cfg.held_out.stop_after
    return patience is not None and (
        step - best_step >= patience * cfg.held_out.evaluate_every_steps
    )


def _loss(cfg: RewardModelConfig, part: LabelledPairs, scores: Tensor) -> Tensor:
    """Return the loss of (B, 2) scores, chosen first."""
    total = len(part.pairs) if part.weights is None else float(part.weights.sum())
    loss, _ = bradley_terry_loss(
        scores[:, 0],
        scores[:, 1],
        total_pairs=total,
        weights=part.weights,
        margins=part.margins,
        trust=part.trust,
        label_smoothing=cfg.loss.label_smoothing,
        center_coef=cfg.loss.center_coef,
    )
    return loss


def _optimizer(
    weight: Tensor, cfg: OptimizerConfig, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(
        [weight], lr=cfg.learning_rate, betas=cfg.betas, weight_decay=cfg.weight_decay
    )
    warmup = int(cfg.warmup_share * steps)
    if cfg.schedule == "constant":
        return optimizer, get_constant_schedule_with_warmup(optimizer, warmup)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, steps, min_lr_rate=cfg.min_lr_share
    )
    return optimizer, schedule


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
        from tasks.runtime.verl_losses import pairwise_loss

        cfg, held_out = self.cfg, self.cfg.held_out
        loss_fn = partial(
            pairwise_loss,
            label_smoothing=cfg.loss.label_smoothing,
            center_coef=cfg.loss.center_coef,
        )
        self.session.set_loss(ROLE, loss_fn)
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
        write_whole(self.root / "best.json", json.dumps({"step": self.step, "loss": self.loss}))

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
    accuracy, tie_share = pairwise_accuracy(chosen, rejected)
    return {
        "accuracy": accuracy,
        "tie_share": tie_share,
        "log_loss": float(loss),
        "noisy_log_loss": noisy_log_loss(chosen - rejected, flip_rate=flip_rate),
        "fitted_log_loss": fitted_log_loss(chosen - rejected, flip_rate=flip_rate),
    }


# Labels that models which did not see them contradict: cross-fitting.


@dataclass(frozen=True)
class CrossFit:
    """What held-out members say of P pairs.

    Args:
        margins: (P,) chosen minus rejected score of the member that did not see the pair, scaled to
            nats.
        trust: (P,) probability that the label is right.
        members: model of each fold.
    """

    margins: Tensor
    trust: Tensor
    members: tuple[Path, ...]

    @property
    def contradicted_share(self) -> float:
        """Share of pairs whose label the held-out member ranks the other way."""
        return float((self.margins < 0).float().mean())


def cross_fit(
    trainer: MemberTrainer,
    component: str,
    seed: int,
    train: LabelledPairs,
    validation: Sequence[RenderedPair],
) -> CrossFit:
    """Train a member per fold on all other folds and let it judge the labels of its own.

    All pairs of a prompt are in one fold.

    Raises:
        DataError: a fold without pairs.
    """
    noise = trainer.cfg.noise
    folds = [fold_of(pair.prompt_id, noise.folds) for pair in train.pairs]
    margins = torch.zeros(len(folds))
    members = []
    for fold in range(noise.folds):
        own = [i for i, found in enumerate(folds) if found == fold]
        others = [i for i, found in enumerate(folds) if found != fold]
        if not own or not others:
            raise DataError(
                f"{len(folds)} pairs of component {component!r} leave fold {fold} of "
                f"{noise.folds} without prompts",
                "prompts in every fold",
                "lower reward_model.noise.folds, set noise.method: none, or ingest more pairs",
            )
        name = f"{component}.fold-{fold}"
        directory = trainer.fit(name, seed, train.subset(others), validation)
        session = trainer.session
        session.load(RoleSpec(ROLE, "value_model", str(directory), trained_head=True))
        held_out = response_rows([train.pairs[i] for i in own])
        chosen, rejected = split_interleaved(session.scores(ROLE, held_out))
        gap = chosen - rejected
        margins[own] = gap * fit_noisy_scale(gap, flip_rate=noise.flip_rate)
        members.append(directory)
    return CrossFit(margins, label_trust(margins, flip_rate=noise.flip_rate), tuple(members))


def with_trust(train: LabelledPairs, trust: Tensor, method: str) -> LabelledPairs:
    """Return the pairs with their trust as weights (``downweight``), as soft labels (``soften``),
    or with the label swapped where it is less likely right than wrong (``relabel``)."""
    if method == "downweight":
        # A weight of 0 would mean padding.
        return replace(train, weights=trust.clamp(min=1e-4))
    if method == "soften":
        return replace(train, trust=trust)
    return replace(train, trust=(trust >= 0.5).float())
