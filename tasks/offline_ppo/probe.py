"""What the policy does by itself: its answers to fixed held-out prompts, beside the base's.

The same prompts and the same random numbers every time, so that two probes differ by the policy
alone. No probe trains anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tasks.algorithms.data_filters import missing_end_penalty
from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.masking import masked_mean
from tasks.algorithms.statistics import wilson_interval
from tasks.config.shared import GenerationConfig
from tasks.data.hh import Pair
from tasks.data.rendering import Renderer
from tasks.offline_ppo.reward_process import Judged
from tasks.offline_ppo.rewards import ComponentScorer, rewards_of
from tasks.runtime.generation import EndTokens, TransformersGenerator
from tasks.runtime.rows import ACTOR, REFERENCE, Responses, RoleSpec, Row, mask_of, pad
from tasks.runtime.session import Session, resolve_device


@dataclass(frozen=True)
class RewardJudge:
    """The stage's own reward, for responses that are not in the dataset.

    Args:
        scorer: computes components.
        weights: of the components.
        renderer: of the stage.
    """

    scorer: ComponentScorer
    weights: dict[str, float]
    renderer: Renderer

    def score(
        self, rows: Sequence[Row], responses: Sequence[Judged], ended: Tensor
    ) -> Tensor | None:
        """Return the rewards (N,) of any responses; None where only labels make the reward.

        Args:
            rows: N responses as token ids.
            responses: the same as text.
            ended: (N,) bool, True = the response ends its turn.

        They are not centred: what a response is worth must not depend on who stands beside it.
        """
        values = self.scorer.score_responses(rows, responses).values
        if not values:
            return None
        known = {name: self.weights[name] for name in values}
        cfg = self.scorer.cfg.model_copy(update={"center": "none"})
        rewards = rewards_of(cfg, values, known, torch.zeros(len(rows), dtype=torch.long))
        return rewards + missing_end_penalty(ended, cfg.missing_end_penalty)

    def agreement(self, held_out: Responses, n_pairs: int) -> dict[str, float]:
        """Return how often the reward prefers the chosen response of pairs that no reward model was
        trained on: `reward_agrees_with_label`."""
        part = held_out.first(n_pairs)
        values = self.scorer.score(part.pairs, part.rows).values
        groups = torch.zeros(len(part.rows), dtype=torch.long)
        cfg = self.scorer.cfg.model_copy(update={"center": "none"})
        rewards = rewards_of(cfg, values, self.weights, groups)
        agreement = label_agreement(rewards)
        return {
            "reward_agrees_with_label": agreement,
            "reward_agrees_with_label_upper": upper_bound(agreement, len(part.pairs)),
        }


def label_agreement(rewards: Tensor) -> float:
    """Return the share of pairs whose chosen response has the higher reward, ties half.

    Args:
        rewards: (2P,) chosen, rejected, chosen, ...
    """
    chosen, rejected = rewards[0::2], rewards[1::2]
    return float(((chosen > rejected).float() + 0.5 * (chosen == rejected).float()).mean())


def upper_bound(share: float, n: int) -> float:
    """Return the upper end of Wilson's 95 % interval of a share of n."""
    return wilson_interval(share * n, n)[1]


@dataclass(frozen=True)
class Answers:
    """A model's answers to N prompts.

    Args:
        rows: prompts and answers as token ids.
        texts: the answers, decoded.
        rewards: (N,), where the reward is defined on them.
        ended: (N,) bool, True = the answer ends its turn.
    """

    rows: Sequence[Row]
    texts: Sequence[str]
    rewards: Tensor | None
    ended: Tensor

    @property
    def lengths(self) -> Tensor:
        """(N,) tokens of each answer, the end of turn included."""
        return torch.tensor([float(len(row.response_ids)) for row in self.rows])


@dataclass(frozen=True)
class AnswerSampler:
    """How models answer held-out prompts.

    Args:
        judge: the stage's reward.
        generation: how answers are sampled.
        seed: of the sampling.
    """

    judge: RewardJudge
    generation: GenerationConfig
    seed: int

    def sample(self, model_dir: Path, pairs: Sequence[Pair]) -> Answers:
        """Return a model's answers to the prompts of pairs, and what they are worth."""
        runtime, renderer = self.judge.scorer.session.runtime, self.judge.renderer
        generator = TransformersGenerator(
            model_dir,
            EndTokens(renderer.end_of_turn_id, renderer.pad_token_id),
            device=resolve_device(runtime),
            threads=runtime.cpu_threads,
        )
        prompts = [renderer.prompt_ids(pair.prompt)[0] for pair in pairs]
        answers = generator.generate(prompts, self.generation, self.seed)
        rows = [Row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        texts = [renderer.decode(answer) for answer in answers]
        judged = [Judged.of(pair, "probe", text) for pair, text in zip(pairs, texts, strict=True)]
        ended = torch.tensor([answer[-1:] == [renderer.end_of_turn_id] for answer in answers])
        return Answers(rows, texts, self.judge.score(rows, judged, ended), ended)

    def sample_actor(self, scratch: Path, pairs: Sequence[Pair]) -> Answers:
        """Return the answers of the policy as it is now, which is exported for that."""
        shutil.rmtree(scratch, ignore_errors=True)
        self.judge.scorer.session.export(ACTOR, scratch)
        try:
            return self.sample(scratch, pairs)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass
class PolicyProbe:
    """Measures the policy during training.

    Args:
        session: holds the actor; `prepare` adds the reference and the reward model.
        sampler: how it answers.
        prompts: one pair for each prompt that is answered.
        held_out: pairs whose stored responses the policy ranks.
        base_dir: the model that training starts from.
        directory: for the exported policy.
    """

    session: Session
    sampler: AnswerSampler
    prompts: Sequence[Pair]
    held_out: Responses
    base_dir: Path
    directory: Path
    base: Answers | None = field(init=False, default=None)
    held_out_ref: list[Tensor] = field(init=False, default_factory=list)

    def prepare(self) -> None:
        """Measure once what does not change: the base's answers and log-probabilities."""
        self.session.load(RoleSpec(REFERENCE, "language_model", str(self.base_dir)))
        self.base = self.sampler.sample(self.base_dir, self.prompts)
        self.held_out_ref = self.session.logprobs(REFERENCE, self.held_out.rows)

    def measure(self) -> dict[str, float]:
        """Return the metrics of the policy as it is now."""
        answers = self.sampler.sample_actor(self.directory / ".probe-model", self.prompts)
        return self._of_answers(answers) | self._of_held_out()

    def _of_answers(self, answers: Answers) -> dict[str, float]:
        assert self.base is not None, "prepare() comes first"
        now = pad(self.session.logprobs(ACTOR, answers.rows))
        ref = pad(self.session.logprobs(REFERENCE, answers.rows))
        mask = mask_of(answers.rows)
        metrics = {
            "kl_probe": float(masked_mean(kl_per_token(now, ref, mask, kind="k1"), mask)),
            "kl_probe_k3": float(masked_mean(kl_per_token(now, ref, mask, kind="k3"), mask)),
            # The mean surprise of the policy at its own words is its entropy.
            "probe_entropy": float(masked_mean(-now, mask)),
            "probe_length_tokens": float(answers.lengths.mean()),
            "probe_truncated_share": float((~answers.ended).float().mean()),
        }
        if answers.rewards is None or self.base.rewards is None:
            return metrics
        wins = (answers.rewards > self.base.rewards).float()
        ties = (answers.rewards == self.base.rewards).float()
        return metrics | {
            "probe_reward": float(answers.rewards.mean()),
            "probe_win_rate": float((wins + 0.5 * ties).mean()),
        }

    def _of_held_out(self) -> dict[str, float]:
        """Say whether the policy moved towards the chosen responses of pairs it never saw."""
        now = self.session.logprobs(ACTOR, self.held_out.rows)
        moved = torch.stack([(a - b).sum() for a, b in zip(now, self.held_out_ref, strict=True)])
        margins = moved[0::2] - moved[1::2]
        right = (margins > 0).float() + 0.5 * (margins == 0).float()
        return {
            "held_out_accuracy": float(right.mean()),
            "held_out_accuracy_upper": upper_bound(float(right.mean()), len(right)),
            "held_out_margin": float(margins.mean()),
            "chosen_logprob_drift": float(moved[0::2].mean()),
            "rejected_logprob_drift": float(moved[1::2].mean()),
        }
