"""Training state on disk, so that a killed run continues where its last complete checkpoint
stands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.backends.session import Session
from tasks.errors import ArtifactError, MemoryLimitError, WorkerLostError

_PREFIX = "step-"
_STATE_FILE = "trainer.pt"
_POINTERS_FILE = "pointers.json"


@dataclass(frozen=True)
class CheckpointStore:
    """Complete checkpoints of one training run, ``step-00000050/`` and so on.

    Args:
        directory: holds checkpoints of exactly one stage fingerprint.
        keep: how many stay.
    """

    directory: Path
    keep: int

    def latest_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 when there is none."""
        return max(self._steps(), default=0)

    @property
    def is_empty(self) -> bool:
        """Whether there is no complete checkpoint, not even one of step 0."""
        return not self._steps()

    def save(
        self,
        step: int,
        session: Session,
        roles: Sequence[str],
        state: dict[str, Any],
        pointers: Mapping[str, int] | None = None,
    ) -> None:
        """Write a checkpoint; it gets its name only when complete.

        Args:
            step: optimizer steps done.
            session: holds the roles.
            roles: roles whose weights, optimizer, schedule and random state are kept.
            state: tensors and plain values of the driver: sampler, window, best step.
            pointers: steps of checkpoints that stay, by what they are ("best"); written to
                ``pointers.json`` together with the newest one.
        """
        final = self.directory / f"{_PREFIX}{step:08d}"
        temporary = self.directory / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            for role in roles:
                session.save(role, temporary / role)
            with (temporary / _STATE_FILE).open("wb") as handle:
                torch.save(state, handle)
                handle.flush()
                os.fsync(handle.fileno())
        except BaseException:
            # On a full disk it would hold the space that everything else lacks.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        self._point({**(pointers or {}), "last": step})

    def restore(self, step: int, session: Session, roles: Sequence[str]) -> dict[str, Any]:
        """Load the checkpoint of a step into the roles and return the driver's state.

        Raises:
            ArtifactError: the checkpoint cannot be read.
        """
        directory = self.directory / f"{_PREFIX}{step:08d}"
        try:
            state: dict[str, Any] = torch.load(directory / _STATE_FILE, weights_only=True)
            for role in roles:
                session.restore(role, directory / role)
        except (WorkerLostError, MemoryLimitError):
            raise
        # A torn file raises whatever its bytes lead torch to, here or in a worker.
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[-1]
            raise ArtifactError(
                f"Checkpoint {directory} cannot be read: {reason}",
                "a complete checkpoint",
                f"remove {directory} to continue from the one before it",
            ) from error
        return state

    def _steps(self) -> list[int]:
        found = self.directory.glob(f"{_PREFIX}*")
        return sorted(int(path.name.removeprefix(_PREFIX)) for path in found if path.is_dir())

    def _point(self, pointers: Mapping[str, int]) -> None:
        """Write the pointers, then remove what none of them needs."""
        temporary = self.directory / f".tmp-{_POINTERS_FILE}"
        temporary.write_text(json.dumps(dict(pointers), indent=2) + "\n")
        temporary.replace(self.directory / _POINTERS_FILE)
        kept = set(self._steps()[-self.keep :]) | set(pointers.values())
        for step in self._steps():
            if step not in kept:
                shutil.rmtree(self.directory / f"{_PREFIX}{step:08d}")
