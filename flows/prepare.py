"""Before a stage runs: its inputs resolved and verified, its fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flows.raw_sources import raw_sources, result_fields
from flows.stages import STAGE_SPECS, StageSpec
from tasks.artifacts import Artifact, ParentRef, fingerprint, newest_artifact
from tasks.config import Stage, StageConfig
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
