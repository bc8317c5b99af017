"""The driver's state of a run: everything that a checkpoint holds beside weights and optimizers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tasks.backends.ppo_batches import Drawn

_VARIANCE_STEPS = 8


@dataclass
class LoopState:
    """Where a run stands.

    Args:
        step: optimizer steps taken; grows also after a rollback.
        batch_prompts: prompts of a step; a guard may raise it.
        kl_coef: of the KL-in-reward; a controller may move it.
        lr_scale: share of the configured learning rate; a guard may lower it.
        log_tau: where the adaptive sequence threshold stands.
        pending: steps that were drawn and not taken yet.
        good: step of the newest checkpoint whose probe passed.
        best: step of the checkpoint with the best probe.
        best_value: its probe's value; None before the first probe.
        probed: step of the newest probe.
        stopped: why a guard ended the run; empty while it goes on.
        reward_means: of the last steps.
        events: what guards did, as plain values.
    """

    step: int
    batch_prompts: int
    kl_coef: float
    lr_scale: float = 1.0
    log_tau: float | None = None
    pending: list[Drawn] = field(default_factory=list)
    good: int = 0
    best: int = 0
    best_value: float | None = None
    probed: int = -1
    stopped: str = ""
    reward_means: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> LoopState:
        """Return the state that `to_dict` gave."""
        pending = [Drawn(**drawn) for drawn in found["pending"]]
        return cls(**{**found, "pending": pending})

    @property
    def pointers(self) -> dict[str, int]:
        """Checkpoints that stay on disk."""
        return {"start": 0, "good": self.good, "best": self.best}

    def take_reward(self, mean: float) -> float | None:
        """Add a step's mean reward; return the variance over the last steps, None before there are
        enough of them."""
        kept = deque([*self.reward_means, mean], maxlen=_VARIANCE_STEPS)
        self.reward_means = list(kept)
        if len(kept) < _VARIANCE_STEPS:
            return None
        return float(torch.tensor(self.reward_means).var())

    def take_probe(self, value: float | None) -> None:
        """Mark the present step as good, and as best where its probe's value is the highest."""
        self.good = self.step
        known = value if value is not None and math.isfinite(value) else None
        if self.best_value is None or (known is not None and known > self.best_value):
            self.best, self.best_value = self.step, known
