"""Where candidates go among the stored responses."""

from __future__ import annotations

import pytest
import torch

from tasks.errors import DataError
from tasks.offline_ppo.candidates import CandidateSet, merge_candidates
from tasks.runtime.rows import Row


def test_candidates_go_behind_the_stored_responses() -> None:
    stored = [Row((1,), (10 + i,)) for i in range(6)]
    sampled = [Row((1,), (20 + i,)) for i in range(3)]
    found = CandidateSet(
        sampled, ["a", "b", "c"], torch.tensor([0, 1, 1]), [torch.zeros(1)] * 3,
        torch.zeros(3, dtype=torch.bool), {}, 1.0, 0.0,
    )  # fmt: skip
    # Prompt 0 has the pairs of rows 0, 1 and 4, 5; prompt 1 that of 2, 3.
    groups = [[0, 1, 4, 5], [2, 3]]
    merged = merge_candidates(stored, groups, found)
    assert merged.rows == stored + sampled
    assert merged.groups == [[0, 1, 4, 5, 6], [2, 3, 7, 8]]
    assert merged.group_of.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert merged.sampled.tolist() == [False] * 6 + [True] * 3
    assert groups == [[0, 1, 4, 5], [2, 3]]
    with pytest.raises(DataError, match="prompt 1 of 1"):
        merge_candidates(stored[:2], [[0, 1]], found)
