"""A sampler over prompt groups that can stop and resume anywhere."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

from tasks.algorithms.masking import check_in_range
from tasks.errors import ConfigError, DataError

SamplerState = dict[str, int]
CHUNK_BATCHES = 16
G = TypeVar("G")


def length_grouped(
    order: Sequence[G],
    length_of: Callable[[G], int],
    *,
    batch_size: int,
    n_head: int,
    rng: random.Random,
) -> list[G]:
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
    batches: list[list[G]] = []
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
        for name in ("n_groups", "seed", "shuffle"):
            if state[name] != own[name]:
                raise DataError(
                    f"the sampler state has {name} {state[name]}",
                    f"{name} {own[name]}, as in this run",
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


# A draw without replacement that prefers some groups, and the factors that undo the preference.


@dataclass(frozen=True)
class Priorities:
    """Hold how much each group is preferred.

    Attributes:
        values: one finite number per group, at least 0, such as \\|reward margin\\|.
        exponent: 0 = no preference, 1 = in proportion to the value.
        uniform_share: share of the draw that ignores the values, above 0 to 1, so that a group of
            value 0 is drawn too.
        epoch_share: share of the groups that one epoch draws, above 0 to 1. No epoch draws a group
            twice, so a group comes at most ``1 / epoch_share`` times as often as the average one;
            at 1 every group comes once per epoch, whatever its value.
    """

    values: Sequence[float]
    exponent: float = 1.0
    uniform_share: float = 0.1
    epoch_share: float = 0.5

    def __post_init__(self) -> None:
        check_priorities(self.values)
        check_in_range("exponent", self.exponent, 0.0, 100.0)
        for name in ("uniform_share", "epoch_share"):
            share = getattr(self, name)
            if not 0.0 < share <= 1.0:
                raise ConfigError(f"{name} is {share}", "above 0, at most 1", f"change {name}")

    def n_selected(self, n_groups: int) -> int:
        """Return how many of so many groups one epoch draws, at least 1."""
        # Rounding first keeps 0.07 * 100 = 7.000000000000001 from becoming 8.
        return max(1, math.ceil(round(self.epoch_share * n_groups, 9)))


class Selected(NamedTuple):
    """Hold one drawn item: its place in the values, and its correction factor."""

    item: int
    correction: float


def check_priorities(values: Sequence[float]) -> None:
    """Refuse a priority that is negative or not finite (DataError, naming the group)."""
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0.0):
            raise DataError(
                f"the priority of group {index} is {value}",
                "a finite number of at least 0",
                "pass absolute margins or advantages, and 0 where there is none",
            )


def draw_probabilities(values: Sequence[float], priorities: Priorities) -> list[float]:
    """Return the probability of each item to be drawn first.

    ``p_i = (1 - uniform_share) * v_i^exponent / sum_j v_j^exponent + uniform_share / n``; uniform
    where all values are 0.

    Args:
        values: n priorities; those held by ``priorities`` are not read.
        priorities: exponent and uniform share.
    """
    n, highest = len(values), max(values)
    if highest == 0.0:
        return [1.0 / n] * n
    # Scaled by the highest, no power overflows and the sum is at least 1.
    powers = [(value / highest) ** priorities.exponent for value in values]
    total = math.fsum(powers)
    uniform = priorities.uniform_share
    return [(1.0 - uniform) * power / total + uniform / n for power in powers]


def select_prioritized(
    values: Sequence[float], priorities: Priorities, rng: random.Random
) -> list[Selected]:
    """Draw m = epoch_share * n items without replacement, one after the other in proportion to p.

    Each item gets the key ``t_i = e_i / p_i`` with ``e_i`` exponential of mean 1, and the m lowest
    keys are drawn, lowest first (Efraimidis & Spirakis 2006). With the next key ``kappa``, item i
    was drawn with probability ``1 - exp(-p_i * kappa)``, hence the correction

        c_i = (m / n) / (1 - exp(-p_i * kappa))

    with which ``sum_drawn(c_i * x_i) / m`` has the expectation ``sum_all(x_i) / n`` exactly
    (bottom-k estimator, Cohen & Kaplan 2007). At m = n nothing is left out and ``c_i = 1``.

    Args:
        values: n priorities, n at least 1.
        priorities: how values become probabilities.
        rng: one number per item is drawn from it.
    """
    probabilities = draw_probabilities(values, priorities)
    n, m = len(values), priorities.n_selected(len(values))
    keyed = sorted(
        (-math.log(1.0 - rng.random()) / probability, index)
        for index, probability in enumerate(probabilities)
    )
    kappa = keyed[m][0] if m < n else math.inf
    return [
        Selected(index, (m / n) / -math.expm1(-probabilities[index] * kappa))
        for _, index in keyed[:m]
    ]


# Where a sampler stands, as plain values, and the endless stream of groups of one subset.


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


# Named parts of a data set, and how many groups of each a batch holds.


@dataclass(frozen=True)
class Strata:
    """Name the subset of each group.

    Attributes:
        names: subset of each group.
        weights: by subset, above 0: how often its groups are drawn against those of a subset of
            weight 1, which is what a subset without one has.
    """

    names: Sequence[str]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(self.names))
        if unknown:
            raise DataError(
                f"weights for the subsets {unknown}, of which there is no group",
                f"subsets among {sorted(set(self.names))}",
                "correct the names, or take the weights out",
            )
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0.0):
                raise ConfigError(
                    f"the weight of subset {name!r} is {weight}",
                    "a finite number above 0",
                    "change it; to leave a subset out, filter it before the sampler",
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Groups of each subset, by name in alphabetical order."""
        return dict(sorted(Counter(self.names).items()))

    def shares(self) -> dict[str, Fraction]:
        """Return each subset's share of a batch: ``weight * size``, divided by their sum."""
        parts = {
            name: Fraction(self.weights.get(name, 1.0)) * size for name, size in self.sizes.items()
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()}


def next_quota(
    shares: Sequence[Fraction], drawn: Sequence[int], batch_size: int
) -> tuple[int, ...]:
    """Return how many groups of each subset the next batch holds.

    Subset s gets ``floor(batch_size * share_s)``, and the places that are left go one each to the
    subsets that are most behind ``share_s`` of everything drawn so far, the first of equals. So no
    batch is a whole group away from the shares, and what rounding takes comes back later.

    Args:
        shares: exact, adding up to 1.
        drawn: groups of each subset drawn before.
        batch_size: groups of the batch, at least 1.
    """
    exact = [share * batch_size for share in shares]
    quota = [math.floor(count) for count in exact]
    total = sum(drawn) + batch_size
    behind = [
        total * share - before - n for share, before, n in zip(shares, drawn, quota, strict=True)
    ]
    # A subset whose exact count is whole never takes part in the rounding.
    rounded = [s for s, count in enumerate(exact) if count != quota[s]]
    rounded.sort(key=lambda s: (-behind[s], s))
    for s in rounded[: batch_size - sum(quota)]:
        quota[s] += 1
    return tuple(quota)


#
# The sampler of offline PPO: stratified, prioritised, length-grouped, resumable anywhere.
#
# What comes next is planned a segment at a time: an epoch, or with several subsets at most
# ``STRATIFIED_CHUNK_BATCHES`` batches. A segment follows from the place where it starts and from
# nothing else, so that a state is this place and how much of the segment was drawn.

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
    for name, value in own.items():
        if found.get(name) != value:
            raise DataError(
                f"the sampler state has {name} {found.get(name)}",
                f"{name} {value}, as in this run",
                "resume with the data, filters, weights and seed of the first run, or start anew",
            )
