"""The fixed dataset of offline PPO, put together once before training: stored and sampled responses
with their rewards and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasks.algorithms.data_filters import filter_rows, missing_end_penalty
from tasks.context import StageContext
from tasks.data.rendering import Renderer
from tasks.offline_ppo.behavior import behavior_logprobs, model_identity, reference_logprobs
from tasks.offline_ppo.candidates import (
    CandidateSet,
    CandidateSource,
    generate_candidates,
)
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.offline_ppo.probe import label_agreement
from tasks.offline_ppo.reward_process import Judged
from tasks.offline_ppo.rewards import ComponentScorer, rewards_of
from tasks.runtime.rows import (
    REFERENCE,
    ComponentValues,
    Responses,
    RoleSpec,
    Trajectories,
    cached_logprobs,
    hash_rows,
    prompt_groups,
)


@dataclass(frozen=True)
class PolicyData:
    """Builds the dataset.

    Args:
        ctx: the run.
        cfg: the stage's config.
        renderer: of the policy.
        scorer: computes reward components.
        weights: of the components.
    """

    ctx: StageContext
    cfg: OfflinePPOConfig
    renderer: Renderer
    scorer: ComponentScorer
    weights: Mapping[str, float]

    def collect(self, train: Responses) -> Trajectories:
        """Compute, or read back, all that is known of the responses before training."""
        session = self.scorer.session
        ref = reference_logprobs(self.ctx, self.cfg, session, train.rows)
        behavior = behavior_logprobs(self.ctx, self.cfg, session, train, ref)
        components = self.scorer.score(train.pairs, train.rows)
        raw = self._rewards(components, torch.zeros(len(train.rows), dtype=torch.long), False)
        self.ctx.draft.metrics["train_reward_agrees_with_label"] = label_agreement(raw)
        kept = self._filtered(train, raw)
        part = train.select(kept)
        rows_kept = [row for pair in kept for row in (2 * pair, 2 * pair + 1)]
        stored = Trajectories(
            part.rows,
            prompt_groups(part.rendered),
            raw[rows_kept],
            [behavior[i] for i in rows_kept],
            [ref[i] for i in rows_kept],
            _select(components, rows_kept),
            ended=_ended(part),
            subsets=_subsets(part),
        )
        return self._with_rewards(self._with_candidates(part, stored))

    def _filtered(self, train: Responses, rewards: Tensor) -> list[int]:
        """Return the pairs that the filters leave, and count the others by reason."""
        filters = self.cfg.filters
        lengths = [max(len(p.chosen_ids), len(p.rejected_ids)) for p in train.rendered]
        filtered = filter_rows(
            rewards[0::2] - rewards[1::2],
            torch.tensor(lengths, dtype=torch.float32),
            [pair.flags for pair in train.pairs],
            min_margin_quantile=filters.min_margin_quantile,
            max_length_quantile=filters.max_length_quantile,
            drop_flags=filters.drop_flags,
        )
        self.ctx.draft.counts |= {f"filtered_{why}": n for why, n in filtered.dropped.items()}
        for why, n in filtered.dropped.items():
            self.ctx.log.event(f"filtered.{why}", f"{n} of {len(train.pairs)} pairs left out")
        return [int(i) for i in filtered.keep.nonzero()[:, 0]]

    def _with_candidates(self, part: Responses, stored: Trajectories) -> Trajectories:
        """Put sampled responses behind the stored ones, where the config asks for them."""
        if not self.cfg.candidates.per_prompt:
            return stored
        candidates = self._sample(stored)
        self.ctx.draft.counts |= {f"candidates_{k}": n for k, n in candidates.counts.items()}
        self.ctx.draft.metrics["candidates_kl"] = candidates.kl
        self.ctx.draft.metrics["candidates_temperature"] = candidates.temperature
        first_pair = [members[0] // 2 for members in stored.groups]
        judged = [
            Judged.of(part.pairs[first_pair[group]], "candidate", text)
            for group, text in zip(candidates.group.tolist(), candidates.texts, strict=True)
        ]
        components = self.scorer.score_responses(candidates.rows, judged, keep=True)
        return replace(
            stored,
            rows=[*stored.rows, *candidates.rows],
            groups=groups_with(candidates.group.tolist(), stored.groups, len(stored.rows)),
            rewards=torch.cat(
                [stored.rewards, torch.zeros(len(candidates.rows), dtype=stored.rewards.dtype)]
            ),
            behavior_logprobs=[*stored.behavior_logprobs, *candidates.logprobs],
            ref_logprobs=[*stored.ref_logprobs, *self._reference_of(candidates)],
            components=_join(stored.components, components),
            n_stored=len(stored.rows),
            ended=torch.cat([stored.ended, ~candidates.truncated]),
        )

    def _sample(self, stored: Trajectories) -> CandidateSet:
        ctx = self.ctx
        source = CandidateSource(
            ctx.inputs["base"].path / "model",
            self.renderer,
            self.cfg.runtime,
            ctx.workspace.cache_dir / "candidates",
            [ctx.inputs["base"].content_hash, ctx.inputs["preferences"].content_hash],
        )
        prompts = [stored.rows[members[0]].prompt_ids for members in stored.groups]
        return generate_candidates(
            source,
            self.cfg.candidates,
            prompts,
            self.cfg.seed,
            lambda done, total: ctx.log.progress(done, total, "candidate responses"),
        )

    def _reference_of(self, candidates: CandidateSet) -> list[Tensor]:
        """Return what the base says of the candidates at temperature 1, computed once."""
        session = self.scorer.session
        identity = model_identity(self.ctx, self.cfg, "candidates")

        def compute() -> list[Tensor]:
            model_dir = str(self.ctx.inputs["base"].path / "model")
            session.load(RoleSpec(REFERENCE, "language_model", model_dir))
            return session.logprobs(REFERENCE, candidates.rows)

        return cached_logprobs(
            self.ctx.workspace.cache_dir / "logprobs",
            candidates.rows,
            [*identity, hash_rows(candidates.rows)],
            compute,
        )

    def _with_rewards(self, data: Trajectories) -> Trajectories:
        """Return the dataset with its final rewards."""
        rewards = self._rewards(data.components, data.group_of, True)
        penalty = self.cfg.reward.missing_end_penalty
        return replace(data, rewards=rewards + missing_end_penalty(data.ended, penalty))

    def _rewards(self, components: ComponentValues, groups: Tensor, center: bool) -> Tensor:
        cfg = self.cfg.reward
        if not center:
            cfg = cfg.model_copy(update={"center": "none"})
        return rewards_of(cfg, components.values, self.weights, groups)


def groups_with(
    prompts: Sequence[int], groups: Sequence[Sequence[int]], n_stored: int
) -> list[list[int]]:
    """Return the rows of each prompt, those of the candidates behind the stored ones.

    Args:
        prompts: index into ``groups`` of the prompt of each candidate; their rows follow the
            ``n_stored`` stored ones.
        groups: stored rows of each prompt.
    """
    grown = [list(members) for members in groups]
    for row, prompt in enumerate(prompts, start=n_stored):
        grown[prompt].append(row)
    return grown


def _select(components: ComponentValues, rows: Sequence[int]) -> ComponentValues:
    index = torch.tensor(rows, dtype=torch.long)
    spread = components.disagreement
    return ComponentValues(
        {name: values[index] for name, values in components.values.items()},
        None if spread is None else spread[index],
    )


def _join(first: ComponentValues, second: ComponentValues) -> ComponentValues:
    spread = None
    if first.disagreement is not None and second.disagreement is not None:
        spread = torch.cat([first.disagreement, second.disagreement])
    return ComponentValues(
        {name: torch.cat([v, second.values[name]]) for name, v in first.values.items()}, spread
    )


def _ended(part: Responses) -> Tensor:
    return torch.tensor(
        [not cut for p in part.rendered for cut in (p.chosen_truncated, p.rejected_truncated)]
    )


def _subsets(part: Responses) -> list[str]:
    """Return the subset of each prompt, in the order of `prompt_groups`."""
    subset_of: dict[str, str] = {}
    for pair in part.rendered:
        subset_of.setdefault(pair.prompt_id, pair.subset)
    return list(subset_of.values())
