"""Before a stage runs: its inputs resolved and verified, its fingerprint, its lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from flows.raw_sources import raw_sources, result_fields
from flows.stages import STAGE_SPECS, StageSpec
from tasks.artifacts import Artifact, ParentRef, fingerprint, newest_artifact
from tasks.config import Stage, StageConfig
from tasks.errors import WorkspaceError
from tasks.references import LATEST, resolve_reference
from tasks.tracking import Tracker
from tasks.workspace import Workspace


@dataclass(frozen=True)
class Prepared:
    """A stage whose inputs are there and verified.

    Args:
        inputs: upstream artefacts by name.
        sources: raw upstreams by name.
        fingerprint: identity of the result.
    """

    stage: Stage
    spec: StageSpec
    cfg: StageConfig
    inputs: Mapping[str, Artifact]
    sources: Mapping[str, ParentRef]
    fingerprint: str

    @property
    def parents(self) -> dict[str, ParentRef]:
        """All upstreams, as the manifest keeps them."""
        artifacts = {name: artifact.as_parent() for name, artifact in self.inputs.items()}
        return {**artifacts, **self.sources}


def prepare(
    stage: Stage, cfg: StageConfig, refs: Mapping[str, str], tracker: Tracker, workspace: Workspace
) -> Prepared:
    """Resolve and verify all inputs of a stage and compute its fingerprint."""
    spec = STAGE_SPECS[stage]
    inputs = {
        name: resolve_reference(tracker, refs.get(name, LATEST), wanted.stage, wanted.kind)
        for name, wanted in spec.inputs.items()
    }
    sources = raw_sources(cfg, workspace)
    hashes = {name: artifact.fingerprint for name, artifact in inputs.items()}
    hashes |= {name: source.fingerprint for name, source in sources.items()}
    identity = fingerprint(stage, spec.code_version, result_fields(cfg), hashes)
    return Prepared(stage, spec, cfg, inputs, sources, identity)


def finished_artifact(prepared: Prepared, workspace: Workspace) -> Artifact | None:
    """Return the verified artefact that a run of this stage would make again, if there is one.

    Raises:
        ArtifactError: it is there, but torn or edited.
    """
    directory = workspace.artifacts_dir(prepared.stage)
    return newest_artifact(directory, prepared.spec.kind, prepared.fingerprint)


@contextmanager
def exclusive(workspace: Workspace, prepared: Prepared) -> Iterator[None]:
    """Hold the stage's lock: two runs with one fingerprint would share a checkpoint directory."""
    directory = workspace.cache_dir / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{prepared.stage}-{prepared.fingerprint[:16]}"
    with file.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.seek(0)
            holder = handle.read()
            where = f"process {holder}" if holder else "another process"
            raise WorkspaceError(
                f"Stage {prepared.stage} with this config is running in {where} ({file})",
                "one run at a time",
                "wait until it is done and start this run again, which reuses its result;"
                " or end that process",
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        # The kernel frees the lock with the process, so a killed run does not block the next one.
        yield
