"""Merging of micro-batch metrics."""

from __future__ import annotations

import pytest
import torch

from tasks.algorithms.metrics import average_metrics, merge_metrics
from tasks.errors import DataError


def test_sums_and_counts_add_and_maxima_stay() -> None:
    parts = [
        {"loss_sum": torch.tensor(2.0), "n_tokens": 2.0, "ratio_max": 1.5},
        {"loss_sum": 32.0, "n_tokens": 8.0, "ratio_max": 1.2},
    ]
    merged = merge_metrics(parts)
    assert merged == {"loss_sum": 34.0, "n_tokens": 10.0, "ratio_max": 1.5}
    # 34 / 10, not (2 / 2 + 32 / 8) / 2 = 2.5
    assert average_metrics(merged) == {"loss": 3.4, "n_tokens": 10.0, "ratio_max": 1.5}


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(DataError, match="'loss'"):
        merge_metrics([{"loss": 1.0}])
    with pytest.raises(DataError, match="same names"):
        merge_metrics([{"a_sum": 1.0}, {"b_sum": 1.0}])
    with pytest.raises(DataError, match="0 sets"):
        merge_metrics([])
    with pytest.raises(DataError, match="n_pairs is missing"):
        average_metrics({"a_sum": 1.0}, count="n_pairs")
