"""Lineage: from any artefact back to the raw files, with hashes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from tasks.artifacts import (
    KINDS,
    MANIFEST_NAME,
    Artifact,
    Manifest,
    ParentRef,
    file_sha256,
    likeness,
    load_any_artifact,
    load_artifact,
    read_manifest,
    standing_path,
)
from tasks.config.shared import STAGES, UNNAMED, SourceConfig
from tasks.data.source import digest_of, find_files
from tasks.errors import ArtifactError, MissingInputError
from tasks.tracking.mlflow import PIPELINE, TRIAL, RunRecord, Tracker
from tasks.tracking.registry import Registry, StudentVersion
from tasks.workspace import is_elsewhere

# Artefacts, runs and versions by string: ``latest``, ``runs:/<id>``, ``models:/<name>@<alias>``,
# ``models:/<name>/<version>``, a path, or ``upstream:`` and one of these.

LATEST = "latest"
RUNS = "runs:/"
MODELS = "models:/"
UPSTREAM = "upstream:"
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")

A = TypeVar("A", bound=Artifact)


def resolve_reference(tracker: Tracker, ref: str, stage: str, kind: type[A]) -> A:
    """Return the verified artefact that a reference names.

    Args:
        tracker: the experiment to look in.
        ref: ``latest`` or the stage's name (its newest FINISHED run), ``runs:/<id>`` (a stage's
            run, or a pipeline run, which stands for its ``stage``), ``models:/<name>@<alias>``,
            ``models:/<name>/<version>``, a path, or ``upstream:<ref>`` (what the artefact behind
            ``ref`` stands on).
        stage: which stage makes it.
        kind: what it must be.

    Raises:
        MissingInputError: nothing is behind the reference; the message says how to make it.
        ArtifactError: what is there is of another kind, torn or edited.
    """
    path = locate(tracker, ref, stage)
    try:
        return load_artifact(path, kind)
    except MissingInputError as error:
        raise MissingInputError(
            f"Reference {ref!r} leads to {path}, which is not there",
            f"the {kind.KIND} that {stage} writes",
            f"run `rlhf run --only {stage}`, or give another reference",
        ) from error


def locate(tracker: Tracker, ref: str, stage: str) -> Path:
    """Return the path that a reference names, without looking at it.

    Raises:
        MissingInputError: MLflow knows no such run, model or alias.
    """
    text = ref.strip()
    if text.startswith(UPSTREAM):
        start = locate(tracker, text.removeprefix(UPSTREAM), stage)
        return _upstream_path(start, ref, stage)
    if text in STAGES and text != stage:
        raise MissingInputError(
            f"Reference {ref!r} is a stage, but not the one that makes this",
            f"{stage}, or a reference to its result",
            f"give {stage!r}, a run, a version or a path (./{text} for a directory of that name)",
        )
    if text in (LATEST, stage):
        run = tracker.latest_finished(stage)
        if run is None:
            raise _nothing_finished(tracker, ref, stage)
        return _artifact_path(tracker, run, ref, stage)
    run = named_run(tracker, text)
    if run is not None:
        return _artifact_path(tracker, run, ref, stage)
    return Path(text).expanduser().absolute()


def _nothing_finished(tracker: Tracker, ref: str, stage: str) -> MissingInputError:
    found = f"Reference {ref!r}: experiment {tracker.experiment!r} has no finished {stage}"
    fix = f"run `rlhf run --only {stage}` first, or give a path"
    trials = tracker.find_runs({"stage": stage, TRIAL: "true"}, "FINISHED", limit=1)
    if trials:
        found += " but trials of an ablation"
        fix += f", or name a trial (runs:/{trials[0].run_id} is the newest)"
    return MissingInputError(found, "one to start from", fix)


def named_run(tracker: Tracker, ref: str) -> RunRecord | None:
    """Return the run that a reference names; None for a path or a word.

    Raises:
        MissingInputError: MLflow knows no such run, model, version or alias.
    """
    text = ref.strip()
    if text.startswith(RUNS):
        return tracker.read_run(text.removeprefix(RUNS).strip("/"))
    if _RUN_ID.fullmatch(text) and not Path(text).exists():
        return tracker.read_run(text)
    if not text.startswith(MODELS):
        return None
    _, version = registered_version(tracker, text)
    if not version.run_id:
        raise MissingInputError(
            f"Reference {ref!r}: version {version.version} of {version.name} was made by no run",
            "a version that a run of this project registered",
            "give another version",
        )
    return tracker.read_run(version.run_id)


def registered_version(tracker: Tracker, ref: str) -> tuple[Registry, StudentVersion]:
    """Return a version of a registered model, and the model.

    Args:
        tracker: where it is registered.
        ref: ``models:/<name>@<alias>`` or ``models:/<name>/<version>``; of this experiment's
            students also a number, an alias, or ``runs:/<id>`` of the run that made one.

    Raises:
        MissingInputError: no such model, version or alias.
    """
    text = ref.strip()
    if text.startswith(MODELS):
        name, separator, which = text.removeprefix(MODELS).rpartition("@" if "@" in text else "/")
        if not name or not which or (separator == "/" and not which.isdigit()):
            raise MissingInputError(
                f"Reference {ref!r} cannot be read",
                "models:/<name>@<alias> or models:/<name>/<version>",
                "add the alias",
            )
        registry = Registry(tracker, name)
        if separator == "@":
            return registry, registry.aliased(which)
        return registry, registry.version(int(which))
    registry = Registry(tracker)
    if text.isdigit():
        return registry, registry.version(int(text))
    run = named_run(tracker, text)
    if run is None:
        return registry, registry.aliased(text)
    found = registry.of_run(run.run_id)
    if found is None:
        is_trial = TRIAL in run.tags
        raise MissingInputError(
            f"Reference {ref!r}: run {run.run_id} of {run.stage or 'no stage'} made no version of "
            f"{registry.name}" + (": it is a trial of an ablation" if is_trial else ""),
            "a run of distill in a chain" if is_trial else "a run of distill",
            "run a chain with the trial's settings, which registers its student"
            if is_trial
            else "give the number of a version",
        )
    return registry, found


def _upstream_path(start: Path, ref: str, stage: str) -> Path:
    """Walk from an artefact up to the nearest one that ``stage`` made, itself included."""
    level, seen = [start], {start}
    while level:
        manifests = {path: read_manifest(path) for path in level}
        for path, manifest in manifests.items():
            if manifest.stage == stage:
                return path
        parents = [parent for found in manifests.values() for parent in found.parents.values()]
        level = [path for path in map(_artifact_dir, parents) if path is not None]
        level = [path for path in dict.fromkeys(level) if path not in seen]
        seen.update(level)
    raise MissingInputError(
        f"Reference {ref!r}: {start} stands on no artefact of {stage}",
        f"one that has a {stage} among its upstreams",
        "give another reference; `rlhf lineage` shows what an artefact stands on",
    )


def _artifact_dir(parent: ParentRef) -> Path | None:
    """Return where an upstream artefact lies; None for a raw file or model."""
    return standing_path(parent) if parent.kind in KINDS else None


def _artifact_path(tracker: Tracker, run: RunRecord, ref: str, stage: str) -> Path:
    if run.is_deleted:
        raise MissingInputError(
            f"Reference {ref!r}: run {run.run_id} was deleted",
            "an active run",
            f"`mlflow runs restore --run-id {run.run_id}`, or give another reference",
        )
    if run.stage == PIPELINE:
        return _pipeline_path(run, ref, stage)
    path = run.tags.get("artifact.path")
    if path is None or run.status != "FINISHED":
        raise MissingInputError(
            f"Reference {ref!r}: run {run.run_id} of {run.stage or 'no stage'} is {run.status}"
            + ("" if path else " and has no artefact"),
            "a FINISHED run with an artefact",
            f"run `rlhf run --only {stage}` again, or give another reference",
        )
    return Path(path)


def _pipeline_path(run: RunRecord, ref: str, stage: str) -> Path:
    outcome = run.tags.get(f"outcome.{stage}")
    if outcome is None:
        raise MissingInputError(
            f"Reference {ref!r}: pipeline run {run.run_id} has no finished {stage}",
            f"a pipeline run that got as far as {stage}",
            "run the chain again, or give another reference",
        )
    return Path(json.loads(outcome)["artifact"])


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

    def told(self, status: Status, note: str = "") -> LineageNode:
        """Return the node with another status."""
        return self.model_copy(update={"status": status, "note": note})

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


def last_finished(pipeline: RunRecord) -> str | None:
    """Return the id of the run of the last stage that a chain finished."""
    outcomes = [json.loads(pipeline.tags.get(f"outcome.{stage}", "{}")) for stage in STAGES]
    made = [outcome["mlflow_run_id"] for outcome in outcomes if outcome.get("mlflow_run_id")]
    return made[-1] if made else None


def _last_stage(tracker: Tracker, pipeline: RunRecord, ref: str) -> RunRecord:
    run_id = last_finished(pipeline)
    if run_id is not None:
        return tracker.read_run(run_id)
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
        if self.is_deep:
            try:
                load_any_artifact(path)
                node = node.told("verified")
            except (ArtifactError, MissingInputError) as error:
                return node.told("torn", error.found)
        note = self._run_note(manifest.mlflow_run_id)
        return node.told("untracked", note) if note else node

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
        first = recorded_manifest(self.tracker, parent.mlflow_run_id)
        note = f"made again, {likeness(first, manifest)}; {parent.path} is gone"
        return node.told("remade", note)

    def _from_run(self, parent: ParentRef, status: Status, reason: str) -> LineageNode:
        node = LineageNode(**parent.model_dump(), status=status, note=reason)
        if parent.mlflow_run_id is None:
            return node.told(status, f"{reason}, and no MLflow run is recorded")
        try:
            run = self.tracker.read_run(parent.mlflow_run_id)
        except MissingInputError:
            return node.told(status, f"{reason}, and so is MLflow run {parent.mlflow_run_id}")
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
            return node.told(status, f"{node.note}, which was deleted")
        is_away = status == "missing" and is_elsewhere(run.tags.get("workspace", ""))
        return _away(node, run) if is_away else node


def _away(node: LineageNode, run: RunRecord) -> LineageNode:
    note = f"in workspace {run.tags['workspace']}; as MLflow run {run.run_id} recorded it"
    return node.told("elsewhere", note)


def recorded_manifest(tracker: Tracker, run_id: str | None) -> Manifest | None:
    """Return the copy that MLflow has of the manifest of a run's artefact; None without one."""
    text = tracker.read_text(run_id, MANIFEST_NAME) if run_id else None
    with suppress(ValidationError):
        return None if text is None else Manifest.model_validate_json(text)
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
    node = LineageNode(**parent.model_dump(), status="present")
    path = Path(parent.path)
    if parent.kind == "hub" or (parent.kind == "model" and path.exists()):
        return node
    digest = None
    if parent.kind == "files":
        with suppress(MissingInputError):
            digest = digest_of(find_files(SourceConfig(name=UNNAMED, path=parent.path)))
    elif parent.kind == "file" and path.exists():
        digest = file_sha256(path)
    if digest is None:
        # A hub model is named by its id, which is no path here.
        return node.told("missing", "nothing is at this path now")
    if digest == parent.fingerprint:
        return node.told("verified")
    return node.told("changed", f"SHA-256 {digest[:12]}... now, so it is not the one that was read")
