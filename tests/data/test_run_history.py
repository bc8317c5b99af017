"""A run's history through resumes, torn ends and broken lines."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from statistics import median

import pytest

from tasks.data.history import FILE_NAME, RunHistory, read_history, write_history
from tasks.errors import ArtifactError, DataError


def _filled(directory: Path, steps: range) -> Path:
    history = RunHistory.open(directory, 0)
    for step in steps:
        history.append(step, {"reward": float(step)})
    history.close()
    return history.path


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    history = RunHistory.open(tmp_path / "new" / "folder", 0)
    history.append(0, {"kl": 0.1})
    history.append(1, {"kl": 1 / 3, "reward": -2.0})
    # Before any sync or close: another process sees the line at once.
    assert read_history(history.path) == [(0, {"kl": 0.1}), (1, {"kl": 1 / 3, "reward": -2.0})]
    history.close()
    history.close()
    assert history.read()[-1][0] == 1


def test_lines_of_one_step_are_merged(tmp_path: Path) -> None:
    history = RunHistory.open(tmp_path, 0)
    history.append(3, {"reward": 1.0})
    history.append(3, {"kl_probe": 0.2})
    history.append(4, {"reward": 2.0})
    assert history.read() == [(3, {"reward": 1.0, "kl_probe": 0.2}), (4, {"reward": 2.0})]


def test_a_resume_cuts_the_steps_that_it_repeats(tmp_path: Path) -> None:
    _filled(tmp_path, range(1, 8))
    resumed = RunHistory.open(tmp_path, 5)
    assert resumed.last_step == 5
    for step in (6, 7, 8):
        resumed.append(step, {"reward": 100.0 + step})
    assert [step for step, _ in resumed.read()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [values["reward"] for _, values in resumed.read()][4:] == [5.0, 106.0, 107.0, 108.0]


def test_a_fresh_start_keeps_only_what_was_before_training(tmp_path: Path) -> None:
    _filled(tmp_path, range(0, 4))
    fresh = RunHistory.open(tmp_path, 0)
    assert fresh.read() == [(0, {"reward": 0.0})]


def test_a_resume_from_the_last_step_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = _filled(tmp_path, range(1, 4))
    before = path.read_bytes()
    RunHistory.open(tmp_path, 3).close()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("n_bytes", range(1, 40))
def test_every_torn_last_line_is_left_out_and_written_again(tmp_path: Path, n_bytes: int) -> None:
    path = _filled(tmp_path, range(1, 4))
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    assert n_bytes < len(last)
    path.write_bytes(whole[: len(whole) - n_bytes])
    assert [step for step, _ in read_history(path)] == [1, 2]
    resumed = RunHistory.open(tmp_path, 3)
    resumed.append(3, {"reward": 3.0})
    assert path.read_bytes() == whole


def test_a_tail_of_zeros_is_left_out(tmp_path: Path) -> None:
    # What a crash of the machine leaves of blocks that were reserved and not written.
    path = _filled(tmp_path, range(1, 4))
    path.write_bytes(path.read_bytes() + bytes(300) + b"\n" + bytes(20))
    assert len(read_history(path)) == 3
    assert RunHistory.open(tmp_path, 3).last_step == 3


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = _filled(tmp_path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": "two", "metrics": {}}\n' + lines[2])
    with pytest.raises(ArtifactError, match=r"line 2 is no metrics of a step, and line 3"):
        read_history(path)
    with pytest.raises(ArtifactError, match="line 2"):
        RunHistory.open(tmp_path, 3)
    # What a resume cuts may be broken.
    assert RunHistory.open(tmp_path, 1).last_step == 1


def test_values_that_are_not_finite_stay_so_in_valid_json(tmp_path: Path) -> None:
    history = RunHistory.open(tmp_path, 0)
    history.append(1, {"loss": math.nan, "up": math.inf, "down": -math.inf, "fine": 0.5})
    ((_, values),) = history.read()
    assert math.isnan(values["loss"])
    assert (values["up"], values["down"], values["fine"]) == (math.inf, -math.inf, 0.5)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(history.path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("step", [1, -1])
def test_a_step_back_is_refused(tmp_path: Path, step: int) -> None:
    history = RunHistory.open(tmp_path, 0)
    history.append(2, {})
    with pytest.raises(DataError, match="after step 2"):
        history.append(step, {})


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / FILE_NAME) == []


def test_a_written_history_is_read_back(tmp_path: Path) -> None:
    rows = [(1, {"a": 1.0}), (5, {"b": 2.5})]
    write_history(tmp_path / "copy.jsonl", rows)
    assert read_history(tmp_path / "copy.jsonl") == rows


def test_a_step_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    history = RunHistory.open(tmp_path, 0)
    metrics = {f"metric_{i}": i / 7 for i in range(60)}
    costs = []
    for step in range(1, 301):
        started = time.perf_counter()
        history.append(step, metrics)
        costs.append(time.perf_counter() - started)
    # The best of ten medians: other processes may hold up a call, or many of them in a row.
    assert min(median(costs[start : start + 30]) for start in range(0, 300, 30)) < 1e-3
