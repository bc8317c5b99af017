"""Lineage: from any artefact back to the raw files, with hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from tasks.artifacts import Manifest, ParentRef, file_sha256, read_manifest
from tasks.config import STAGES, SourceConfig
from tasks.data.inputs import UNNAMED, digest_of, find_files
from tasks.errors import ArtifactError, MissingInputError
from tasks.references import LATEST, locate
from tasks.tracking import RunRecord, Tracker

RAW_KINDS = ("file", "files", "hub", "model")

Status = Literal["present", "verified", "changed", "missing", "torn", "mismatch"]


class LineageNode(BaseModel):
    """One artefact or raw source.

    ``present``: the manifest was read. ``verified``: a raw file that still has the recorded hash.
    ``changed``: one that has not. ``missing``: nothing is at the path. ``torn``: the manifest
    cannot be read. ``mismatch``: another artefact than the recorded one is at the path.
    """

    kind: str
    stage: str | None = None
    fingerprint: str
    path: str
    mlflow_run_id: str | None = None
    created_at: str | None = None
    status: Status
    note: str = ""
    parents: dict[str, LineageNode] = {}

    def walk(self) -> list[LineageNode]:
        """Return this node and all above it, each path once."""
        seen: dict[str, LineageNode] = {}
        stack = [self]
        while stack:
            node = stack.pop()
            if node.path not in seen:
                seen[node.path] = node
                stack.extend(reversed(node.parents.values()))
        return list(seen.values())

    @property
    def broken(self) -> list[LineageNode]:
        """The nodes whose link does not hold."""
        return [node for node in self.walk() if node.status not in ("present", "verified")]


def lineage_tree(tracker: Tracker, ref: str) -> LineageNode:
    """Walk from an artefact back to its raw sources.

    Manifests lead the way. Where an artefact's directory is gone, the tags of its MLflow run do,
    and the gap is marked.

    Args:
        tracker: the experiment to look in.
        ref: a path, ``runs:/<id>``, ``models:/<name>@<alias>``, the name of a stage (its newest
            finished run), or ``latest`` (the newest run of the last stage that has finished ones).

    Raises:
        MissingInputError: nothing is behind the reference.
    """
    path = _root_path(tracker, ref)
    manifest = read_manifest(path)
    return _Walker(tracker).from_manifest(path, manifest)


def _root_path(tracker: Tracker, ref: str) -> Path:
    if ref in STAGES and not Path(ref).exists():
        return locate(tracker, LATEST, ref)
    if ref != LATEST:
        return locate(tracker, ref, STAGES[-1])
    for stage in reversed(STAGES):
        if tracker.latest_finished(stage) is not None:
            return locate(tracker, LATEST, stage)
    raise MissingInputError(
        f"Experiment {tracker.experiment!r} has no finished run",
        "one to trace",
        "run `rlhf run` first",
    )


class _Walker:
    """Builds the tree; a shared ancestor is read once."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.known: dict[tuple[str, str], LineageNode] = {}

    def from_manifest(self, path: Path, manifest: Manifest) -> LineageNode:
        return LineageNode(
            kind=manifest.kind,
            stage=manifest.stage,
            fingerprint=manifest.fingerprint,
            path=str(path),
            mlflow_run_id=manifest.mlflow_run_id,
            created_at=manifest.created_at,
            status="present",
            parents={name: self.follow(parent) for name, parent in manifest.parents.items()},
        )

    def follow(self, parent: ParentRef) -> LineageNode:
        key = (parent.path, parent.fingerprint)
        if key not in self.known:
            self.known[key] = self._read(parent)
        return self.known[key]

    def _read(self, parent: ParentRef) -> LineageNode:
        if parent.kind in RAW_KINDS:
            return _raw_node(parent)
        try:
            manifest = read_manifest(Path(parent.path))
        except MissingInputError:
            return self._from_run(parent, "missing", "the directory is gone")
        except ArtifactError as error:
            return self._from_run(parent, "torn", error.found)
        if manifest.fingerprint != parent.fingerprint:
            found = f"the directory now holds {manifest.fingerprint[:12]}"
            return self._from_run(parent, "mismatch", found)
        return self.from_manifest(Path(parent.path), manifest)

    def _from_run(self, parent: ParentRef, status: Status, reason: str) -> LineageNode:
        node = LineageNode(**parent.model_dump(), status=status, note=reason)
        if parent.mlflow_run_id is None:
            return node.model_copy(update={"note": f"{reason}, and no MLflow run is recorded"})
        try:
            run = self.tracker.read_run(parent.mlflow_run_id)
        except MissingInputError:
            return node.model_copy(
                update={"note": f"{reason}, and so is MLflow run {parent.mlflow_run_id}"}
            )
        parents = {name: self.follow(ref) for name, ref in upstreams_of(run).items()}
        note = f"{reason}; its parents are from MLflow run {run.run_id}"
        return node.model_copy(update={"note": note, "stage": run.stage, "parents": parents})


def upstream_tags(parents: dict[str, ParentRef]) -> dict[str, str | None]:
    """Return the tags by which an MLflow run names its upstreams."""
    tags: dict[str, str | None] = {}
    for name, parent in parents.items():
        tags[f"upstream.{name}.run_id"] = parent.mlflow_run_id
        tags[f"upstream.{name}.fingerprint"] = parent.fingerprint
        tags[f"upstream.{name}.kind"] = parent.kind
        tags[f"upstream.{name}.path"] = parent.path
    return tags


def upstreams_of(run: RunRecord) -> dict[str, ParentRef]:
    """Return the upstreams that `upstream_tags` recorded on a run."""
    names = [
        key.removeprefix("upstream.").removesuffix(".fingerprint")
        for key in run.tags
        if key.startswith("upstream.") and key.endswith(".fingerprint")
    ]
    return {
        name: ParentRef(
            kind=run.tags.get(f"upstream.{name}.kind", "unknown"),
            fingerprint=run.tags[f"upstream.{name}.fingerprint"],
            path=run.tags.get(f"upstream.{name}.path", "unknown"),
            mlflow_run_id=run.tags.get(f"upstream.{name}.run_id"),
        )
        for name in sorted(names)
    }


def _raw_node(parent: ParentRef) -> LineageNode:
    path = Path(parent.path)
    node = LineageNode(**parent.model_dump(), status="present")
    if parent.kind == "hub":
        return node
    if parent.kind == "files":
        return _files_node(parent, node)
    if not path.exists():
        # A hub model is named by its id, which is no path here.
        return node.model_copy(update={"status": "missing", "note": "nothing is at this path now"})
    if parent.kind != "file":
        return node
    digest = file_sha256(path)
    if digest == parent.fingerprint:
        return node.model_copy(update={"status": "verified"})
    note = f"the file now has SHA-256 {digest[:12]}..., so it is not the one that was read"
    return node.model_copy(update={"status": "changed", "note": note})


def _files_node(parent: ParentRef, node: LineageNode) -> LineageNode:
    try:
        digest = digest_of(find_files(SourceConfig(name=UNNAMED, path=parent.path)))
    except MissingInputError:
        return node.model_copy(update={"status": "missing", "note": "nothing is there now"})
    if digest == parent.fingerprint:
        return node.model_copy(update={"status": "verified"})
    note = f"the files now have SHA-256 {digest[:12]}..., so they are not what was read"
    return node.model_copy(update={"status": "changed", "note": note})
