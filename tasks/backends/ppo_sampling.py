"""Which prompts a step trains on."""

from __future__ import annotations

from collections.abc import Collection

from tasks.algorithms.groups import group_statistics
from tasks.algorithms.offline_sampler import OfflineSampler
from tasks.algorithms.prioritized_draw import Priorities
from tasks.algorithms.strata import Strata
from tasks.backends.trajectories import Trajectories
from tasks.config import OfflinePPOConfig
from tasks.errors import ConfigError


def build_sampler(cfg: OfflinePPOConfig, data: Trajectories) -> OfflineSampler:
    """Return the sampler over the prompts of the dataset, at its start.

    Raises:
        DataError: a weight of a subset that the dataset has not.
    """
    how = cfg.sampler
    strata = priorities = None
    if how.stratify:
        strata = Strata(data.subsets or [""] * len(data.groups), how.subset_weights)
    if how.priority != "none":
        values = margins(data) if how.priority == "margin" else distances(data)
        priorities = Priorities(values, how.priority_exponent, how.uniform_share, how.epoch_share)
    return OfflineSampler(
        [max(len(data.rows[i]) for i in group) for group in data.groups],
        batch_size=cfg.batch_prompts,
        seed=cfg.seed,
        strata=strata,
        priorities=priorities,
    )


def margins(data: Trajectories) -> list[float]:
    """Return how far apart the rewards of each prompt's responses are."""
    rewards = data.rewards.tolist()
    spans = [[rewards[i] for i in group] for group in data.groups]
    return [max(span) - min(span) for span in spans]


def distances(data: Trajectories) -> list[float]:
    """Return how far each prompt's responses are at most from their mean reward: what priorities by
    advantage start from."""
    centred = group_statistics(data.rewards, data.group_of).centred.abs().tolist()
    return [max(centred[i] for i in group) for group in data.groups]


def check_subsets(cfg: OfflinePPOConfig, subsets: Collection[str]) -> None:
    """Refuse weights of subsets that the training split has not.

    Raises:
        ConfigError: names them and those that there are.
    """
    unknown = sorted(set(cfg.sampler.subset_weights) - set(subsets))
    if unknown:
        raise ConfigError(
            f"offline_ppo.sampler.subset_weights names {unknown}",
            f"subsets of the training split: {sorted(set(subsets))}",
            "correct the names",
        )
