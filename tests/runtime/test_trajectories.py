"""The fixed dataset of offline PPO: groups, padding, cached columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.data.pairs import fold_of
from tasks.data.rendering import RenderedPair
from tasks.errors import RewardError
from tasks.offline_ppo.behavior import FOLDS
from tasks.runtime.rows import (
    Row,
    Trajectories,
    cached_logprobs,
    mask_of,
    pad,
    prompt_groups,
    response_rows,
    unpad,
)

ROWS = [Row((1,), (2, 3, 4)), Row((1,), (5,)), Row((6, 7), (8, 9))]
RAGGED = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]


def _pair(pair_id: str, prompt_id: str, chosen: int, rejected: int) -> RenderedPair:
    return RenderedPair(pair_id, prompt_id, (1, 2), (chosen,), (rejected,), "all")


def test_pairs_of_one_prompt_form_one_group() -> None:
    pairs = [_pair("a", "p", 10, 11), _pair("b", "q", 12, 13), _pair("c", "p", 14, 15)]
    rows, groups = response_rows(pairs), prompt_groups(pairs)
    assert groups == [[0, 1, 4, 5], [2, 3]]
    responses = [[rows[i].response_ids[0] for i in group] for group in groups]
    assert responses == [[10, 11, 14, 15], [12, 13]]


def test_padding_is_zero_and_comes_off_again() -> None:
    padded = pad(RAGGED)
    assert padded.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]]
    assert [row.tolist() for row in unpad(padded, ROWS)] == [row.tolist() for row in RAGGED]


def test_mask_marks_the_response_tokens() -> None:
    assert mask_of(ROWS).tolist() == [
        [True, True, True],
        [True, False, False],
        [True, True, False],
    ]


def test_unpadded_rows_do_not_share_memory_with_the_batch() -> None:
    padded = pad(RAGGED)
    first = unpad(padded, ROWS)[0]
    padded.zero_()
    assert first.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.5]])
def test_equal_rewards_are_refused(rewards: list[float]) -> None:
    n = len(rewards)
    with pytest.raises(RewardError, match=f"All {n} rewards are equal"):
        Trajectories(ROWS[:n], [list(range(n))], torch.tensor(rewards), RAGGED[:n], RAGGED[:n])


def test_columns_are_computed_once_per_identity(tmp_path: Path) -> None:
    calls: list[str] = []

    def compute() -> list[Tensor]:
        calls.append("called")
        return RAGGED

    for identity in (["model", "data"], ["model", "data"], ["model", "other data"]):
        found = cached_logprobs(tmp_path, ROWS, identity, compute)
        assert [row.tolist() for row in found] == [row.tolist() for row in RAGGED]
    assert len(calls) == 2


def test_an_interrupted_computation_leaves_no_column(tmp_path: Path) -> None:
    def fail() -> list[Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_logprobs(tmp_path, ROWS, ["model"], fail)
    assert list(tmp_path.rglob("*.parquet")) == []
    assert len(cached_logprobs(tmp_path, ROWS, ["model"], lambda: RAGGED)) == 3


def test_fold_of_a_prompt_never_changes() -> None:
    # The SHA-256 of a, b, c, d ends in bb, 9d, c6, e4 hex: odd ones are fold 1.
    assert [fold_of(prompt, 2) for prompt in "abcd"] == [1, 1, 0, 0]


def test_folds_are_of_like_size() -> None:
    folds = [fold_of(f"prompt {i}", FOLDS) for i in range(1000)]
    # Binomial with n = 1000 and p = 1/2: four standard deviations are 63.
    assert set(folds) == set(range(FOLDS))
    assert abs(sum(folds) - 500) < 64
