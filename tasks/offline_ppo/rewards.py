"""All that responses are worth by each component, and the weights of the components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasks.algorithms.rewards import (
    WeightTrial,
    best_trial,
    center_by_group,
    combine_components,
    judge_weights,
    normalize_scores,
    simplex_grid,
)
from tasks.artifacts import RewardModelCheckpoint
from tasks.context import RunLog
from tasks.data.columns import cached_scores
from tasks.data.hh import Pair
from tasks.errors import ConfigError
from tasks.offline_ppo.config import RewardConfig
from tasks.offline_ppo.reward_process import Judged, RewardFunction
from tasks.runtime.rows import NUMERIC_FIELDS, ComponentValues, Row, hash_rows
from tasks.runtime.scoring import ComponentScores, RewardScorer, RewardScores
from tasks.runtime.session import Session


def both_sides(pairs: Sequence[Pair]) -> list[Judged]:
    """Return the stored responses of each pair, chosen first."""
    return [
        Judged.of(pair, side, text)
        for pair in pairs
        for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected))
    ]


def function_of(cfg: RewardConfig) -> RewardFunction:
    """Return the user's function with its limits."""
    path, name = str(cfg.function_path), cfg.function_name
    return RewardFunction(path, name, cfg.function_seconds, cfg.function_memory_gib)


def normalize_component(cfg: RewardConfig, raw: Tensor, mean: float, std: float) -> Tensor:
    """Bring raw scores of a reward model, (N,), to the configured scale with the statistics of its
    training scores."""
    return normalize_scores(raw, mean=mean, std=std, mode=cfg.normalize, clip=cfg.clip)


def rewards_of(
    cfg: RewardConfig, values: Mapping[str, Tensor], weights: Mapping[str, float], groups: Tensor
) -> Tensor:
    """Add normalised components up.

    Args:
        cfg: says whether rewards are centred per prompt.
        values: by component, (N,) each.
        weights: by the same names.
        groups: (N,) int64, the prompt of each response.

    Returns:
        (N,) fp32.
    """
    rewards = combine_components(values, weights)
    return center_by_group(rewards, groups) if cfg.center == "prompt" else rewards


REWARD_MODEL = "reward_model"


def check_components(cfg: RewardConfig, reward_model: RewardModelCheckpoint) -> None:
    """Refuse what cannot work before anything is computed.

    Raises:
        ConfigError: a component that the reward model lacks; names those that it has.
        RlhfError: a reward function that cannot be used.
    """
    known = list(reward_model.components)
    for name in cfg.components:
        wanted = name.removeprefix(f"{REWARD_MODEL}.")
        if wanted != name and wanted not in known:
            raise ConfigError(
                f"offline_ppo.reward.components names {name!r}, but the reward model "
                f"{reward_model.path} has {known}",
                f"one of {[f'{REWARD_MODEL}.{component}' for component in known]}",
                "correct the name, or train the reward model with that component",
            )
    if "function" in cfg.components:
        function_of(cfg).check()


@dataclass(frozen=True)
class ComponentScorer:
    """Computes the components that the configuration names.

    Args:
        cfg: which components, and how reward-model scores are normalised.
        session: workers.
        reward_model: whose scores are components.
        cache_dir: where scores of stored responses are kept as Parquet columns; None keeps none.
    """

    cfg: RewardConfig
    session: Session
    reward_model: RewardModelCheckpoint
    cache_dir: Path | None = None

    def score(self, pairs: Sequence[Pair], rows: Sequence[Row]) -> ComponentValues:
        """Return the components of all stored responses.

        Args:
            pairs: P pairs.
            rows: their 2P responses, chosen first.
        """
        found = self.score_responses(rows, both_sides(pairs), keep=True)
        values = dict(found.values)
        if "labels" in self.cfg.components:
            values["labels"] = torch.tensor([1.0, -1.0]).repeat(len(pairs))
        return ComponentValues(values, found.disagreement)

    def score_responses(
        self, rows: Sequence[Row], responses: Sequence[Judged], *, keep: bool = False
    ) -> ComponentValues:
        """Return the components of any responses: all but ``labels``, which only stored ones have.

        Args:
            rows: N responses as token ids.
            responses: the same as text.
            keep: the same responses will be asked about again, by this run or another one.
        """
        wanted = self.cfg.components
        values: dict[str, Tensor] = {}
        disagreement = None
        if any(name.split(".")[0] == REWARD_MODEL for name in wanted):
            scores = self._kept_scores(rows) if keep else self._scores(rows)
            disagreement = scores.disagreement
            for name in wanted:
                if name.split(".")[0] == REWARD_MODEL:
                    values[name] = self._normalized(scores, name)
        if "function" in wanted:
            values["function"] = torch.tensor(function_of(self.cfg).scores(responses))
        return ComponentValues(values, disagreement)

    def _scores(self, rows: Sequence[Row]) -> RewardScores:
        return RewardScorer.load(self.session, self.reward_model).score(rows)

    def _kept_scores(self, rows: Sequence[Row]) -> RewardScores:
        """Return the scores from their columns, computed once per reward model and responses."""
        if self.cache_dir is None:
            return self._scores(rows)
        identity = [
            self.reward_model.content_hash,
            hash_rows(rows),
            self.session.runtime.model_dump_json(include=NUMERIC_FIELDS),
        ]
        members = cached_scores(
            self.cache_dir,
            identity,
            lambda: {name: part.members for name, part in self._scores(rows).components.items()},
        )
        known = self.reward_model.components
        return RewardScores(
            {name: ComponentScores.of(known[name], values) for name, values in members.items()}
        )

    def _normalized(self, scores: RewardScores, name: str) -> Tensor:
        """Return one component, or the mean of all of them for the reward model as a whole."""
        known = self.reward_model.components
        names = list(known) if name == REWARD_MODEL else [name.removeprefix(f"{REWARD_MODEL}.")]
        normal = [
            normalize_component(self.cfg, scores.components[n].raw, known[n].mean, known[n].std)
            for n in names
        ]
        return torch.stack(normal).mean(dim=0)


def find_weights(
    cfg: RewardConfig, values: Mapping[str, Tensor], log: RunLog
) -> tuple[dict[str, float], WeightTrial]:
    """Search the weights whose sum of components predicts the labels of held-out pairs best.

    Args:
        cfg: the grid.
        values: normalised components of the validation responses, chosen first.
        log: gets one nested run per grid point.

    Returns:
        the weights and how they did.
    """
    assert cfg.search is not None
    trials = [
        judge_weights(values, weights)
        for weights in simplex_grid(sorted(values), cfg.search.resolution)
    ]
    best = best_trial(trials)
    for index, trial in enumerate(trials):
        log.trial(
            f"weights-{index}",
            trial.weights,
            {"validation_log_loss": trial.log_loss, "validation_accuracy": trial.accuracy},
        )
        log.progress(index + 1, len(trials), "reward weights")
    shown = ", ".join(f"{name} {weight:g}" for name, weight in best.weights.items())
    log.event("reward_weights", f"found on the validation split: {shown}")
    return dict(best.weights), best
