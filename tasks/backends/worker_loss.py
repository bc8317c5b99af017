"""Tells the loss of a worker process or its node from errors of the code that runs there.

A node that dies is seen three times, in any order: the other ranks find their connection to it
broken (at once), its own calls fail (seconds later), and Ray declares it dead (ten seconds later
when its processes were killed, a minute when it just fell silent). `ray.get` of several calls
returns at the first of these, even while other ranks wait in a collective for ever.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tasks.errors import WorkerLostError

# How long Ray may take to notice what a broken connection already told.
_DEATH_SECONDS = 30.0
# An error of the code itself on one rank, while another waits for it in a collective.
_DOUBT_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_REASON_CHARACTERS: Final = 300

_COLLECTIVES: Final = re.compile(r"gloo/transport|TCPStore|NCCL", re.IGNORECASE)
_BROKEN: Final = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|likely closed)|broken pipe|"
    r"caused pair closure|timed out|remote process exited|network error|recv(Value)? failed",
    re.IGNORECASE,
)
_NODE_MEMORY: Final = re.compile(
    r"Memory on the node \(IP: ([^,]+), ID: \w+\) was (\S+) used / (\S+) limit"
)
_NODE_DEATH: Final = re.compile(r"node has died\.?\s*Node Id: (\w{8})", re.IGNORECASE)


@dataclass(frozen=True)
class Answers:
    """What became of a question to all ranks.

    Args:
        dead: what Ray says of each rank that is gone.
        silent: ranks that neither answered nor are known to be gone.
    """

    dead: dict[int, Exception]
    silent: set[int]


def ask(workers: Sequence[Any], seconds: float) -> Answers:
    """Ask all ranks at once whether they are there, until all have answered, or some are known to
    be gone, or the time is over."""
    import ray

    deadline = time.monotonic() + seconds
    asked = {worker.__ray_ready__.remote(): rank for rank, worker in enumerate(workers)}
    dead: dict[int, Exception] = {}
    while asked and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(asked), timeout=min(left, _RETRY_SECONDS))
        for call in ready:
            rank = asked.pop(call)
            try:
                ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                # Not known to be dead yet.
                time.sleep(_RETRY_SECONDS)
                asked[workers[rank].__ray_ready__.remote()] = rank
            except ray.exceptions.RayError as error:
                dead[rank] = error
        if dead:
            # Ranks that died together are told together.
            deadline = min(deadline, time.monotonic() + _RETRY_SECONDS)
    return Answers(dead, set(asked.values()))


def loss_of(error: Exception, workers: Sequence[Any], whose: str = "") -> WorkerLostError | None:
    """Return what an error of a call to all ranks tells of lost ones; None when the code that runs
    there raised it."""
    is_loss = _is_gone(error) or _is_broken_connection(error)
    dead = ask(workers, _DEATH_SECONDS if is_loss else _DOUBT_SECONDS).dead
    return lost_error(error, dead, len(workers), whose) if dead or is_loss else None


def lost_error(
    error: Exception, dead: Mapping[int, Exception], n_ranks: int, whose: str = ""
) -> WorkerLostError:
    """Return the error that tells the loss in one line.

    Args:
        error: of the call.
        dead: what Ray says of each rank that is gone; empty when none is known.
        n_ranks: in all.
        whose: says which group of ranks it is, where there are several.
    """
    import ray

    told = [*dead.values(), error]
    memory = [found for found in told if isinstance(found, ray.exceptions.OutOfMemoryError)]
    reason = _reason((memory or told)[0])
    found = f"Rank {', '.join(map(str, sorted(dead)))} of {n_ranks}{whose} died: {reason}"
    if not dead:
        found = f"The {n_ranks} ranks{whose} lost a worker or their connection: {reason}"
    fix = "look at the node's log"
    if memory:
        fix = (
            "free memory on that node, give it fewer ranks (runtime.ranks, runtime.nodes), or "
            "lower runtime.tokens_per_micro_batch"
        )
    return WorkerLostError(
        found,
        "workers that live until the stage ends",
        f"{fix}; the stage, started again, continues from its last checkpoint",
    )


def _is_gone(error: Exception) -> bool:
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.NodeDiedError
        | exceptions.LocalRayletDiedError
        | exceptions.WorkerCrashedError
        | exceptions.OutOfMemoryError
        | exceptions.ObjectLostError
        | exceptions.ActorPlacementGroupRemoved
        | exceptions.ActorUnschedulableError,
    )


def _is_broken_connection(error: Exception) -> bool:
    """Tell whether a collective failed because another rank does not answer any more."""
    from torch.distributed import DistError

    text = str(error)
    of_collective = isinstance(error, DistError) or _COLLECTIVES.search(text) is not None
    return of_collective and _BROKEN.search(text) is not None


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if memory := _NODE_MEMORY.search(text):
        address, used, limit = memory.groups()
        return f"its node {address} ran low on memory ({used} of {limit} in use) and Ray ended it"
    if node := _NODE_DEATH.search(text):
        return f"its node {node[1]} died"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(error)]
    process = [line for line in lines if line.startswith("The actor is dead because")]
    return (process or lines[-1:])[0].split(". ")[0][:_REASON_CHARACTERS]
