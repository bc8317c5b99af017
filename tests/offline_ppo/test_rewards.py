"""Rewards from a reward model's scores, labels and a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tasks.data.hh import Message, Pair
from tasks.errors import MissingInputError, RewardError
from tasks.offline_ppo.config import RewardConfig
from tasks.offline_ppo.reward_process import RewardFunction
from tasks.offline_ppo.rewards import both_sides, normalize_component, rewards_of

GROUPS = torch.tensor([0, 0, 1, 1])
SCORES = torch.tensor([1.0, 3.0, 5.0, 23.0])
Write = Callable[[str], str]

PAIRS = [
    Pair("a", "p", "helpful", (Message("user", "Hi."),), "Hello there.", "No.", "x.jsonl", 1),
    Pair("b", "q", "harmless", (Message("user", "Hm?"),), "Yes.", "Four.", "x.jsonl", 7),
]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a Python file and returns its path."""

    def to_file(text: str) -> str:
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        return str(path)

    return to_file


def _function(write: Write, body: str, **limits: Any) -> RewardFunction:
    code = f"def reward_fn(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    return RewardFunction(write(code), **limits)


def _rewards(components: dict[str, float], **changes: Any) -> list[float]:
    cfg = RewardConfig(components=components, **changes)
    values = {
        "reward_model": normalize_component(cfg, SCORES, mean=3.0, std=2.0),
        "labels": torch.tensor([1.0, -1.0, 1.0, -1.0]),
    }
    chosen = {name: values[name] for name in components}
    return [round(x, 5) for x in rewards_of(cfg, chosen, components, GROUPS).tolist()]


def test_scores_are_standardised_and_clipped() -> None:
    # (1 - 3) / 2 = -1, 0, 1, and (23 - 3) / 2 = 10, clipped to 5.
    assert _rewards({"reward_model": 1.0}) == [-1.0, 0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("unit_range", [-0.2, 0.0, 0.2, 1.0]),
        ("raw", [1.0, 3.0, 5.0, 23.0]),
        ("binary", [-1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_other_scales(mode: str, expected: list[float]) -> None:
    assert _rewards({"reward_model": 1.0}, normalize=mode) == expected


def test_labels_are_added_with_their_weight() -> None:
    # -1 + 0.5, 0 - 0.5, 1 + 0.5, 5 - 0.5
    assert _rewards({"reward_model": 1.0, "labels": 0.5}) == [-0.5, -0.5, 1.5, 4.5]


def test_the_mean_of_a_prompt_is_taken_off() -> None:
    # Prompt 0: -1, 0 with mean -0.5; prompt 1: 1, 5 with mean 3.
    assert _rewards({"reward_model": 1.0}, center="prompt") == [-0.5, 0.5, -2.0, 2.0]


def test_a_function_scores_both_responses(write: Write) -> None:
    function = _function(
        write,
        "return len(solution_str) + 100 * (solution_str == ground_truth) "
        "+ 1000 * (extra_info['side'] == 'rejected') + 10000 * (data_source == 'harmless')",
    )
    # "Hello there." has 12 characters, "No." 3, "Yes." 4, "Four." 5.
    assert function.scores(both_sides(PAIRS)) == [112.0, 1003.0, 10104.0, 11005.0]


def test_a_function_sees_prompt_and_pair(write: Write) -> None:
    function = _function(
        write, "return float(extra_info['prompt'] == [{'role': 'user', 'content': 'Hi.'}])"
    )
    assert function.scores(both_sides(PAIRS)) == [1.0, 1.0, 0.0, 0.0]


def test_several_processes_score_the_same(write: Write) -> None:
    function = _function(write, "return len(solution_str)")
    # "Hello there.", "No.", "Yes.", "Four." three times.
    assert function.scores(both_sides(PAIRS * 3), per_process=5) == [12.0, 3.0, 4.0, 5.0] * 3


def test_what_a_function_prints_is_not_in_the_way(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    function = _function(write, "print('thinking'); return 1")
    assert function.scores(both_sides(PAIRS)) == [1.0] * 4
    printed = capfd.readouterr()
    assert printed.out == "" and "thinking" in printed.err


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"none\.py.*function_path"):
        RewardFunction(str(tmp_path / "none.py")).check()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def reward_fn(answer): return 1.0", ("cannot be called", "data_source, solution_str")),
        ("reward_fn = 3", ("has no function 'reward_fn'", "function_name")),
        ("import no_such_module_here", ("does not import", "no_such_module_here")),
        ("def reward_fn(:", ("does not import",)),
        ("import time; time.sleep(60)", ("longer than 1 s", "function_seconds")),
        ("import os; os._exit(3)", ("ended with exit code 3",)),
    ],
)
def test_unusable_file_is_named(write: Write, code: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(RewardError) as caught:
        RewardFunction(write(code), seconds=1.0).check()
    for part in ("my_reward.py", *expected):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return {'Yes.': float('nan')}.get(solution_str, 0.0)", "chosen .* returned nan"),
        ("return {'Four.': float('inf')}.get(solution_str, 0.0)", "rejected .* returned inf"),
        ("return 1 / (solution_str != 'Yes.')", "chosen .* raised ZeroDivisionError"),
        ("return None if solution_str == 'Four.' else 0", "rejected .* raised TypeError"),
        ("return len(bytearray((solution_str == 'Yes.') << 31))", "chosen .* raised MemoryError"),
        ("import os; return solution_str != 'Yes.' or os.abort()", "chosen .* signal 6"),
        ("import time; return time.sleep(60 * (solution_str == 'Yes.')) or 1", "longer than 1 s"),
        # Neither a signal that is ignored nor one that Python would have to see holds it.
        (
            "import signal, re; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "return bool(re.match('(a+)+$', 'a' * 64 * (solution_str == 'Yes.') + 'b')) + 1",
            "longer than 1 s",
        ),
    ],
)
def test_row_and_value_are_named(write: Write, body: str, expected: str) -> None:
    function = _function(write, body, seconds=1.0, memory_gib=1.0)
    with pytest.raises(RewardError, match=expected) as caught:
        function.scores(both_sides(PAIRS))
    assert "x.jsonl:7" in str(caught.value)
    left = [child for child in psutil.Process().children() if "reward" in str(child.cmdline())]
    assert not left, "the function's process is ended"
