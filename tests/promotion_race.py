"""A process that tries to make its student the champion, at the same moment as another one."""

from __future__ import annotations

from multiprocessing.synchronize import Barrier
from typing import Any

from tasks.errors import PromotionError
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import Move, Promotion, Registry, champion_of, move_champion

ROUNDS = 3
_WAIT_SECONDS = 60


class _MeetingRegistry(Registry):
    """Writes to the ledger only when the other process, too, is about to."""

    barrier: Barrier

    def claim(self, move: Move) -> bool:
        self.barrier.wait(_WAIT_SECONDS)
        return super().claim(move)


def compete(tracker: Tracker, mine: int, barrier: Barrier, results: Any) -> None:
    """Try in each round to replace the champion that both saw at its start.

    Puts the round, the version, whether it won, and the ledger's run into the queue.
    """
    for number in range(ROUNDS):
        registry = _MeetingRegistry(tracker)
        registry.barrier = barrier
        expected = champion_of(registry)
        barrier.wait(_WAIT_SECONDS)
        try:
            move_champion(registry, Promotion(mine, expected, "a racer", f"round {number}"))
            has_won = True
        except PromotionError:
            has_won = False
        results.put((number, mine, has_won, registry._ledger))
        barrier.wait(_WAIT_SECONDS)
