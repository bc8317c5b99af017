"""The driver's side: batches as workers take them, metrics as they give them back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tasks.config.shared import RuntimeConfig
from tasks.runtime.rows import Batch, HostSpec, Row, plan_calls, reduce_metrics, to_tensordict

ROWS = [Row((1, 2), (3, 4, 5)), Row((6,), (7,))]


@pytest.mark.parametrize(
    ("name", "values", "offsets"),
    [
        ("input_ids", [1, 2, 3, 4, 5, 6, 7], [0, 5, 7]),
        ("position_ids", [0, 1, 2, 3, 4, 0, 1], [0, 5, 7]),
        ("loss_mask", [0, 0, 1, 1, 1, 0, 1], [0, 5, 7]),
        ("prompts", [1, 2, 6], [0, 2, 3]),
        ("responses", [3, 4, 5, 7], [0, 3, 4]),
        ("advantages", [0.5, 1.5, 2.5, -1.0], [0, 3, 4]),
    ],
)
def test_rows_are_laid_end_to_end(name: str, values: list[float], offsets: list[int]) -> None:
    columns = {"advantages": [torch.tensor([0.5, 1.5, 2.5]), torch.tensor([-1.0])]}
    column: Tensor = to_tensordict(Batch(ROWS, columns), {})[name]
    assert column.values().tolist() == values
    assert column.offsets().tolist() == offsets


def test_plain_values_travel_with_the_rows() -> None:
    batch = Batch([*ROWS, *ROWS], group_size=2, scalars={"calculate_entropy": True})
    data = to_tensordict(batch, {"role": "actor", "temperature": 0.5})
    found = {
        name: tu.get_non_tensor_data(data, name, None)
        for name in ("global_batch_size", "force_group_size", "calculate_entropy", "role")
    }
    assert found == {
        "global_batch_size": 4,
        "force_group_size": 2,
        "calculate_entropy": True,
        "role": "actor",
    }
    assert tu.get_non_tensor_data(data, "temperature", None) == 0.5


def test_metrics_add_up_over_ranks_and_micro_batches() -> None:
    # Two ranks with two and one micro-batches.
    nested = {
        "loss": [0.5, [0.25]],
        "correct_sum": [[3.0, 1.0], [2.0]],
        "ratio_max": [[1.5, 3.0], [2.0]],
        "grad_norm": 0.75,
        "perf/max_memory": [9.0],
        "mfu": 0.1,
    }
    assert reduce_metrics(nested) == {
        "loss": 0.75,
        "correct_sum": 6.0,
        "ratio_max": 3.0,
        "grad_norm": 0.75,
    }


@pytest.mark.parametrize(
    ("ranks", "cpu_threads", "per_rank"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)]
)
def test_ranks_share_the_threads(ranks: int, cpu_threads: int, per_rank: int) -> None:
    runtime = RuntimeConfig(ranks=ranks, cpu_threads=cpu_threads)
    assert HostSpec.from_runtime(runtime, "cpu") == HostSpec(ranks, "cpu", per_rank)


def test_calls_keep_prompts_together_and_like_lengths() -> None:
    sizes = [(2, 3), (5, 6), (2, 1), (9, 4), (5, 2), (2, 7), (3, 1), (3, 1)]
    rows = [Row((prompt,) * prompt, (0,) * response) for prompt, response in sizes]
    # With its responses, prompt 2 has 2 + 3 + 1 + 7 = 13 tokens, 5 and 9 have 13, 3 has 5.
    assert plan_calls(rows, 5) == [[6, 7, 0, 2, 5], [1, 4, 3]]
    # A prompt of three rows does not fit into a call of two.
    assert plan_calls(rows, 2) == [[6, 7], [0, 2], [5], [1, 4], [3]]
    assert plan_calls([], 5) == []
