"""Where a sampler stands, as plain values, and the endless stream of groups of one subset."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tasks.algorithms.prioritized_draw import Priorities, check_priorities, select_prioritized
from tasks.errors import DataError


class Draw(NamedTuple):
    """Hold drawn group indices and, for each, the factor that undoes the priorities."""

    indices: list[int]
    corrections: list[float]


class Group(NamedTuple):
    """Hold a group that is drawn in an epoch of its subset; the id is its index in the data."""

    id: int
    epoch: int
    correction: float


class StreamPlace(NamedTuple):
    """Hold how many groups of which epoch of a subset were taken, and that epoch's priorities."""

    epoch: int
    position: int
    in_use: tuple[float, ...] | None


class Segment(NamedTuple):
    """Hold planned groups in order, and where the streams and the carry stand behind them."""

    groups: list[Group]
    streams: tuple[StreamPlace, ...]
    carry: tuple[Group, ...]


@dataclass(frozen=True)
class Place:
    """Hold all that a segment follows from.

    Attributes:
        streams: place in each subset's stream.
        carry: groups taken from the streams and not drawn yet.
        batch_size: groups of a batch.
        anchor: number of groups drawn at a batch border, from which batches are counted.
        n_drawn: groups drawn before.
        priorities: of all groups, for the epochs that begin in the segment.
    """

    streams: tuple[StreamPlace, ...]
    carry: tuple[Group, ...]
    batch_size: int
    anchor: int
    n_drawn: int
    priorities: tuple[float, ...] | None

    def as_json(self, streams: Sequence[Stream]) -> dict[str, Any]:
        """Return lists and numbers only; of equal priorities only one copy.

        Args:
            streams: the sampler's, in the same order.
        """
        pairs = zip(self.streams, streams, strict=True)
        return {
            "streams": [
                [at.epoch, at.position, _unless_equal(at.in_use, stream.pick(self.priorities))]
                for at, stream in pairs
            ],
            "carry": [list(group) for group in self.carry],
            "batch_size": self.batch_size,
            "anchor": self.anchor,
            "n_drawn": self.n_drawn,
            "priorities": _unless_equal(self.priorities, None),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], streams: Sequence[Stream]) -> Place:
        """Read what `as_json` returned.

        Args:
            stored: the mapping.
            streams: the sampler's, in the same order.

        Raises:
            DataError: a field is missing, or a number is out of range.
        """
        try:
            priorities = tuple_or_none(stored["priorities"])
            places = zip(stored["streams"], streams, strict=True)
            place = cls(
                tuple(
                    StreamPlace(
                        epoch, taken, stream.pick(priorities) if used is None else tuple(used)
                    )
                    for (epoch, taken, used), stream in places
                ),
                tuple(Group(*group) for group in stored["carry"]),
                stored["batch_size"],
                stored["anchor"],
                stored["n_drawn"],
                priorities,
            )
            place._check(streams)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(
                f"the place of the sampler state cannot be used: {error}",
                "what state_dict returned, unchanged",
                "start from an earlier checkpoint",
            ) from error
        return place

    def _check(self, streams: Sequence[Stream]) -> None:
        counts = [self.batch_size - 1, self.anchor, self.n_drawn, self.n_drawn - self.anchor]
        n_taken, known = 0, set()
        for at, stream in zip(self.streams, streams, strict=True):
            n_taken += at.epoch * stream.n_epoch + at.position
            counts += [at.epoch, at.position, stream.n_epoch - at.position]
            known |= set(stream.members)
            if at.in_use is not None and len(at.in_use) != len(stream.members):
                raise ValueError(f"{len(at.in_use)} priorities of {len(stream.members)} groups")
            check_priorities(at.in_use or ())
        if min(counts) < 0:
            raise ValueError("a count is negative, or beyond the end of an epoch")
        if n_taken != self.n_drawn + len(self.carry) or not {g.id for g in self.carry} <= known:
            raise ValueError(f"{n_taken} groups taken are not {self.n_drawn} drawn and the carry")
        if self.priorities is not None and len(self.priorities) != len(known):
            raise ValueError(f"{len(self.priorities)} priorities of {len(known)} groups")
        check_priorities(self.priorities or ())


@dataclass
class Stream:
    """The groups of one subset, epoch after epoch.

    Args:
        tag: seed and name; with the epoch it seeds the order.
        members: indices of the subset's groups.
        settings: how priorities become a draw; None = each epoch draws all of them.
    """

    tag: str
    members: Sequence[int]
    settings: Priorities | None
    _known: tuple[tuple[int, tuple[float, ...] | None], list[Group]] | None = field(
        init=False, default=None
    )

    @property
    def n_epoch(self) -> int:
        """Groups that an epoch draws."""
        n_members = len(self.members)
        return n_members if self.settings is None else self.settings.n_selected(n_members)

    def pick(self, priorities: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Return the members' part of all groups' priorities."""
        return None if priorities is None else tuple(priorities[i] for i in self.members)

    def take(
        self, at: StreamPlace, n_groups: int, priorities: tuple[float, ...] | None
    ) -> tuple[list[Group], StreamPlace]:
        """Return the next groups and the place behind them.

        Args:
            at: where to begin.
            n_groups: how many, 0 or more.
            priorities: of all groups, for the epochs that begin on the way.
        """
        taken: list[Group] = []
        while len(taken) < n_groups:
            # An epoch begins when its first group is needed, so that it sees all updates until then
            if at.position == self.n_epoch:
                at = StreamPlace(at.epoch + 1, 0, self.pick(priorities))
            end = min(at.position + n_groups - len(taken), self.n_epoch)
            taken += self._order(at)[at.position : end]
            at = at._replace(position=end)
        return taken, at

    def _order(self, at: StreamPlace) -> list[Group]:
        key = (at.epoch, at.in_use)
        if self._known is None or self._known[0] != key:
            self._known = (key, self._shuffled(at))
        return self._known[1]

    def _shuffled(self, at: StreamPlace) -> list[Group]:
        if self.settings is None or at.in_use is None:
            order = [Group(index, at.epoch, 1.0) for index in self.members]
        else:
            rng = random.Random(f"priorities:{self.tag}:{at.epoch}")
            drawn = sorted(select_prioritized(at.in_use, self.settings, rng))
            order = [Group(self.members[i], at.epoch, factor) for i, factor in drawn]
        # A text seed keeps (seed 1, epoch 2) apart from (seed 2, epoch 1), on any Python version.
        random.Random(f"{self.tag}:{at.epoch}").shuffle(order)
        return order


def _unless_equal(
    values: tuple[float, ...] | None, known: tuple[float, ...] | None
) -> list[float] | None:
    return None if values is None or values == known else list(values)


def tuple_or_none(values: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return a tuple of the values, which nobody changes."""
    return None if values is None else tuple(values)
