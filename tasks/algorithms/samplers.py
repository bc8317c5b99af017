"""A sampler over prompt groups that can stop and resume anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tasks.algorithms.checks import check_in_range
from tasks.errors import DataError

SamplerState = dict[str, int]
CHUNK_BATCHES = 16
Group = TypeVar("Group")


def length_grouped(
    order: Sequence[Group],
    length_of: Callable[[Group], int],
    *,
    batch_size: int,
    n_head: int,
    rng: random.Random,
) -> list[Group]:
    """Reorder an epoch so that groups of like length meet in a batch.

    The first ``n_head`` stay. The rest is cut into chunks of ``CHUNK_BATCHES`` batches, each chunk
    sorted by length and cut into batches, and the batches shuffled; an incomplete batch comes last.

    Args:
        order: the epoch, shuffled.
        length_of: tokens of a group.
        batch_size: groups of a batch, at least 1.
        n_head: groups that fill a batch which an earlier epoch began.
        rng: shuffles the batches.
    """
    head, body = list(order[:n_head]), order[n_head:]
    chunk_size = batch_size * CHUNK_BATCHES
    batches: list[list[Group]] = []
    for start in range(0, len(body), chunk_size):
        chunk = sorted(body[start : start + chunk_size], key=length_of)
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    tail = batches.pop() if batches and len(batches[-1]) < batch_size else []
    rng.shuffle(batches)
    return [*head, *(group for batch in batches for group in batch), *tail]


class GroupSampler:
    """Draw group indices in an order that depends on the seed and the epoch only.

    Every index comes once per epoch; a batch may run over the end of an epoch into the next, so no
    row is ever dropped. The position is counted in groups, so a resumed run may change its batch
    size.
    """

    def __init__(self, n_groups: int, *, seed: int, shuffle: bool = True) -> None:
        """Start at the beginning of epoch 0.

        Args:
            n_groups: groups of the data set, at least 1.
            seed: any integer.
            shuffle: False = 0, 1, 2, ... in every epoch.

        Raises:
            DataError: no group.
        """
        if n_groups < 1:
            raise DataError(
                f"a sampler over {n_groups} groups",
                "at least one prompt group",
                "check the filters: they left nothing to train on",
            )
        self._n_groups = n_groups
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next index, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Return how many groups of this epoch were drawn."""
        return self._position

    def next_batch(self, batch_size: int) -> list[int]:
        """Draw the next ``batch_size`` group indices, each from 0 to n_groups - 1.

        Args:
            batch_size: groups, at least 1, may exceed the data set.

        Raises:
            ConfigError: a batch size below 1.
        """
        check_in_range("batch_size", batch_size, 1, float("inf"))
        batch: list[int] = []
        while len(batch) < batch_size:
            end = min(self._position + batch_size - len(batch), self._n_groups)
            batch.extend(self._order[self._position : end])
            self._position = end
            if end == self._n_groups:
                self._move_to(self._epoch + 1, 0)
        return batch

    def reset(self, *, seed: int | None = None) -> None:
        """Go back to the beginning of epoch 0, with another seed if one is given."""
        self._seed = self._seed if seed is None else seed
        self._move_to(0, 0)

    def state_dict(self) -> SamplerState:
        """Return what `load_state_dict` needs to go on with the very next index."""
        return {
            "n_groups": self._n_groups,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where the state was taken.

        Raises:
            DataError: a state of a data set of another size, another seed or order, or a torn one.
            The sampler is
                then left as it was.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise DataError(
                f"a sampler state with the fields {sorted(state)}",
                f"the fields {sorted(own)}",
                "start from a checkpoint of this version, or without one",
            )
        for field in ("n_groups", "seed", "shuffle"):
            if state[field] != own[field]:
                raise DataError(
                    f"the sampler state has {field} {state[field]}",
                    f"{field} {own[field]}, as in this run",
                    "resume with the data set and the seed of the first run, or start anew",
                )
        if state["epoch"] < 0 or not 0 <= state["position"] < self._n_groups:
            raise DataError(
                f"the sampler state is at epoch {state['epoch']}, position {state['position']}",
                f"an epoch of at least 0 and a position from 0 to {self._n_groups - 1}",
                "start from an earlier checkpoint",
            )
        self._move_to(state["epoch"], state["position"])

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._epoch_order(epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(self._n_groups))
        if self._shuffle:
            # A text seed keeps (seed 1, epoch 2) apart from (seed 2, epoch 1), on any Python
            # version.
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order


class LengthGroupedSampler(GroupSampler):
    """Draw batches of groups of like length, so that little is padded.

    An epoch is shuffled and reordered by `length_grouped`. Which groups meet depends on the lengths
    within a chunk only; every index still comes once per epoch. Batches stay aligned when an epoch
    does not fill the last one.
    """

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int) -> None:
        """Start at the beginning of epoch 0.

        Args:
            lengths: tokens of each group, at least one group.
            batch_size: groups that are drawn at a time.
            seed: any integer.

        Raises:
            DataError: no group.
            ConfigError: a batch size below 1.
        """
        check_in_range("batch_size", batch_size, 1, float("inf"))
        self._lengths = list(lengths)
        self._batch_size = batch_size
        super().__init__(len(self._lengths), seed=seed)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = super()._epoch_order(epoch)
        return length_grouped(
            order,
            self._lengths.__getitem__,
            batch_size=self._batch_size,
            # Groups that fill the batch which the epoch before began.
            n_head=(-epoch * self._n_groups) % self._batch_size,
            rng=random.Random(f"batches:{self._seed}:{epoch}"),
        )
