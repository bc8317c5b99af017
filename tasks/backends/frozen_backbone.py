"""A value head on a backbone that does not learn: its states are computed once and kept."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from tasks.algorithms.label_noise import fitted_log_loss
from tasks.algorithms.reward_losses import PairRegularization, PairTargets, bradley_terry_loss
from tasks.algorithms.samplers import GroupSampler
from tasks.backends.labelled_pairs import LabelledPairs
from tasks.backends.roles import RoleSpec
from tasks.backends.session import Session
from tasks.backends.supervised import count_steps
from tasks.backends.trajectories import response_rows
from tasks.config import OptimizerConfig, RewardModelConfig
from tasks.data.rendering import RenderedPair

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
            temporary = file.with_suffix(".tmp")
            save_file({"states": states.contiguous()}, temporary)
            os.replace(temporary, file)
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
        targets=PairTargets(part.weights, part.margins, part.trust),
        regularization=PairRegularization(cfg.loss.label_smoothing, cfg.loss.center_coef),
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
