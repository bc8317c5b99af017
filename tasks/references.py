"""Artefacts, runs and versions by string: ``latest``, ``runs:/<id>``, ``models:/<name>@<alias>``,
``models:/<name>/<version>``, a path, or ``upstream:`` and one of these."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, TypeVar

from tasks.artifacts import KINDS, Artifact, ParentRef, load_artifact, read_manifest
from tasks.config import STAGES
from tasks.errors import MissingInputError
from tasks.model_registry import Registry, StudentVersion
from tasks.successors import standing_path
from tasks.tracking import PIPELINE, TRIAL, RunRecord, Tracker

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
