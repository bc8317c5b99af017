"""Work in several calls to the workers, of one role or of several at the same time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tasks.backends.worker_group import watched

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A call that the ranks of a group work at.

    Args:
        group: verl's handle of the ranks.
        future: verl's, of what they return.
        whose: says which group it is, where there are several.
    """

    group: Any
    future: Any
    whose: str = ""

    def wait(self) -> Any:
        """Return what the ranks return.

        Raises:
            WorkerLostError, MemoryLimitError: see `watched`.
        """
        with watched(self.group, self.whose):
            return self.future.get()


# Yields calls, is sent what each of them returned, and returns what was wanted of them all.
Job = Generator[Call, Any, T]


def together(jobs: Sequence[Job[T]]) -> list[T]:
    """Return what the jobs return, with one call of each at work at any time.

    The first error ends them all; what ranks still compute then comes before their next call.
    """
    found: dict[int, T] = {}
    at_work: dict[int, Call] = {}

    def go_on(index: int, result: Any) -> None:
        at_work.pop(index, None)
        try:
            at_work[index] = jobs[index].send(result)
        except StopIteration as done:
            found[index] = done.value

    for index in range(len(jobs)):
        go_on(index, None)
    while at_work:
        for index, call in list(at_work.items()):
            go_on(index, call.wait())
    return [found[index] for index in range(len(jobs))]
