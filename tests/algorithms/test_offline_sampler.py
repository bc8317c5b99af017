"""The sampler of offline PPO: order, shares, priorities, exact resumption."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.samplers import (
    GroupSampler,
    LengthGroupedSampler,
    OfflineSampler,
    Priorities,
    Strata,
)
from tasks.errors import ConfigError, DataError


def made(n_groups: int, n_strata: int, prioritised: bool, seed: int = 0) -> OfflineSampler:
    """Return a sampler over made groups; subset k has the groups with ``index % n_strata == k``."""
    return OfflineSampler(
        [1 + (i * 37) % 101 for i in range(n_groups)],
        batch_size=6,
        seed=seed,
        strata=Strata([f"s{i % n_strata}" for i in range(n_groups)]),
        priorities=Priorities([float(i % 5) for i in range(n_groups)]) if prioritised else None,
    )


# What `samplers.LengthGroupedSampler` has drawn since the first finished runs.
GOLDEN_LENGTHS = [5, 1, 9, 3, 7, 2, 8, 4, 6, 10]
GOLDEN = [[0, 8, 4, 6], [1, 5, 3, 7], [2, 9, 6, 5], [1, 3, 7, 0], [8, 4, 2, 9]]


def test_default_order_is_that_of_finished_runs() -> None:
    sampler = OfflineSampler(GOLDEN_LENGTHS, batch_size=4, seed=0)
    assert [sampler.next_batch() for _ in range(5)] == GOLDEN
    grouped = LengthGroupedSampler(GOLDEN_LENGTHS, batch_size=4, seed=0)
    assert [grouped.next_batch(4) for _ in range(5)] == GOLDEN


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=120),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 40), max_size=12),
    named=st.booleans(),
)
def test_defaults_draw_what_the_length_grouped_sampler_draws(
    lengths: list[int], batch_size: int, seed: int, sizes: list[int], named: bool
) -> None:
    strata = Strata(["only"] * len(lengths)) if named else None
    offline = OfflineSampler(lengths, batch_size=batch_size, seed=seed, strata=strata)
    grouped = LengthGroupedSampler(lengths, batch_size=batch_size, seed=seed)
    for size in [batch_size] * 30 + sizes:
        assert offline.next_batch(size) == grouped.next_batch(size)
        assert (offline.epoch, offline.position) == (grouped.epoch, grouped.position)
    assert sum(offline.counts.values()) == 30 * batch_size + sum(sizes)


@settings(max_examples=60, deadline=None)
@given(
    n_groups=st.integers(5, 90),
    n_strata=st.integers(1, 5),
    seed=st.integers(0, 1000),
    weight=st.sampled_from([0.25, 1.0, 3.0]),
    resized=st.dictionaries(st.integers(0, 40), st.integers(1, 17), max_size=3),
)
def test_each_subset_draws_every_group_once_before_one_comes_again(
    n_groups: int, n_strata: int, seed: int, weight: float, resized: dict[int, int]
) -> None:
    names = [f"s{i % n_strata}" for i in range(n_groups)]
    sampler = OfflineSampler(
        [1 + (i * 37) % 101 for i in range(n_groups)],
        batch_size=6,
        seed=seed,
        strata=Strata(names, {"s0": weight}),
    )
    drawn: dict[str, list[int]] = {name: [] for name in set(names)}
    for step in range(40):
        if step in resized:
            sampler.set_batch_size(resized[step])
        for index in sampler.next_batch():
            drawn[names[index]].append(index)
    assert sampler.counts == {name: len(drawn[name]) for name in sorted(drawn)}
    for name, indices in drawn.items():
        size = names.count(name)
        for start in range(0, len(indices), size):
            epoch = indices[start : start + size]
            assert len(set(epoch)) == len(epoch)


@settings(max_examples=80, deadline=None)
@given(
    n_groups=st.integers(4, 70),
    n_strata=st.integers(1, 4),
    prioritised=st.booleans(),
    seed=st.integers(0, 1000),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("draw"), st.integers(1, 9)),
            st.tuples(st.just("resize"), st.integers(1, 15)),
            st.tuples(st.just("update"), st.integers(0, 3)),
            st.tuples(st.just("reset"), st.integers(0, 3)),
        ),
        min_size=1,
        max_size=12,
    ),
    stop=st.integers(0, 12),
)
def test_resuming_anywhere_changes_nothing(
    n_groups: int,
    n_strata: int,
    prioritised: bool,
    seed: int,
    events: list[tuple[str, int]],
    stop: int,
) -> None:
    def play(sampler: OfflineSampler, part: list[tuple[str, int]]) -> list[Any]:
        seen: list[Any] = []
        for what, number in part:
            if what == "draw":
                seen += [sampler.next_draw() for _ in range(number)]
                seen.append(sampler.next_draw(number))
            elif what == "resize":
                sampler.set_batch_size(number)
            elif what == "reset" and number == 0:
                sampler.reset(seed + 1)
            elif what == "update" and prioritised:
                sampler.update_priorities([number, 0], [7.5 * number, 1.0])
        return seen

    whole = made(n_groups, n_strata, prioritised, seed)
    play(whole, events[:stop])
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = made(n_groups, n_strata, prioritised, seed)
    resumed.next_batch(5)
    resumed.load_state_dict(state)
    rest = [*events[stop:], ("draw", 9), ("draw", 9)]
    assert play(resumed, rest) == play(whole, rest)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.counts == whole.counts


def test_order_depends_on_seed_and_epoch_only() -> None:
    for n_strata, prioritised in ((1, False), (3, False), (1, True), (3, True)):
        one, same, other = (made(60, n_strata, prioritised, seed) for seed in (1, 1, 2))
        first = [one.next_batch() for _ in range(10)]
        assert [same.next_batch() for _ in range(10)] == first
        assert [other.next_batch() for _ in range(10)] != first
        assert [one.next_batch() for _ in range(10)] != first
        one.reset()
        assert [one.next_batch() for _ in range(10)] == first
        one.reset(2)
        other.reset()
        assert one.next_batch(60) == other.next_batch(60)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    batch_size=st.integers(1, 24),
    seed=st.integers(0, 100),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    prioritised=st.booleans(),
)
def test_every_batch_holds_the_shares(
    sizes: list[int], batch_size: int, seed: int, weight: float, prioritised: bool
) -> None:
    names = [f"s{k}" for k, size in enumerate(sizes) for _ in range(size)]
    sampler = OfflineSampler(
        list(range(1, len(names) + 1)),
        batch_size=batch_size,
        seed=seed,
        strata=Strata(names, {"s0": weight}),
        priorities=Priorities([1.0] * len(names)) if prioritised else None,
    )
    total = sum(sizes) + (weight - 1.0) * sizes[0]
    for step in range(45):
        if step == 20:
            sampler.set_batch_size(2 * batch_size)
        size = batch_size if step < 20 else 2 * batch_size
        counts = Counter(names[i] for i in sampler.next_batch())
        for k, n in enumerate(sizes):
            share = n * (weight if k == 0 else 1.0) / total
            assert abs(counts[f"s{k}"] - share * size) < 1.0 + 1e-9


def test_weights_by_hand() -> None:
    # 6 groups of a and 2 of b at weight 3: shares 6 / 12 and 6 / 12, so batches of 4 hold 2 and 2,
    # and b starts an epoch in every batch.
    names = ["a"] * 6 + ["b"] * 2
    sampler = OfflineSampler([1] * 8, batch_size=4, seed=0, strata=Strata(names, {"b": 3.0}))
    for _ in range(6):
        batch = sampler.next_batch()
        assert sorted(i for i in batch if i >= 6) == [6, 7]
        assert sum(i < 6 for i in batch) == 2
    assert sampler.counts == {"a": 12, "b": 12}


def test_stratified_batches_still_pad_little() -> None:
    rng = random.Random(0)
    lengths = [max(8, int(rng.lognormvariate(5.2, 0.7))) for _ in range(2000)]
    names = [rng.choice("aabbbcccc") for _ in lengths]

    def padded_share(sampler: GroupSampler | OfflineSampler) -> float:
        batches = [sampler.next_batch(32) for _ in range(124)]
        slots = sum(32 * max(lengths[i] for i in batch) for batch in batches)
        return 1.0 - sum(lengths[i] for batch in batches for i in batch) / slots

    shuffled = padded_share(GroupSampler(2000, seed=0))
    grouped = padded_share(LengthGroupedSampler(lengths, batch_size=32, seed=0))
    stratified = padded_share(OfflineSampler(lengths, batch_size=32, seed=0, strata=Strata(names)))
    # 0.18, 0.18 and 0.69 when this was written
    assert max(grouped, stratified) < 0.22 < 0.6 < shuffled


def test_doubled_batches_meet_like_lengths_again() -> None:
    # Lengths 0 to 127 in batches of 4. After 9 batches 92 groups are left, less than one chunk of
    # 16 * 8: sorted, 11 batches of 8 neighbours, then 4 groups that 4 of the next epoch fill up. Of
    # its other 124, 8 neighbours are at most 7 + 4 apart.
    sampler = OfflineSampler(list(range(128)), batch_size=4, seed=0)
    before = {i for _ in range(9) for i in sampler.next_batch()}
    sampler.set_batch_size(8)
    after = [sorted(sampler.next_batch()) for _ in range(11)]
    left = sorted(set(range(128)) - before)[:88]
    assert sorted(after) == [left[i : i + 8] for i in range(0, 88, 8)]
    assert set(range(124, 128)) <= set(sampler.next_batch()) | before
    assert (sampler.epoch, sampler.position, sampler.batch_size) == (1, 4, 8)
    spans = [max(batch) - min(batch) for batch in (sampler.next_batch() for _ in range(15))]
    assert max(spans) <= 11


def test_prioritised_epochs_prefer_without_repeating_or_starving() -> None:
    n_groups = 40
    values = [8.0 if i < 10 else 1.0 if i < 30 else 0.0 for i in range(n_groups)]
    sampler = OfflineSampler(
        [1] * n_groups,
        batch_size=5,
        seed=0,
        priorities=Priorities(values, uniform_share=0.2, epoch_share=0.5),
    )
    counts: Counter[int] = Counter()
    for _ in range(300):
        epoch = [i for _ in range(4) for i in sampler.next_batch()]
        assert len(set(epoch)) == 20
        counts.update(epoch)
    assert sampler.epoch == 300
    by_class = [
        sum(counts[i] for i in r) / len(r) for r in (range(10), range(10, 30), range(30, 40))
    ]
    assert by_class[0] > 1.5 * by_class[1] > 1.5 * by_class[2] > 0
    assert min(counts[i] for i in range(n_groups)) > 10


def test_updated_priorities_hold_from_the_next_epoch_on() -> None:
    def sampler() -> OfflineSampler:
        return OfflineSampler(
            [1] * 20, batch_size=2, seed=4, priorities=Priorities([1.0] * 20, uniform_share=0.01)
        )

    changed, same = sampler(), sampler()
    changed.next_batch(), same.next_batch()
    changed.update_priorities(range(3), [1e6] * 3)
    # 10 of 20 per epoch: 8 left
    assert [changed.next_batch() for _ in range(4)] == [same.next_batch() for _ in range(4)]
    for _ in range(5):
        assert {0, 1, 2} <= set(changed.next_batch(10))
    assert any(not {0, 1, 2} <= set(same.next_batch(10)) for _ in range(5))


def test_updated_priorities_reach_every_subset() -> None:
    names = ["a"] * 8 + ["b"] * 12
    sampler = OfflineSampler(
        [1] * 20,
        batch_size=5,
        seed=4,
        strata=Strata(names),
        priorities=Priorities([1.0] * 20, uniform_share=0.01),
    )
    # An epoch is 4 of a and 6 of b: two batches of 2 and 3.
    first = [sampler.next_batch() for _ in range(2)]
    assert [Counter(names[i] for i in batch) for batch in first] == [{"a": 2, "b": 3}] * 2
    sampler.update_priorities([0, 8, 9], [1e6] * 3)
    for _ in range(5):
        assert {0, 8, 9} <= set(sampler.next_batch(10))


def test_state_is_small_and_priorities_are_in_it_once() -> None:
    plain = made(70, 1, False)
    plain.next_batch(20)
    assert len(json.dumps(plain.state_dict())) < 500
    state = made(70, 3, True).state_dict()
    assert len(state["place"]["priorities"]) == 70
    assert state["updated_priorities"] is None
    assert [used for _, _, used in state["place"]["streams"]] == [None] * 3


@pytest.mark.parametrize(
    ("other", "messages"),
    [
        (OfflineSampler([1, 2, 3, 4], batch_size=2, seed=8), ["seed 8", "seed 7"]),
        (OfflineSampler([1, 2, 3, 5], batch_size=2, seed=7), ["has fingerprint", ", as in this"]),
        (
            OfflineSampler([1, 2, 3, 4], batch_size=2, seed=7, strata=Strata(list("aabb"))),
            ["subset_groups {'a': 2, 'b': 2}", "subset_groups {'': 4}"],
        ),
        (
            OfflineSampler([1, 2, 3, 4], batch_size=2, seed=7, priorities=Priorities([1.0] * 4)),
            ["priority_settings [1.0, 0.1, 0.5]", "priority_settings None"],
        ),
    ],
)
def test_a_state_of_other_data_is_refused_naming_both(
    other: OfflineSampler, messages: list[str]
) -> None:
    sampler = OfflineSampler([1, 2, 3, 4], batch_size=2, seed=7)
    sampler.next_batch(3)
    before = sampler.state_dict()
    with pytest.raises(DataError) as caught:
        sampler.load_state_dict(other.state_dict())
    assert all(message in str(caught.value) for message in messages)
    assert sampler.state_dict() == before


def test_other_weights_are_refused_naming_both() -> None:
    def weighted(weight: float) -> OfflineSampler:
        return OfflineSampler(
            [1] * 4, batch_size=2, seed=0, strata=Strata(list("aabb"), {"a": weight})
        )

    with pytest.raises(DataError, match=r"\{'a': 2.0\}.*\{'a': 3.0\}"):
        weighted(3.0).load_state_dict(weighted(2.0).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": 1000},
        {"cursor": -1},
        {"place": {"streams": []}},
        {"updated_priorities": [1.0]},
        {"updated_priorities": [-1.0] * 12},
    ],
)
def test_torn_states_are_refused_and_change_nothing(change: dict[str, Any]) -> None:
    sampler = made(12, 2, True)
    sampler.next_batch(9)
    before = sampler.state_dict()
    with pytest.raises(DataError):
        sampler.load_state_dict({**before, **change})
    for field, value in (
        ("streams", [[0, 99, None], [0, 0, None]]),
        ("n_drawn", -1),
        ("batch_size", 0),
        ("carry", [[1000, 0, 1.0]]),
        ("priorities", [1.0]),
    ):
        with pytest.raises(DataError, match="cannot be used"):
            sampler.load_state_dict({**before, "place": {**before["place"], field: value}})
    with pytest.raises(DataError, match="fields"):
        sampler.load_state_dict({"epoch": 0})
    assert sampler.state_dict() == before


def test_bad_input_is_refused() -> None:
    with pytest.raises(DataError, match="0 groups"):
        OfflineSampler([], batch_size=1, seed=0)
    with pytest.raises(DataError, match="1 subset names for 2 groups"):
        OfflineSampler([1, 1], batch_size=1, seed=0, strata=Strata(["a"]))
    with pytest.raises(DataError, match="3 priorities for 2 groups"):
        OfflineSampler([1, 1], batch_size=1, seed=0, priorities=Priorities([1.0] * 3))
    with pytest.raises(ConfigError, match="batch_size"):
        OfflineSampler([1], batch_size=0, seed=0)
    with pytest.raises(DataError, match=r"subsets \['b'\]"):
        Strata(["a"], {"b": 1.0})
    with pytest.raises(ConfigError, match="weight of subset 'a' is 0"):
        Strata(["a"], {"a": 0.0})
    with pytest.raises(DataError, match="group 1 is nan"):
        Priorities([1.0, math.nan])
    with pytest.raises(ConfigError, match="uniform_share is 0"):
        Priorities([1.0], uniform_share=0.0)
    sampler = made(10, 1, True)
    for indices, values in (([10], [1.0]), ([0], []), ([-1], [1.0]), ([0], [math.inf])):
        with pytest.raises(DataError):
            sampler.update_priorities(indices, values)
    with pytest.raises(ConfigError, match="sampler that has none"):
        made(10, 1, False).update_priorities([0], [1.0])
    for bad in (0, -3):
        with pytest.raises(ConfigError, match="batch_size"):
            sampler.set_batch_size(bad)
        with pytest.raises(ConfigError, match="batch_size"):
            sampler.next_batch(bad)
