"""Step counts and readable metrics of the loop over fixed rows."""

from __future__ import annotations

import pytest

from tasks.runtime.supervised import count_steps, per_unit


@pytest.mark.parametrize(
    ("n_units", "batch", "epochs", "max_steps", "steps"),
    [
        (100, 32, 1.0, None, 4),  # 3.125 batches, the last one reaches into the next epoch
        (96, 32, 1.0, None, 3),
        (100, 32, 3.0, None, 10),  # 9.375
        (100, 32, 0.5, None, 2),  # 1.5625
        (3, 32, 0.01, None, 1),  # never 0
        (100, 32, 3.0, 7, 7),
        (100, 32, 1.0, 7, 4),
    ],
)
def test_steps_of_some_epochs(
    n_units: int, batch: int, epochs: float, max_steps: int | None, steps: int
) -> None:
    assert count_steps(n_units, batch, epochs, max_steps) == steps


def test_sums_become_means_per_pair() -> None:
    metrics = {"loss": 0.5, "correct_sum": 3.0, "gap_sum": -2.0, "n_pairs": 4.0}
    assert per_unit(metrics) == {"loss": 0.5, "correct": 0.75, "gap": -0.5}


def test_sums_become_means_per_token() -> None:
    metrics = {"kl_sum": 6.0, "ratio_max": 2.0, "n_tokens": 12.0, "n_sequences": 3.0}
    assert per_unit(metrics) == {"kl": 0.5, "ratio_max": 2.0}


def test_without_a_count_only_plain_metrics_stay() -> None:
    assert per_unit({"loss": 1.0, "correct_sum": 3.0}) == {"loss": 1.0}


def test_sums_with_a_prefix_are_divided_by_its_own_count() -> None:
    # Per pair with the prefix, per token without: 2 / 4, 3 / 4 and 6 / 12.
    metrics = {"dpo_loss_sum": 2.0, "dpo_correct_sum": 3.0, "dpo_n_pairs": 4.0}
    entropy = {"entropy_sum": 6.0, "n_tokens": 12.0}
    assert per_unit(metrics) == {"dpo_loss": 0.5, "dpo_correct": 0.75}
    assert per_unit(metrics | entropy) == {"dpo_loss": 0.5, "dpo_correct": 0.75, "entropy": 0.5}
