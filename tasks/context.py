"""What a stage needs to know about the run it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from tasks.artifacts import Artifact, Draft, ParentRef, build_artifact, newest_artifact
from tasks.errors import ArtifactError
from tasks.workspace import Workspace


def run_logger(stage: str) -> logging.Logger | logging.LoggerAdapter[Any]:
    """Return Prefect's logger of the current run, or a plain one outside of runs."""
    try:
        logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
    except MissingContextError:
        logger = logging.getLogger(f"rlhf.{stage}")
    return logger


A = TypeVar("A", bound=Artifact)


class RunLog(Protocol):
    """Where a stage reports while it works. Implementations are picklable and safe to call from any
    thread."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record metrics of one step; a non-finite value is refused by name and counted, the rest
        is kept."""

    def progress(self, done: float, total: float, message: str = "") -> None:
        """Show how far a long piece of work is."""

    def event(self, name: str, message: str) -> None:
        """Record something that happened, for instance a resume or a warning."""

    def trial(self, name: str, params: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Record one finished attempt of a search as a run nested under this one."""

    def file(self, path: Path, directory: str = "") -> None:
        """Attach a file (a plot, a table) to the run."""


@dataclass(frozen=True)
class StageContext:
    """One run of one stage.

    Args:
        stage: stem of the stage.
        fingerprint: identity of the result.
        inputs: verified upstream artefacts by name.
        sources: raw upstreams by name (a data file, a base model).
        checkpoint_dir: state of unfinished training with this fingerprint.
        artifacts_dir: where the finished artefact goes.
        draft: manifest to fill in.
        log: where to report.
    """

    stage: str
    fingerprint: str
    workspace: Workspace
    checkpoint_dir: Path
    artifacts_dir: Path
    draft: Draft
    log: RunLog
    inputs: Mapping[str, Artifact] = field(default_factory=dict)
    sources: Mapping[str, ParentRef] = field(default_factory=dict)

    def publish(self, kind: type[A], fill: Callable[[Path], None]) -> A:
        """Write the stage's artefact, whole or not at all, and return its verified handle.

        Args:
            kind: kind of the artefact.
            fill: writes the payload into the directory that it gets.
        """
        with build_artifact(self.artifacts_dir, self.draft) as directory:
            fill(directory)
        artifact = newest_artifact(self.artifacts_dir, kind, self.fingerprint)
        if artifact is None:
            raise ArtifactError(
                f"The artefact just written to {self.artifacts_dir} is gone",
                "nobody else removes it",
                "run the stage again",
            )
        return artifact
