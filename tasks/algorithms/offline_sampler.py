"""The sampler of offline PPO: stratified, prioritised, length-grouped, resumable anywhere.

What comes next is planned a segment at a time: an epoch, or with several subsets at most
``STRATIFIED_CHUNK_BATCHES`` batches. A segment follows from the place where it starts and from
nothing else, so that a state is this place and how much of the segment was drawn.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from tasks.algorithms.checks import check_in_range
from tasks.algorithms.prioritized_draw import Priorities, check_priorities
from tasks.algorithms.sampler_places import (
    Draw,
    Group,
    Place,
    Segment,
    Stream,
    StreamPlace,
    tuple_or_none,
)
from tasks.algorithms.samplers import length_grouped
from tasks.algorithms.strata import Strata, next_quota
from tasks.errors import ConfigError, DataError

# Each subset brings a few groups to a batch only: twice the batches that one subset needs
# (`samplers.CHUNK_BATCHES`) bring its lengths as close together.
STRATIFIED_CHUNK_BATCHES = 32


class OfflineSampler:
    """Draw prompt groups in an order that depends on the seed and the epoch only.

    Without subsets and priorities this is `samplers.LengthGroupedSampler`, index by index.

    Subsets: every batch holds each subset's share to within one group, and each subset has epochs
    of its own: its groups all come once before one comes again. Like lengths meet as far as the
    shares allow: a batch takes the same length rank from every subset.

    Priorities: an epoch is a part of each subset, drawn by `prioritized_draw.select_prioritized`
    and then shuffled, so that the preference is the same from its first batch to its last.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        strata: Strata | None = None,
        priorities: Priorities | None = None,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            lengths: tokens of each group, at least one group.
            batch_size: groups that are drawn at a time.
            seed: any integer.
            strata: subset of each group and their weights; None = one subset.
            priorities: how much each group is preferred; None = not at all.

        Raises:
            DataError: no group, or as many names or priorities as there are not groups.
            ConfigError: a batch size below 1.
        """
        _check_lengths(len(lengths), strata, priorities)
        check_in_range("batch_size", batch_size, 1, float("inf"))
        self._lengths = list(lengths)
        self._strata = Strata([""] * len(lengths)) if strata is None else strata
        self._priorities = priorities
        self._latest = None if priorities is None else tuple(priorities.values)
        self._shares = list(self._strata.shares().values())
        names = list(self._strata.sizes)
        index_of = {name: s for s, name in enumerate(names)}
        self._stream_of = [index_of[name] for name in self._strata.names]
        self._names = names
        self._cursor = 0
        self._seed = self._run_seed = seed
        self._start(batch_size)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next group, from 0, counted over all subsets together."""
        return self._n_drawn // self._epoch_groups

    @property
    def position(self) -> int:
        """Return how many groups of this epoch were drawn."""
        return self._n_drawn % self._epoch_groups

    @property
    def batch_size(self) -> int:
        """Return how many groups a batch holds."""
        return self._place.batch_size

    @property
    def counts(self) -> dict[str, int]:
        """Return how many groups of each subset were drawn since the start."""
        counts = self._delivered(self._place)
        for group in self._segment.groups[: self._cursor]:
            counts[self._stream_of[group.id]] += 1
        return dict(zip(self._names, counts, strict=True))

    def next_batch(self, batch_size: int | None = None) -> list[int]:
        """Draw the next group indices, see `next_draw`."""
        return self.next_draw(batch_size).indices

    def next_draw(self, batch_size: int | None = None) -> Draw:
        """Draw the next group indices and their correction factors.

        The mean of ``correction * x`` over draws has the expectation that the mean of x has without
        priorities, see `prioritized_draw.select_prioritized`; without priorities every factor is
        1. Subset weights are a wanted mixture and not corrected for.

        Args:
            batch_size: groups, at least 1; None = the sampler's. Another one leaves the order as it
                is, and shares within a batch then hold roughly: use `set_batch_size` for that.

        Raises:
            ConfigError: a batch size below 1.
        """
        size = self.batch_size if batch_size is None else batch_size
        check_in_range("batch_size", size, 1, float("inf"))
        drawn: list[Group] = []
        while len(drawn) < size:
            if self._cursor == len(self._segment.groups):
                self._go_on(self._segment.carry, self.batch_size, self._place.anchor)
            end = self._cursor + size - len(drawn)
            drawn += self._segment.groups[self._cursor : end]
            self._cursor = min(end, len(self._segment.groups))
        return Draw([group.id for group in drawn], [group.correction for group in drawn])

    def set_batch_size(self, batch_size: int) -> None:
        """Change the batch size from the next batch on.

        What is left of the epoch is batched anew: nothing is skipped and nothing comes twice.

        Raises:
            ConfigError: a batch size below 1.
        """
        check_in_range("batch_size", batch_size, 1, float("inf"))
        if batch_size != self.batch_size:
            left = (*self._segment.groups[self._cursor :], *self._segment.carry)
            self._go_on(left, batch_size, self._n_drawn)

    def update_priorities(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Give some groups other priorities, from the next epoch on.

        With several subsets each has its own epochs. What is planned ends where all of them are to
        begin anew; one that began earlier, because of its weight or of rounding, keeps the old
        priorities until its next epoch.

        Raises:
            ConfigError: a sampler without priorities.
            DataError: an index out of range, a value that is negative or not finite, or as many
            values as there are not indices. Nothing is changed then.
        """
        if self._latest is None:
            raise ConfigError(
                "priorities for a sampler that has none",
                "a sampler made with priorities",
                "set a priority in the sampler's configuration",
            )
        if len(indices) != len(values) or not all(0 <= i < len(self._latest) for i in indices):
            raise DataError(
                f"{len(values)} priorities for {len(indices)} groups, from "
                f"{min(indices, default=0)} to {max(indices, default=0)}",
                f"one for each index, from 0 to {len(self._latest) - 1}",
                "pass group indices as the sampler drew them",
            )
        updated = list(self._latest)
        for index, value in zip(indices, values, strict=True):
            updated[index] = value
        check_priorities(updated)
        self._latest = tuple(updated)

    def reset(self, seed: int | None = None) -> None:
        """Go back to the beginning of epoch 0, with another seed if one is given.

        Batch size and priorities stay as they are.
        """
        self._seed = self._seed if seed is None else seed
        self._start(self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on with the very next group, as plain JSON.

        It holds the priorities, and the groups left of the epoch after `set_batch_size`; else a few
        numbers.
        """
        no_update = self._latest == self._place.priorities
        return {
            "seed": self._seed,
            "identity": self._identity(),
            "place": self._place.as_json(self._streams),
            "cursor": self._cursor,
            "updated_priorities": None if no_update or self._latest is None else list(self._latest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, with its batch size, its priorities and its reset seed.

        Raises:
            DataError: a state of other groups, subsets, weights or priority settings, or of a
            sampler made with another seed, naming both, or a torn one. The sampler is then left as
            it was.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise DataError(
                f"a sampler state with the fields {sorted(state)}",
                f"the fields {sorted(own)}",
                "start from a checkpoint of this version, or without one",
            )
        _check_same(state["identity"], own["identity"])
        resumed = copy.copy(self)
        resumed._seed = state["seed"]
        resumed._streams = resumed._new_streams()
        resumed._restore(state)
        self.__dict__.update(resumed.__dict__)

    def _restore(self, state: Mapping[str, Any]) -> None:
        place = Place.from_json(state["place"], self._streams)
        updated = tuple_or_none(state["updated_priorities"])
        latest = place.priorities if updated is None else updated
        check_priorities(latest or ())
        segment, cursor = self._plan(place), state["cursor"]
        n_latest, n_own = len(latest or ()), len(self._latest or ())
        if not 0 <= cursor <= len(segment.groups) or n_latest != n_own:
            raise DataError(
                f"the sampler state is at group {cursor} of a segment, with {n_latest} priorities",
                f"a group from 0 to {len(segment.groups)} and {n_own} priorities",
                "start from an earlier checkpoint",
            )
        self._place, self._segment, self._cursor = place, segment, cursor
        self._latest = latest

    @property
    def _n_drawn(self) -> int:
        return self._place.n_drawn + self._cursor

    @property
    def _epoch_groups(self) -> int:
        return sum(stream.n_epoch for stream in self._streams)

    def _identity(self) -> dict[str, Any]:
        settings = None
        if self._priorities is not None:
            kept = self._priorities
            settings = [kept.exponent, kept.uniform_share, kept.epoch_share]
        content = json.dumps([self._lengths, list(self._strata.names)]).encode()
        return {
            "seed": self._run_seed,
            "subset_groups": self._strata.sizes,
            "subset_weights": dict(sorted(self._strata.weights.items())),
            "priority_settings": settings,
            "fingerprint": hashlib.sha256(content).hexdigest()[:16],
        }

    def _start(self, batch_size: int) -> None:
        self._streams = self._new_streams()
        first = tuple(StreamPlace(0, 0, stream.pick(self._latest)) for stream in self._streams)
        self._place = Place(first, (), batch_size, 0, 0, self._latest)
        self._segment, self._cursor = self._plan(self._place), 0

    def _new_streams(self) -> list[Stream]:
        members: list[list[int]] = [[] for _ in self._names]
        for index, stream in enumerate(self._stream_of):
            members[stream].append(index)
        # One subset goes by the seed alone, as samplers without subsets do.
        tags = [f"{self._seed}:{name}" for name in self._names]
        tags = [str(self._seed)] if len(tags) == 1 else tags
        return [Stream(tag, own, self._priorities) for tag, own in zip(tags, members, strict=True)]

    def _go_on(self, carry: tuple[Group, ...], batch_size: int, anchor: int) -> None:
        """Plan the next segment from where the last one ended."""
        self._place = Place(
            self._segment.streams, carry, batch_size, anchor, self._n_drawn, self._latest
        )
        self._segment, self._cursor = self._plan(self._place), 0

    def _plan(self, place: Place) -> Segment:
        return self._plan_epoch(place) if len(self._streams) == 1 else self._plan_batches(place)

    def _plan_epoch(self, place: Place) -> Segment:
        """Plan the epoch, or what is left of one; batches stay aligned to the anchor."""
        stream, at = self._streams[0], place.streams[0]
        groups = place.carry
        rng_tag = f"batches:{self._seed}:{at.epoch}:{place.n_drawn}"
        if not groups:
            taken, at = stream.take(at, stream.n_epoch, place.priorities)
            groups, rng_tag = tuple(taken), f"batches:{self._seed}:{at.epoch}"
        order = length_grouped(
            groups,
            self._length_of,
            batch_size=place.batch_size,
            n_head=(place.anchor - place.n_drawn) % place.batch_size,
            rng=random.Random(rng_tag),
        )
        return Segment(order, (at,), ())

    def _plan_batches(self, place: Place) -> Segment:
        """Plan some batches over several subsets."""
        quotas = self._quotas(place)
        ranks = list(range(len(quotas)))
        random.Random(f"batches:{self._seed}:{place.n_drawn}").shuffle(ranks)
        batches: list[list[Group]] = [[] for _ in ranks]
        streams, left = [], []
        for s, counts in enumerate(zip(*quotas, strict=True)):
            waiting = [group for group in place.carry if self._stream_of[group.id] == s]
            n_needed = sum(counts)
            taken, at = self._streams[s].take(
                place.streams[s], max(0, n_needed - len(waiting)), place.priorities
            )
            streams.append(at)
            left += waiting[n_needed:]
            slots = [batch for batch, count in enumerate(counts) for _ in range(count)]
            for batch, group in self._matched([*waiting[:n_needed], *taken], slots, ranks):
                batches[batch].append(group)
        return Segment(list(chain(*batches)), tuple(streams), tuple(left))

    def _matched(
        self, groups: Sequence[Group], slots: Sequence[int], ranks: Sequence[int]
    ) -> Iterator[tuple[int, Group]]:
        """Yield (batch, group): the longer the group, the higher the batch's rank.

        Where an epoch of the subset ends, its groups take the batches that come first.
        """
        start = 0
        for _, part in groupby(groups, key=lambda group: group.epoch):
            same = sorted(part, key=self._length_of)
            own = sorted(slots[start : start + len(same)], key=ranks.__getitem__)
            start += len(same)
            yield from zip(own, same, strict=True)

    def _quotas(self, place: Place) -> list[tuple[int, ...]]:
        """Return the groups of each subset, batch by batch."""
        n_batches = STRATIFIED_CHUNK_BATCHES
        if self._priorities is not None:
            # So that the next epoch sees the priorities of its own time.
            n_left = self._epoch_groups - place.n_drawn % self._epoch_groups
            n_batches = min(n_batches, max(1, n_left // place.batch_size))
        drawn = self._delivered(place)
        quotas = []
        for _ in range(n_batches):
            quotas.append(next_quota(self._shares, drawn, place.batch_size))
            drawn = [before + n for before, n in zip(drawn, quotas[-1], strict=True)]
        return quotas

    def _delivered(self, place: Place) -> list[int]:
        """Return how many groups of each subset came before the place."""
        counts = [
            at.epoch * stream.n_epoch + at.position
            for at, stream in zip(place.streams, self._streams, strict=True)
        ]
        for group in place.carry:
            counts[self._stream_of[group.id]] -= 1
        return counts

    def _length_of(self, group: Group) -> int:
        return self._lengths[group.id]


def _check_lengths(n_groups: int, strata: Strata | None, priorities: Priorities | None) -> None:
    if n_groups < 1:
        raise DataError(
            f"a sampler over {n_groups} groups",
            "at least one prompt group",
            "check the filters: they left nothing to train on",
        )
    given = {
        "subset names": n_groups if strata is None else len(strata.names),
        "priorities": n_groups if priorities is None else len(priorities.values),
    }
    for what, count in given.items():
        if count != n_groups:
            raise DataError(
                f"{count} {what} for {n_groups} groups",
                "one for each group",
                "make them from the filtered groups that the lengths come from",
            )


def _check_same(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for field, value in own.items():
        if found.get(field) != value:
            raise DataError(
                f"the sampler state has {field} {found.get(field)}",
                f"{field} {value}, as in this run",
                "resume with the data, filters, weights and seed of the first run, or start anew",
            )
