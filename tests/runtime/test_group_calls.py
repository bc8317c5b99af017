"""Calls of several jobs at the same time, by the order in which they are started and waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tasks.runtime.session import Call, Job, together


@dataclass
class Diary:
    """Notes what happens, in order."""

    lines: list[str] = field(default_factory=list)

    def job(self, name: str, n_calls: int) -> Job[list[str]]:
        """Make so many calls and return what came back."""
        found = []
        for index in range(n_calls):
            self.lines.append(f"start {name}{index}")
            found.append((yield Call(None, Answer(f"{name}{index}", self))))
        return found


@dataclass
class Answer:
    """Stands for verl's future."""

    name: str
    diary: Diary

    def get(self) -> Any:
        self.diary.lines.append(f"got {self.name}")
        if self.name == "b1":
            raise RuntimeError("b1 failed")
        return self.name


def test_a_call_of_each_job_is_always_at_work() -> None:
    diary = Diary()
    assert together([diary.job("a", 3), diary.job("c", 2)]) == [["a0", "a1", "a2"], ["c0", "c1"]]
    started = ["start a0", "start c0"]
    first = ["got a0", "start a1", "got c0", "start c1"]
    assert diary.lines == [*started, *first, "got a1", "start a2", "got c1", "got a2"]


def test_one_job_waits_for_each_call() -> None:
    diary = Diary()
    assert together([diary.job("a", 2)]) == [["a0", "a1"]]
    assert diary.lines == ["start a0", "got a0", "start a1", "got a1"]


def test_jobs_without_calls_are_done_at_once() -> None:
    diary = Diary()
    assert together([diary.job("a", 0), diary.job("c", 1)]) == [[], ["c0"]]
    assert together([]) == []


def test_the_first_error_ends_all_jobs() -> None:
    diary = Diary()
    with pytest.raises(RuntimeError, match="b1 failed"):
        together([diary.job("a", 5), diary.job("b", 5)])
    assert diary.lines[-2:] == ["start a2", "got b1"]
