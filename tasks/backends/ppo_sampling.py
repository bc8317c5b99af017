"""Which prompts a step trains on."""

from __future__ import annotations

from tasks.algorithms.offline_sampler import OfflineSampler
from tasks.algorithms.prioritized_draw import Priorities
from tasks.algorithms.strata import Strata
from tasks.backends.trajectories import Trajectories
from tasks.config import OfflinePPOConfig


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
        priorities = Priorities(
            margins(data), how.priority_exponent, how.uniform_share, how.epoch_share
        )
    return OfflineSampler(
        [max(len(data.rows[i]) for i in group) for group in data.groups],
        batch_size=cfg.batch_prompts,
        seed=cfg.seed,
        strata=strata,
        priorities=priorities,
    )


def margins(data: Trajectories) -> list[float]:
    """Return how far apart the rewards of each prompt's responses are, which is also what their
    advantages start from."""
    rewards = data.rewards.tolist()
    spans = [[rewards[i] for i in group] for group in data.groups]
    return [max(span) - min(span) for span in spans]
