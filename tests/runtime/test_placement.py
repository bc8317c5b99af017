"""How many ranks go to which node, by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.config.shared import STAGES, RuntimeConfig, identity_fields
from tasks.pipeline_config import PipelineConfig
from tasks.runtime.placement import (
    Node,
    _that_fit,
    _too_busy,
    _too_small,
    even_layout,
    group_layouts,
    most_ranks,
)
from tasks.runtime.placement import node_counts as counts
from tasks.runtime.rows import HostSpec


@pytest.mark.parametrize(
    ("places", "ranks", "nodes", "expected"),
    [
        ([8, 8], 8, 1, [0]),
        ([4, 8], 8, 1, [1]),
        ([4, 4], 8, 1, None),
        ([4, 4], 8, 2, [0, 1]),
        ([2, 5, 3], 4, 2, [1, 2]),  # the emptiest nodes are taken
        ([8, 3], 8, 2, None),  # 4 on each, and one node holds 3
        ([8], 8, 2, None),
        ([1, 1, 1], 3, 3, [0, 1, 2]),
        ([], 1, 1, None),
    ],
)
def test_at_the_start_exactly_the_wanted_nodes_take_part(
    places: list[int], ranks: int, nodes: int, expected: list[int] | None
) -> None:
    assert even_layout(places, ranks, counts(ranks, nodes, after_loss=False)) == expected


@pytest.mark.parametrize(
    ("places", "ranks", "nodes", "expected"),
    [
        ([4, 4], 8, 2, [0, 1]),  # nodes enough are left
        ([8], 8, 2, [0]),  # one of two
        ([8, 8], 12, 3, [0, 1]),  # 6 on each of 2, not 4 on each of 3
        ([4, 4], 8, 1, [0, 1]),  # none holds all, two do
        ([7], 8, 2, None),
        ([2, 1], 3, 3, None),  # 3 divides into 1 or 3 nodes only
    ],
)
def test_after_a_loss_other_numbers_of_nodes_will_do(
    places: list[int], ranks: int, nodes: int, expected: list[int] | None
) -> None:
    assert even_layout(places, ranks, counts(ranks, nodes, after_loss=True)) == expected


def test_fewer_nodes_come_before_more_and_near_before_far() -> None:
    assert counts(12, 4, after_loss=True) == [4, 3, 2, 1, 6, 12]
    assert counts(12, 4, after_loss=False) == [4]


@pytest.mark.parametrize(
    ("places", "expected"),
    # 3 + 3 beats 4 alone; 2 + 2 + 2 beats 3; nothing fits on nothing
    [([4, 3], 6), ([3, 2, 2], 6), ([8, 1], 8), ([0, 0], 0), ([], 0)],
)
def test_how_many_ranks_would_fit(places: list[int], expected: int) -> None:
    assert most_ranks(places) == expected


@pytest.mark.parametrize(
    ("places", "ranks", "nodes", "expected"),
    [
        ([8, 8], 8, 1, [[0], [1]]),  # a node for each group
        ([8, 8], 8, 2, [[0, 1], [0, 1]]),  # 4 of each on both
        ([16], 8, 1, [[0], [0]]),
        ([8, 7], 8, 1, None),
        ([12, 12], 8, 2, [[0, 1], [0, 1]]),
        ([9, 4, 3], 4, 1, [[0], [0]]),  # the first leaves 5, still the most
        ([8, 4, 4], 8, 2, [[0, 1], [0, 2]]),
        ([8, 4], 8, 2, None),  # the second finds 4 on one node only
        ([2, 2, 2], 2, 1, [[0], [1]]),
    ],
)
def test_two_groups_share_nodes_last(
    places: list[int], ranks: int, nodes: int, expected: list[list[int]] | None
) -> None:
    wanted = counts(ranks, nodes, after_loss=False)
    assert group_layouts(places, ranks, wanted, 2) == expected


def test_one_group_has_its_own_layout() -> None:
    for places in ([8, 8], [4, 8], [4, 4], [2, 5, 3], []):
        alone = even_layout(places, 8, [1])
        assert group_layouts(places, 8, [1], 1) == (None if alone is None else [alone])


@pytest.mark.parametrize(
    ("places", "expected"),
    # Half of 8 each; a node each; 3 of 4 and 3 of 3; 2 + 2 on two nodes, the first shared; one
    # place is too little for two.
    [([8], 4), ([8, 8], 8), ([4, 3], 3), ([4, 2, 2], 4), ([1], 0), ([], 0)],
)
def test_how_many_ranks_of_two_groups_would_fit(places: list[int], expected: int) -> None:
    assert most_ranks(places, 2) == expected
    if expected:
        layouts = [group_layouts(places, expected, [n], 2) for n in (1, 2) if expected % n == 0]
        assert any(layouts)


@pytest.mark.parametrize(
    ("places", "after_loss", "groups"),
    [([8, 8], False, 2), ([8], False, None), ([8], True, 1), ([16], True, 2), ([4, 4], True, 1)],
)
def test_after_a_loss_one_group_will_do(
    places: list[int], after_loss: bool, groups: int | None
) -> None:
    host = HostSpec(8, "cpu", 1, groups=2)
    found = _that_fit(host, places, counts(8, 1, after_loss=after_loss), after_loss)
    assert (found and found.groups) == groups


NODES = [Node("aa11bb22cc", "10.0.0.1", 4, 1), Node("dd33ee44ff", "10.0.0.2", 2, 0)]


@pytest.mark.parametrize(
    ("ranks", "nodes", "after_loss", "expected"),
    [
        (8, 2, True, "4 of 8 ranks would fit on the nodes that are left. CPUs of the Ray"),
        (8, 2, False, "nodes: 10.0.0.1 (aa11bb22) has 4, 10.0.0.2 (dd33ee44) has 2. Expected: 4 "),
        (8, 2, False, "Expected: 4 CPUs on each of 2 nodes, one for each of 8 ranks. Fix: lower "),
        (8, 2, False, "lower runtime.ranks to 4"),
        (4, 4, False, "set runtime.nodes: 2"),
        (4, 2, False, "set runtime.nodes: 2"),
    ],
)
def test_what_the_nodes_have_is_told(
    ranks: int, nodes: int, after_loss: bool, expected: str
) -> None:
    host = HostSpec(ranks, "cpu", 1, nodes)
    assert expected in str(_too_small(host, NODES, after_loss=after_loss))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            4,
            "has 4, 10.0.0.2 (dd33ee44) has 2. Expected: 8 CPUs for runtime.placement: separate, in"
            " each of 2 groups 4 CPUs on one node, one for each of 4 ranks. Fix: set "
            "runtime.placement: colocated, or lower runtime.ranks to 2 (the same in all stages)",
        ),
        (3, "6 CPUs for runtime.placement: separate, in each of 2 groups 3 CPUs on one node"),
    ],
)
def test_what_two_groups_need_is_told(ranks: int, expected: str) -> None:
    host = HostSpec(ranks, "cpu", 1, groups=2)
    assert expected in str(_too_small(host, NODES, after_loss=False))


def test_what_is_free_is_told() -> None:
    told = str(_too_busy(HostSpec(2, "cuda", 1, 2), NODES))
    assert "Free GPUs" in told
    assert "10.0.0.1 (aa11bb22) has 1, 10.0.0.2 (dd33ee44) has 0" in told


def test_ranks_that_the_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(ValidationError, match="ranks 3 is not a multiple of nodes 2"):
        RuntimeConfig(ranks=3, nodes=2)
    assert HostSpec.from_runtime(RuntimeConfig(ranks=4, nodes=2), "cpu").nodes == 2


def test_where_ranks_run_does_not_change_the_result() -> None:
    spread, together = (RuntimeConfig(ranks=2, nodes=nodes) for nodes in (2, 1))
    assert identity_fields(spread) == identity_fields(together)
    apart = RuntimeConfig(ranks=2, placement="separate")
    assert identity_fields(apart) == identity_fields(together)


def test_only_offline_ppo_has_two_groups() -> None:
    shared = {"runtime": {"placement": "separate"}}
    cfg = PipelineConfig.model_validate(
        dict.fromkeys(("sft", "reward_model", "offline_ppo", "distill", "evaluate"), shared)
    )
    assert {stage: getattr(cfg, stage).worker_groups for stage in STAGES} == {
        stage: 2 if stage == "offline_ppo" else 1 for stage in STAGES
    }
    assert PipelineConfig().offline_ppo.worker_groups == 1
