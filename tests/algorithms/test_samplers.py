"""The resumable sampler over prompt groups."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.algorithms.samplers import GroupSampler, LengthGroupedSampler
from tasks.errors import ConfigError, DataError


@settings(max_examples=60, deadline=None)
@given(
    n_groups=st.integers(1, 40),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    split=st.integers(0, 7),
)
def test_every_index_once_per_epoch_and_exact_resumption(
    n_groups: int, seed: int, sizes: list[int], split: int
) -> None:
    sampler, resumed = GroupSampler(n_groups, seed=seed), GroupSampler(n_groups, seed=seed)
    drawn: list[int] = []
    state = sampler.state_dict()
    for step, size in enumerate(sizes):
        if step == split:
            state = json.loads(json.dumps(sampler.state_dict()))
        drawn.extend(sampler.next_batch(size))
    assert len(drawn) == sum(sizes)
    for start in range(0, len(drawn) - n_groups + 1, n_groups):
        assert sorted(drawn[start : start + n_groups]) == list(range(n_groups))
    # the state taken before step `split` (or at the start) gives the same tail, one by one
    resumed.load_state_dict(state)
    skipped = sum(sizes[:split]) if split < len(sizes) else 0
    tail = [index for _ in range(len(drawn) - skipped) for index in resumed.next_batch(1)]
    assert tail == drawn[skipped:]
    assert (resumed.epoch, resumed.position) == (sampler.epoch, sampler.position)


def test_order_depends_on_seed_and_epoch_only() -> None:
    one, other = GroupSampler(50, seed=1), GroupSampler(50, seed=2)
    first = one.next_batch(50)
    second = one.next_batch(50)
    assert first != second
    assert first != other.next_batch(50)
    by_small_batches = GroupSampler(50, seed=1)
    assert [i for _ in range(20) for i in by_small_batches.next_batch(5)] == first + second


def test_unshuffled_order_and_batches_over_the_epoch_end() -> None:
    sampler = GroupSampler(3, seed=0, shuffle=False)
    assert [sampler.next_batch(2) for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert (sampler.epoch, sampler.position) == (2, 0)
    assert sampler.next_batch(7) == [0, 1, 2, 0, 1, 2, 0]


def test_reset_starts_anew() -> None:
    sampler = GroupSampler(9, seed=0)
    first = sampler.next_batch(9)
    sampler.reset()
    assert sampler.next_batch(9) == first
    sampler.reset(seed=1)
    assert sampler.next_batch(9) == GroupSampler(9, seed=1).next_batch(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_groups": 11}, "n_groups 11"),
        ({"seed": 4}, "seed 4"),
        ({"position": 10}, "position 10"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, int], message: str) -> None:
    sampler = GroupSampler(10, seed=3)
    sampler.next_batch(4)
    before = sampler.state_dict()
    with pytest.raises(DataError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_torn_states_and_empty_data_are_refused() -> None:
    with pytest.raises(DataError, match="fields"):
        GroupSampler(10, seed=3).load_state_dict({"epoch": 0})
    with pytest.raises(DataError, match="0 groups"):
        GroupSampler(0, seed=0)
    with pytest.raises(ConfigError, match="batch_size"):
        GroupSampler(1, seed=0).next_batch(0)


def test_like_lengths_meet_and_nothing_is_lost_or_drawn_twice() -> None:
    # 10 groups in batches of 4, one chunk (16 * 4 > 10). Epoch 0 starts on a batch border: two full
    # batches of the sorted chunk, the longest two left over; epoch 1 first fills that batch.
    lengths = [5, 1, 9, 3, 7, 2, 8, 4, 6, 10]
    sampler = LengthGroupedSampler(lengths, batch_size=4, seed=0)
    first, second, third = (sampler.next_batch(4) for _ in range(3))
    by_length = [sorted(lengths[i] for i in batch) for batch in (first, second)]
    assert sorted(by_length) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert sorted(lengths[i] for i in third[:2]) == [9, 10]
    rest = [sampler.next_batch(4) for _ in range(2)]
    assert sorted(third[2:] + rest[0] + rest[1]) == list(range(10))


def test_length_grouping_pads_less_than_plain_shuffling() -> None:
    lengths = [1 + (i * 37) % 101 for i in range(512)]

    def padded(sampler: GroupSampler) -> int:
        batches = [sampler.next_batch(16) for _ in range(32)]
        return sum(16 * max(lengths[i] for i in batch) for batch in batches)

    grouped = padded(LengthGroupedSampler(lengths, batch_size=16, seed=3))
    assert grouped < 1.1 * sum(lengths) < padded(GroupSampler(512, seed=3))


def test_length_grouped_sampler_resumes_in_the_middle_of_an_epoch() -> None:
    lengths = [1 + (i * 7) % 13 for i in range(50)]
    whole = LengthGroupedSampler(lengths, batch_size=8, seed=1)
    drawn = [whole.next_batch(8) for _ in range(20)]
    half = LengthGroupedSampler(lengths, batch_size=8, seed=1)
    for _ in range(9):
        half.next_batch(8)
    resumed = LengthGroupedSampler(lengths, batch_size=8, seed=1)
    resumed.load_state_dict(half.state_dict())
    assert [resumed.next_batch(8) for _ in range(11)] == drawn[9:]
