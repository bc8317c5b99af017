"""Artefacts by string: ``latest``, ``runs:/<id>``, ``models:/<name>@<alias>`` or a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from tasks.artifacts import Artifact, load_artifact
from tasks.errors import MissingInputError
from tasks.tracking import PIPELINE, RunRecord, Tracker

LATEST = "latest"
RUNS = "runs:/"
MODELS = "models:/"

A = TypeVar("A", bound=Artifact)


def resolve_reference(tracker: Tracker, ref: str, stage: str, kind: type[A]) -> A:
    """Return the verified artefact that a reference names.

    Args:
        tracker: the experiment to look in.
        ref: ``latest`` (the newest FINISHED run of ``stage``), ``runs:/<id>`` (a stage's run, or a
            pipeline run, which stands for its ``stage``), ``models:/<name>@<alias>``, or a path.
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
    if text == LATEST:
        run = tracker.latest_finished(stage)
        if run is None:
            raise MissingInputError(
                f"Reference {ref!r}: experiment {tracker.experiment!r} has no finished {stage}",
                "one to start from",
                f"run `rlhf run --only {stage}` first, or give a path",
            )
        return _artifact_path(tracker, run, ref, stage)
    if text.startswith(RUNS):
        run = tracker.read_run(text.removeprefix(RUNS).strip("/"))
        return _artifact_path(tracker, run, ref, stage)
    if text.startswith(MODELS):
        name, at, alias = text.removeprefix(MODELS).partition("@")
        if not at or not name or not alias:
            raise MissingInputError(
                f"Reference {ref!r} cannot be read", "models:/<name>@<alias>", "add the alias"
            )
        return _artifact_path(
            tracker, tracker.read_run(tracker.run_of_alias(name, alias)), ref, stage
        )
    return Path(text).expanduser().absolute()


def _artifact_path(tracker: Tracker, run: RunRecord, ref: str, stage: str) -> Path:
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
