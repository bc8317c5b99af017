"""The policy losses by name: what each reads of a batch, and the formula that the workers compute.

A new one is a formula in `algorithms.policy_losses`, an entry here, and its name in
`config.OfflinePPOConfig.policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tasks.algorithms.importance import LikelihoodKind

# A config asks this table what a loss reads. So the table knows no config type, and formulas, which
# need torch, are imported when they are made.
Formula = Callable[..., Any]


@dataclass(frozen=True)
class Objective:
    """A policy loss.

    Args:
        columns: tensors of `batches.Minibatch` that the formula reads, beside the policy's own
            log-probabilities. Advantages, weights and a snapshot are there where they are named.
        formula: makes ``formula(logprobs, mask=, totals=, **columns)`` from an `OfflinePPOConfig`;
            it returns the loss and its metrics, see `verl_losses.actor_loss`.
        in_pairs: trains on the stored pairs alone: chosen, rejected, chosen, ...
    """

    columns: tuple[str, ...]
    formula: Callable[[Any], Formula]
    in_pairs: bool = False

    @property
    def uses_advantages(self) -> bool:
        """Whether rewards enter, as advantages."""
        return "advantages" in self.columns

    @property
    def uses_weights(self) -> bool:
        """Whether importance weights of the proximal to the behaviour policy enter."""
        return "weights" in self.columns

    @property
    def group_size(self) -> int:
        """Rows that stay together."""
        return 2 if self.in_pairs else 1

    def needs_snapshot(self, reanchor_steps: int, kl_in_reward: float) -> bool:
        """Whether the policy's own log-probabilities enter a step before it is taken."""
        if self.uses_weights or "proximal_logprobs" in self.columns:
            return reanchor_steps > 0
        return self.uses_advantages and kl_in_reward > 0.0


def _ppo(cfg: Any) -> Formula:
    from tasks.algorithms.policy_losses import decoupled_ppo_loss

    loss = cfg.loss
    return partial(
        decoupled_ppo_loss,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )


def _likelihood(kind: LikelihoodKind) -> Objective:
    def formula(cfg: Any) -> Formula:
        from tasks.runtime.verl_losses import likelihood_loss

        level, clip_range = cfg.importance.level, cfg.loss.clip_high
        return partial(likelihood_loss, kind=kind, level=level, clip_range=clip_range)

    return Objective(("behavior_logprobs", "advantages"), formula)


def _dpo(cfg: Any) -> Formula:
    from tasks.runtime.verl_losses import preference_loss

    loss = cfg.loss
    return partial(preference_loss, beta=loss.dpo_beta, label_smoothing=loss.dpo_label_smoothing)


OBJECTIVES: Final = {
    "ppo": Objective(("proximal_logprobs", "advantages", "weights"), _ppo),
    "topr": _likelihood("topr"),
    "a_lol": _likelihood("a_lol"),
    "positives_only": _likelihood("positives_only"),
    "dpo": Objective(("ref_logprobs",), _dpo, in_pairs=True),
}
