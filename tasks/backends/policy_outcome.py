"""What the trained policy says to held-out prompts, beside the base, and the report about it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.algorithms.resampling import Bootstrap
from tasks.algorithms.win_rates import ProbeKL, kl_probe_estimate
from tasks.backends.behavior import REFERENCE
from tasks.backends.policy_probe import Speaking, Spoken, one_pair_per_prompt
from tasks.backends.ppo_batches import ACTOR
from tasks.backends.ppo_loop import PPOLoop
from tasks.backends.roles import RoleSpec
from tasks.backends.session import Session
from tasks.backends.trajectories import Responses, mask_of, pad
from tasks.config import OfflinePPOConfig
from tasks.data.hh import Pair
from tasks.data.policy_report import HeldOut, PolicyReport, compare_pairs, policy_report
from tasks.data.policy_samples import ResponsePair, prompt_text
from tasks.data.training_course import GuardEvent, TrainingCourse


@dataclass(frozen=True)
class Outcome:
    """Measures a policy when it is done.

    Args:
        session: holds the actor.
        speaking: how models answer.
        base_dir: the model that training started from.
        directory: for the exported policy.
    """

    session: Session
    speaking: Speaking
    base_dir: Path
    directory: Path

    def compare(self, held_out: Responses, n_prompts: int) -> HeldOut | None:
        """Return the policy against the base on held-out prompts; None where the reward is not
        defined on what they say, because it is made of labels alone."""
        pairs = one_pair_per_prompt(held_out.pairs, n_prompts)
        exported = self.directory / ".final-model"
        shutil.rmtree(exported, ignore_errors=True)
        self.session.export(ACTOR, exported)
        try:
            policy = self.speaking.speak(exported, pairs)
        finally:
            shutil.rmtree(exported, ignore_errors=True)
        base = self.speaking.speak(self.base_dir, pairs)
        if policy.rewards is None or base.rewards is None:
            return None
        return compare_pairs(
            _response_pairs(pairs, base, policy),
            self._kl(policy),
            judge="the reward that it was trained on",
            bootstrap=Bootstrap(seed=self.speaking.seed),
        )

    def _kl(self, policy: Spoken) -> ProbeKL:
        if REFERENCE not in self.session.specs:
            self.session.load(RoleSpec(REFERENCE, "language_model", str(self.base_dir)))
        now, ref = (pad(self.session.logprobs(r, policy.rows)) for r in (ACTOR, REFERENCE))
        return kl_probe_estimate(now, ref, mask_of(policy.rows))


def _response_pairs(pairs: Sequence[Pair], base: Spoken, policy: Spoken) -> list[ResponsePair]:
    assert base.rewards is not None and policy.rewards is not None
    return [
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


def report_of(loop: PPOLoop, held_out: HeldOut) -> PolicyReport:
    """Return the report of a finished run."""
    weights = list(loop.recent_weights)
    course = TrainingCourse(
        loop.history.read(),
        [GuardEvent.of(event) for event in loop.state.events],
        torch.cat(weights) if weights else None,
        _bounds(loop.cfg),
    )
    return policy_report(course, held_out, facts=loop.clock.shares(), seed=loop.cfg.seed)


def _bounds(cfg: OfflinePPOConfig) -> dict[str, float]:
    """Return the thresholds that a plot can show: of rules on a metric's plain value."""
    conditions = [rule.condition for rule in cfg.guards.to_rules()]
    return {c.metric: c.threshold for c in conditions if c.reading == "value"}
