"""References: every form, and what is said when nothing is behind one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.artifacts import PolicyCheckpoint, RewardModelCheckpoint, StudentAdapter
from tasks.errors import ArtifactError, MissingInputError
from tasks.tracking.lineage import resolve_reference
from tasks.tracking.mlflow import PIPELINE, Status, Tracker
from tasks.tracking.registry import Registry

Make = Callable[..., Any]


def _run_with(tracker: Tracker, artifact: Any, status: Status = "FINISHED") -> str:
    stage = artifact.manifest.stage
    tags = {"stage": stage, "artifact.path": str(artifact.path)}
    run_id = tracker.start_run(stage, tags, {})
    tracker.finish(run_id, status)
    return run_id


def test_every_form_leads_to_the_artefact(tracker: Tracker, make_artifact: Make) -> None:
    base = make_artifact("sft")
    run_id = _run_with(tracker, base)
    for ref in ("latest", "sft", f"runs:/{run_id}", f" runs:/{run_id}/ ", str(base.path)):
        assert resolve_reference(tracker, ref, "sft", PolicyCheckpoint) == base


def test_another_stage_is_refused_by_name(tracker: Tracker, make_artifact: Make) -> None:
    _run_with(tracker, make_artifact("sft"))
    with pytest.raises(MissingInputError, match=r"'sft' is a stage, but not.*give 'reward_model'"):
        resolve_reference(tracker, "sft", "reward_model", RewardModelCheckpoint)


def test_relative_path(
    tracker: Tracker, make_artifact: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_artifact("sft")
    monkeypatch.chdir(base.path.parent)
    found = resolve_reference(tracker, base.path.name, "sft", PolicyCheckpoint)
    assert found.path == base.path


def test_latest_ignores_what_did_not_finish(tracker: Tracker, make_artifact: Make) -> None:
    good = make_artifact("sft", seed=1)
    _run_with(tracker, good)
    _run_with(tracker, make_artifact("sft", seed=2), "FAILED")
    assert resolve_reference(tracker, "latest", "sft", PolicyCheckpoint) == good


def test_pipeline_run_stands_for_its_stages(tracker: Tracker, make_artifact: Make) -> None:
    base = make_artifact("sft")
    outcome = json.dumps({"artifact": str(base.path)})
    run_id = tracker.start_run("chain", {"stage": PIPELINE, "outcome.sft": outcome}, {})
    assert resolve_reference(tracker, f"runs:/{run_id}", "sft", PolicyCheckpoint) == base
    with pytest.raises(MissingInputError, match="has no finished distill"):
        resolve_reference(tracker, f"runs:/{run_id}", "distill", PolicyCheckpoint)


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("latest", r"'latest'.*no finished sft.*rlhf run --only sft"),
        ("runs:/0123", r"No MLflow run 0123"),
        ("models:/student@candidate", r"No registered model 'student' with alias 'candidate'"),
        ("models:/student/1", r"student has no version 1"),
        ("models:/student", r"'models:/student' cannot be read.*add the alias"),
        ("models:/student/one", r"'models:/student/one' cannot be read"),
        ("0123456789abcdef0123456789abcdef", r"No MLflow run 0123456789abcdef"),
        ("/nowhere/at/all", r"'/nowhere/at/all'.*not there.*--only sft"),
    ],
)
def test_nothing_behind_a_reference(tracker: Tracker, ref: str, expected: str) -> None:
    with pytest.raises(MissingInputError, match=expected):
        resolve_reference(tracker, ref, "sft", PolicyCheckpoint)


def test_run_that_failed_is_refused(tracker: Tracker, make_artifact: Make) -> None:
    run_id = _run_with(tracker, make_artifact("sft"), "FAILED")
    with pytest.raises(MissingInputError, match=f"{run_id} of sft is FAILED"):
        resolve_reference(tracker, f"runs:/{run_id}", "sft", PolicyCheckpoint)


def test_run_without_artefact_is_refused(tracker: Tracker) -> None:
    run_id = tracker.start_run("sft", {"stage": "sft"}, {})
    tracker.finish(run_id, "FINISHED")
    with pytest.raises(MissingInputError, match="has no artefact"):
        resolve_reference(tracker, f"runs:/{run_id}", "sft", PolicyCheckpoint)


def test_artefact_that_was_removed(tracker: Tracker, make_artifact: Make) -> None:
    base = make_artifact("sft")
    _run_with(tracker, base)
    shutil.rmtree(base.path)
    with pytest.raises(
        MissingInputError, match=f"'latest' leads to {base.path}, which is not there"
    ):
        resolve_reference(tracker, "latest", "sft", PolicyCheckpoint)


def test_another_kind_is_refused(tracker: Tracker, make_artifact: Make) -> None:
    base = make_artifact("sft")
    with pytest.raises(ArtifactError, match="holds a policy_checkpoint"):
        resolve_reference(tracker, str(base.path), "reward_model", RewardModelCheckpoint)


def test_edited_artefact_is_refused(tracker: Tracker, make_artifact: Make) -> None:
    base = make_artifact("sft")
    _run_with(tracker, base)
    Path(base.path, "payload.bin").write_bytes(b"changed")
    with pytest.raises(ArtifactError, match="SHA-256"):
        resolve_reference(tracker, "latest", "sft", PolicyCheckpoint)


def test_registered_versions_by_alias_and_number(tracker: Tracker, make_artifact: Make) -> None:
    registry = Registry(tracker)
    students = []
    for seed in (1, 2):
        run_id = tracker.start_run("distill", {"stage": "distill"}, {})
        student = make_artifact("distill", run_id=run_id, seed=seed)
        tracker.set_tags(run_id, {"artifact.path": str(student.path)})
        registry.register(tracker.log_model_output(run_id, student, "distill"), student)
        tracker.finish(run_id, "FINISHED")
        students.append(student)
    name = registry.name
    for ref, student in (
        (f"models:/{name}@candidate", students[1]),
        (f"models:/{name}/1", students[0]),
        (str(students[0].manifest.mlflow_run_id), students[0]),
    ):
        assert resolve_reference(tracker, ref, "distill", StudentAdapter) == student
    with pytest.raises(MissingInputError, match=r"'champion'.*rlhf promote VERSION"):
        resolve_reference(tracker, f"models:/{name}@champion", "distill", StudentAdapter)
    with pytest.raises(ArtifactError, match="holds a student_adapter"):
        resolve_reference(tracker, f"models:/{name}/1", "sft", PolicyCheckpoint)


def test_run_that_was_deleted_is_refused(tracker: Tracker, make_artifact: Make) -> None:
    run_id = _run_with(tracker, make_artifact("sft"))
    MlflowClient(tracker.tracking_uri).delete_run(run_id)
    with pytest.raises(MissingInputError, match=f"mlflow runs restore --run-id {run_id}"):
        resolve_reference(tracker, f"runs:/{run_id}", "sft", PolicyCheckpoint)


def test_run_of_another_stage_is_refused_by_its_kind(tracker: Tracker, make_artifact: Make) -> None:
    run_id = _run_with(tracker, make_artifact("ingest"))
    with pytest.raises(ArtifactError, match="holds a preference_dataset"):
        resolve_reference(tracker, f"runs:/{run_id}", "sft", PolicyCheckpoint)
