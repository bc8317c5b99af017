"""Lineage of small hand-made chains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.artifacts import MANIFEST_NAME, ParentRef, PolicyCheckpoint, file_sha256
from tasks.config.shared import TrackingConfig
from tasks.errors import MissingInputError
from tasks.tracking.lineage import (
    LineageNode,
    lineage_tree,
    resolve_reference,
    upstream_tags,
    upstreams_of,
)
from tasks.tracking.mlflow import PIPELINE, Tracker, connect
from tasks.tracking.registry import Registry
from tasks.workspace import Workspace, workspace_name

Make = Callable[..., Any]


class Chain:
    """A raw file, a dataset, a base model, a policy and a student, each with an MLflow run."""

    def __init__(self, tracker: Tracker, make: Make, directory: Path) -> None:
        self.tracker = tracker
        self.make = make
        self.file = directory / "pairs.jsonl"
        self.file.write_text("{}\n")
        source = ParentRef(kind="file", fingerprint=file_sha256(self.file), path=str(self.file))
        self.data = self._stage("ingest", {"source": source})
        self.base = self._stage("sft", {"preferences": self.data.as_parent()})
        self.policy = self._stage(
            "offline_ppo", {"base": self.base.as_parent(), "preferences": self.data.as_parent()}
        )
        self.student = self._stage("distill", {"policy": self.policy.as_parent()})

    def _stage(self, stage: str, parents: dict[str, ParentRef]) -> Any:
        tags = {"stage": stage, "workspace": workspace_name(Path("/home/w"))}
        run_id = self.tracker.start_run(stage, {**tags, **upstream_tags(parents)}, {})
        artifact = self.make(stage, parents, run_id)
        about = {"artifact.path": str(artifact.path), "artifact.kind": artifact.manifest.kind}
        self.tracker.set_tags(run_id, {**about, "fingerprint": artifact.fingerprint})
        self.tracker.finish(run_id, "FINISHED")
        return artifact

    def run_of(self, artifact: Any) -> str:
        """Return the id of an artefact's run."""
        run_id = artifact.manifest.mlflow_run_id
        assert isinstance(run_id, str)
        return run_id

    def move_to_another_machine(self) -> None:
        """Let every run say that its workspace is elsewhere, and remove the files from here."""
        for artifact in (self.data, self.base, self.policy, self.student):
            self.tracker.set_tags(self.run_of(artifact), {"workspace": "other-host:/home/w"})
            shutil.rmtree(artifact.path)
        self.file.unlink()


@pytest.fixture
def chain(tracker: Tracker, make_artifact: Make, tmp_path: Path) -> Chain:
    return Chain(tracker, make_artifact, tmp_path)


def _raw(tree: LineageNode) -> LineageNode:
    return next(node for node in tree.walk() if node.kind == "file")


def test_tree_reaches_the_raw_file(chain: Chain) -> None:
    tree = lineage_tree(chain.tracker, str(chain.student.path))
    assert [node.stage for node in tree.walk()] == ["distill", "offline_ppo", "sft", "ingest", None]
    raw = _raw(tree)
    assert (raw.path, raw.status) == (str(chain.file), "verified")
    assert raw.fingerprint == file_sha256(chain.file)
    assert tree.broken == []
    policy = tree.parents["policy"]
    assert policy.mlflow_run_id == chain.policy.manifest.mlflow_run_id
    assert policy.parents["preferences"] == policy.parents["base"].parents["preferences"]


@pytest.mark.parametrize("ref", ["latest", "distill"])
def test_latest_and_stage_names(chain: Chain, ref: str) -> None:
    assert lineage_tree(chain.tracker, ref).path == str(chain.student.path)


def test_tree_survives_json(chain: Chain) -> None:
    tree = lineage_tree(chain.tracker, "latest")
    assert LineageNode.model_validate_json(tree.model_dump_json()) == tree


def test_changed_raw_file_is_named(chain: Chain) -> None:
    chain.file.write_text("{} \n")
    tree = lineage_tree(chain.tracker, "latest")
    assert [node.status for node in tree.broken] == ["changed"]
    assert "is not the one that was read" in tree.broken[0].note


def test_removed_raw_file_is_named(chain: Chain) -> None:
    chain.file.unlink()
    tree = lineage_tree(chain.tracker, "latest")
    assert [(node.kind, node.status) for node in tree.broken] == [("file", "missing")]


def test_removed_artefact_is_bridged_by_its_run(chain: Chain) -> None:
    shutil.rmtree(chain.policy.path)
    tree = lineage_tree(chain.tracker, "latest")
    gap = tree.parents["policy"]
    assert (gap.status, gap.stage) == ("missing", "offline_ppo")
    assert gap.fingerprint == chain.policy.fingerprint
    assert _raw(tree).status == "verified"
    assert tree.broken == [gap]


def test_artefact_that_was_made_again_stands_for_the_one_that_is_gone(chain: Chain) -> None:
    run_id = chain.run_of(chain.policy)
    chain.tracker.log_file(run_id, chain.policy.path / MANIFEST_NAME)
    shutil.rmtree(chain.policy.path)
    parents = chain.policy.manifest.parents
    older, again = (chain._stage("offline_ppo", dict(parents)) for _ in range(2))
    assert older.fingerprint == again.fingerprint == chain.policy.fingerprint
    tree = lineage_tree(chain.tracker, str(chain.student.path))
    found = tree.parents["policy"]
    assert (found.status, found.path) == ("remade", str(again.path))
    assert found.mlflow_run_id == chain.run_of(again)
    assert found.note == f"made again, with the same bits; {chain.policy.path} is gone"
    assert tree.broken == [] and _raw(tree).status == "verified"
    assert lineage_tree(chain.tracker, run_id, is_deep=True).status == "remade"
    walked = resolve_reference(chain.tracker, f"upstream:{tree.path}", "sft", PolicyCheckpoint)
    assert walked == chain.base
    # A torn one stands for nothing; other bits are told.
    (again.path / MANIFEST_NAME).write_text("{")
    manifest = json.loads((older.path / MANIFEST_NAME).read_text())
    manifest["files"]["payload.bin"]["sha256"] = "0" * 64
    (older.path / MANIFEST_NAME).write_text(json.dumps(manifest))
    found = lineage_tree(chain.tracker, str(chain.student.path)).parents["policy"]
    assert (found.status, found.path) == ("remade", str(older.path))
    assert "with other bits in payload.bin" in found.note
    deep = lineage_tree(chain.tracker, str(chain.student.path), is_deep=True).parents["policy"]
    assert deep.status == "torn"


def test_torn_manifest_is_bridged_by_its_run(chain: Chain) -> None:
    (chain.policy.path / MANIFEST_NAME).write_text("{")
    gap = lineage_tree(chain.tracker, "latest").parents["policy"]
    assert gap.status == "torn"
    assert set(gap.parents) == {"base", "preferences"}


def test_artefact_and_run_both_gone(chain: Chain) -> None:
    orphan = chain.policy.as_parent().model_copy(update={"path": "/gone", "mlflow_run_id": "0"})
    student = chain.make("distill", {"policy": orphan}, seed=9)
    gap = lineage_tree(chain.tracker, str(student.path)).parents["policy"]
    assert (gap.status, gap.parents) == ("missing", {})
    assert "so is MLflow run 0" in gap.note


def test_another_artefact_at_the_path_is_named(chain: Chain) -> None:
    moved = chain.policy.as_parent().model_copy(update={"fingerprint": "0" * 64})
    student = chain.make("distill", {"policy": moved}, seed=9)
    gap = lineage_tree(chain.tracker, str(student.path)).parents["policy"]
    assert gap.status == "mismatch"
    assert chain.policy.fingerprint[:12] in gap.note


def test_nothing_to_trace(tracker: Tracker) -> None:
    with pytest.raises(MissingInputError, match="no finished run"):
        lineage_tree(tracker, "latest")
    with pytest.raises(MissingInputError, match="/nowhere"):
        lineage_tree(tracker, "/nowhere")


def test_every_name_of_a_student_leads_to_its_tree(chain: Chain) -> None:
    registry = Registry(chain.tracker)
    run_id = chain.run_of(chain.student)
    model_id = chain.tracker.log_model_output(run_id, chain.student, "distill")
    registry.register(model_id, chain.student)
    name = registry.name
    expected = lineage_tree(chain.tracker, str(chain.student.path))
    for ref in (f"runs:/{run_id}", run_id, f"models:/{name}@candidate", f"models:/{name}/1"):
        assert lineage_tree(chain.tracker, ref) == expected


def test_chain_stands_for_the_last_stage_that_it_finished(chain: Chain) -> None:
    outcomes = {
        f"outcome.{artifact.manifest.stage}": json.dumps({"mlflow_run_id": chain.run_of(artifact)})
        for artifact in (chain.data, chain.base)
    }
    run_id = chain.tracker.start_run("chain", {"stage": PIPELINE, **outcomes}, {})
    assert lineage_tree(chain.tracker, run_id).stage == "sft"
    empty = chain.tracker.start_run("chain", {"stage": PIPELINE}, {})
    with pytest.raises(MissingInputError, match="finished no stage"):
        lineage_tree(chain.tracker, empty)


def test_removed_root_is_bridged_by_its_run(chain: Chain) -> None:
    shutil.rmtree(chain.student.path)
    tree = lineage_tree(chain.tracker, f"runs:/{chain.run_of(chain.student)}")
    assert (tree.status, tree.kind) == ("missing", "student_adapter")
    assert tree.fingerprint == chain.student.fingerprint
    assert tree.broken == [tree]
    assert _raw(tree).status == "verified"


def test_failed_run_is_traced_to_what_it_read(chain: Chain) -> None:
    tags = upstream_tags({"policy": chain.policy.as_parent()})
    run_id = chain.tracker.start_run("distill", {"stage": "distill", **tags}, {})
    chain.tracker.finish(run_id, "FAILED", failure="loss is nan")
    tree = lineage_tree(chain.tracker, run_id)
    assert (tree.status, tree.stage) == ("unfinished", "distill")
    assert "FAILED and has no artefact: loss is nan" in tree.note
    assert _raw(tree).status == "verified"


def test_deleted_run_is_named(chain: Chain) -> None:
    run_id = chain.run_of(chain.policy)
    MlflowClient(chain.tracker.tracking_uri).delete_run(run_id)
    (broken,) = lineage_tree(chain.tracker, "latest").broken
    assert (broken.stage, broken.status) == ("offline_ppo", "untracked")
    assert f"mlflow runs restore --run-id {run_id}" in broken.note
    shutil.rmtree(chain.policy.path)
    (broken,) = lineage_tree(chain.tracker, "latest").broken
    assert broken.status == "missing" and "which was deleted" in broken.note


def test_run_of_another_mlflow_is_named(chain: Chain, make_artifact: Make) -> None:
    stray = make_artifact("distill", {"policy": chain.policy}, "0" * 32, seed=5)
    (broken,) = lineage_tree(chain.tracker, str(stray.path)).broken
    assert broken.status == "untracked" and "--tracking-uri names another" in broken.note


def test_files_are_checked_on_request(chain: Chain) -> None:
    (chain.policy.path / "payload.bin").write_bytes(b"another")
    assert lineage_tree(chain.tracker, "latest").broken == []
    tree = lineage_tree(chain.tracker, "latest", is_deep=True)
    (broken,) = tree.broken
    assert (broken.stage, broken.status) == ("offline_ppo", "torn")
    assert "payload.bin has SHA-256" in broken.note
    assert tree.status == "verified"


def test_workspace_of_another_machine_is_not_broken(chain: Chain) -> None:
    chain.move_to_another_machine()
    tree = lineage_tree(chain.tracker, "latest")
    assert {node.status for node in tree.walk()} == {"elsewhere"}
    assert [node.stage for node in tree.walk()] == ["distill", "offline_ppo", "sft", "ingest", None]
    assert tree.broken == []
    assert "other-host:/home/w" in tree.note
    assert _raw(tree).fingerprint == chain.data.manifest.parents["source"].fingerprint


@pytest.mark.slow
def test_lineage_of_another_machine_over_a_server(
    mlflow_server: str, workspace: Workspace, make_artifact: Make, tmp_path: Path
) -> None:
    tracking = TrackingConfig(tracking_uri=mlflow_server, experiment="lineage")
    chain = Chain(connect(tracking, workspace), make_artifact, tmp_path)
    run_id = chain.run_of(chain.student)
    model_id = chain.tracker.log_model_output(run_id, chain.student, "distill")
    Registry(chain.tracker).register(model_id, chain.student)
    here = lineage_tree(chain.tracker, f"runs:/{run_id}", is_deep=True)
    assert {node.status for node in here.walk()} == {"verified"}
    chain.move_to_another_machine()
    tree = lineage_tree(chain.tracker, "models:/lineage-student@candidate")
    assert [(n.path, n.fingerprint) for n in tree.walk()] == [
        (n.path, n.fingerprint) for n in here.walk()
    ]
    assert {node.status for node in tree.walk()} == {"elsewhere"}
    MlflowClient(mlflow_server).delete_run(chain.run_of(chain.data))
    (broken,) = lineage_tree(chain.tracker, "latest").broken
    assert broken.stage == "ingest" and "which was deleted" in broken.note


def test_tags_carry_the_upstreams(tracker: Tracker) -> None:
    parents = {
        "policy": ParentRef(
            kind="policy_checkpoint", fingerprint="a", path="/p", mlflow_run_id="r"
        ),
        "source.x": ParentRef(kind="file", fingerprint="b", path="/f"),
    }
    run_id = tracker.start_run("distill", upstream_tags(parents), {})
    assert upstreams_of(tracker.read_run(run_id)) == parents
