"""Lineage: from any artefact back to the raw files, with hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from tasks.artifacts import (
    MANIFEST_NAME,
    Manifest,
    ParentRef,
    file_sha256,
    load_any_artifact,
    read_manifest,
)
from tasks.config import STAGES, SourceConfig
from tasks.data.inputs import UNNAMED, digest_of, find_files
from tasks.errors import ArtifactError, MissingInputError
from tasks.provenance import is_elsewhere
from tasks.references import LATEST, named_run
from tasks.successors import likeness, standing_path
from tasks.tracking import PIPELINE, RunRecord, Tracker

RAW_KINDS = ("file", "files", "hub", "model")

Status = Literal[
    "present",
    "verified",
    "remade",
    "elsewhere",
    "changed",
    "missing",
    "torn",
    "mismatch",
    "untracked",
    "unfinished",
]
_SOUND = ("present", "verified", "remade", "elsewhere")


class LineageNode(BaseModel):
    """One artefact or raw source.

    ``present``: the manifest was read. ``verified``: a raw file that still has the recorded hash,
    or an artefact whose files were all checked. ``remade``: what was used is gone, and the newest
    artefact of its fingerprint stands for it; the note says whether it has the same bits.
    ``elsewhere``: in a workspace of another machine, so that its MLflow run speaks for it. Broken:
    ``changed``, a raw file with another hash; ``missing``, nothing is at the path; ``torn``, the
    artefact cannot be read or is not what was written; ``mismatch``, another artefact is at the
    path; ``untracked``, its MLflow run was deleted or is in another MLflow; ``unfinished``, a run
    that made nothing.
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
        """Return this node and all above it, each once."""
        seen: dict[str, LineageNode] = {}
        stack = [self]
        while stack:
            node = stack.pop()
            if node.key not in seen:
                seen[node.key] = node
                stack.extend(reversed(node.parents.values()))
        return list(seen.values())

    @property
    def key(self) -> str:
        """What tells this node from all others of its tree."""
        return self.path or self.mlflow_run_id or self.fingerprint

    @property
    def broken(self) -> list[LineageNode]:
        """The nodes whose link does not hold."""
        return [node for node in self.walk() if node.status not in _SOUND]


def lineage_tree(tracker: Tracker, ref: str, *, is_deep: bool = False) -> LineageNode:
    """Walk from an artefact, a run or a registered version back to the raw sources.

    Manifests lead the way. Where an artefact's directory is gone, or on another machine, the tags
    of its MLflow run do.

    Args:
        tracker: the experiment to look in.
        ref: a path, ``runs:/<id>``, ``models:/<name>@<alias>``, ``models:/<name>/<version>``, the
            name of a stage (its newest finished run), or ``latest`` (the newest run of the last
            stage that has finished ones).
        is_deep: check the hash of every file of every artefact, too.

    Raises:
        MissingInputError: nothing is behind the reference.
    """
    walker = _Walker(tracker, is_deep)
    run = _root_run(tracker, ref)
    if run is None:
        path = Path(ref.strip()).expanduser().absolute()
        return walker.from_manifest(path, read_manifest(path))
    if run.stage == PIPELINE:
        run = _last_stage(tracker, run, ref)
    return walker.from_run(run)


def _root_run(tracker: Tracker, ref: str) -> RunRecord | None:
    """Return the run that a reference leads to; None for a path."""
    is_stage = ref in STAGES and not Path(ref).exists()
    if not is_stage and ref != LATEST:
        return named_run(tracker, ref)
    for stage in (ref,) if is_stage else reversed(STAGES):
        found = tracker.latest_finished(stage)
        if found is not None:
            return found
    raise MissingInputError(
        f"Experiment {tracker.experiment!r} has no finished {ref if is_stage else 'run'}",
        "one to trace",
        f"run `rlhf run{f' --only {ref}' if is_stage else ''}` first",
    )


def _last_stage(tracker: Tracker, pipeline: RunRecord, ref: str) -> RunRecord:
    """Return the run of the last stage that a chain finished."""
    for stage in reversed(STAGES):
        outcome = json.loads(pipeline.tags.get(f"outcome.{stage}", "{}"))
        if outcome.get("mlflow_run_id"):
            return tracker.read_run(outcome["mlflow_run_id"])
    raise MissingInputError(
        f"Reference {ref!r}: chain {pipeline.run_id} is {pipeline.status} and finished no stage",
        "a chain that finished one",
        "give another reference",
    )


class _Walker:
    """Builds the tree; a shared ancestor is read once."""

    def __init__(self, tracker: Tracker, is_deep: bool) -> None:
        self.tracker = tracker
        self.is_deep = is_deep
        self.known: dict[tuple[str, str], LineageNode] = {}

    def from_run(self, run: RunRecord) -> LineageNode:
        """Start from a run: its artefact, or what its tags say when there is none."""
        path = run.tags.get("artifact.path")
        ref = ParentRef(
            kind=run.tags.get("artifact.kind", f"run of {run.stage or 'no stage'}"),
            fingerprint=run.tags.get("fingerprint", ""),
            path=path or "",
            mlflow_run_id=run.run_id,
        )
        if path is not None:
            return self._read(ref)
        reason = f"the run is {run.status} and has no artefact"
        if "failure" in run.tags:
            reason += f": {run.tags['failure']}"
        return self._from_tags(ref, run, "unfinished", reason)

    def from_manifest(self, path: Path, manifest: Manifest) -> LineageNode:
        node = LineageNode(
            kind=manifest.kind,
            stage=manifest.stage,
            fingerprint=manifest.fingerprint,
            path=str(path),
            mlflow_run_id=manifest.mlflow_run_id,
            created_at=manifest.created_at,
            status="present",
            parents={name: self.follow(parent) for name, parent in manifest.parents.items()},
        )
        return node.model_copy(update=self._verdict(path, manifest))

    def _verdict(self, path: Path, manifest: Manifest) -> dict[str, str]:
        """Return the status of an artefact whose manifest is sound."""
        status: Status = "present"
        if self.is_deep:
            try:
                load_any_artifact(path)
                status = "verified"
            except (ArtifactError, MissingInputError) as error:
                return {"status": "torn", "note": error.found}
        note = self._run_note(manifest.mlflow_run_id)
        return {"status": "untracked", "note": note} if note else {"status": status}

    def _run_note(self, run_id: str | None) -> str:
        """Return what is wrong with an artefact's run; nothing when it has none."""
        if run_id is None:
            return ""
        try:
            run = self.tracker.read_run(run_id)
        except MissingInputError:
            return (
                f"no MLflow run {run_id} at {self.tracker.shown_uri}; --tracking-uri names another"
            )
        if run.is_deleted:
            return f"MLflow run {run_id} was deleted: `mlflow runs restore --run-id {run_id}`"
        return ""

    def follow(self, parent: ParentRef, child: RunRecord | None = None) -> LineageNode:
        key = (parent.path, parent.fingerprint)
        if key not in self.known:
            self.known[key] = self._read(parent, child)
        return self.known[key]

    def _read(self, parent: ParentRef, child: RunRecord | None = None) -> LineageNode:
        """Read an artefact or a raw source; ``child`` is the run that used it, if it leads here."""
        if parent.kind in RAW_KINDS:
            node = _raw_node(parent)
            is_away = child is not None and is_elsewhere(child.tags.get("workspace", ""))
            return _away(node, child) if child and is_away and node.status == "missing" else node
        path = standing_path(parent)
        try:
            manifest = read_manifest(path)
        except MissingInputError:
            return self._from_run(parent, "missing", "the directory is gone")
        except ArtifactError as error:
            return self._from_run(parent, "torn", error.found)
        if parent.fingerprint and manifest.fingerprint != parent.fingerprint:
            found = f"the directory now holds {manifest.fingerprint[:12]}"
            return self._from_run(parent, "mismatch", found)
        node = self.from_manifest(path, manifest)
        if path == Path(parent.path) or node.status not in _SOUND:
            return node
        first = recorded_manifest(self.tracker, parent)
        note = f"made again, {likeness(first, manifest)}; {parent.path} is gone"
        return node.model_copy(update={"status": "remade", "note": note})

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
        return self._from_tags(parent, run, status, reason)

    def _from_tags(
        self, parent: ParentRef, run: RunRecord, status: Status, reason: str
    ) -> LineageNode:
        """Build a node from the tags of its run."""
        parents = {name: self.follow(ref, run) for name, ref in upstreams_of(run).items()}
        node = LineageNode(
            **parent.model_dump(),
            status=status,
            note=f"{reason}; its parents are from MLflow run {run.run_id}",
            stage=run.stage,
            parents=parents,
        )
        if run.is_deleted:
            return node.model_copy(update={"note": f"{node.note}, which was deleted"})
        is_away = status == "missing" and is_elsewhere(run.tags.get("workspace", ""))
        return _away(node, run) if is_away else node


def _away(node: LineageNode, run: RunRecord) -> LineageNode:
    note = f"in workspace {run.tags['workspace']}; as MLflow run {run.run_id} recorded it"
    return node.model_copy(update={"status": "elsewhere", "note": note})


def recorded_manifest(tracker: Tracker, parent: ParentRef) -> Manifest | None:
    """Return the copy that MLflow has of an artefact's manifest; None when it has none."""
    try:
        text = (
            tracker.read_text(parent.mlflow_run_id, MANIFEST_NAME) if parent.mlflow_run_id else None
        )
        return None if text is None else Manifest.model_validate_json(text)
    except ValidationError:
        return None


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
