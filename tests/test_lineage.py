"""Lineage of small hand-made chains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.artifacts import MANIFEST_NAME, ParentRef, file_sha256
from tasks.errors import MissingInputError
from tasks.lineage import LineageNode, lineage_tree, upstream_tags, upstreams_of
from tasks.tracking import Tracker

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
        run_id = self.tracker.start_run(stage, {"stage": stage, **upstream_tags(parents)}, {})
        artifact = self.make(stage, parents, run_id)
        self.tracker.set_tags(run_id, {"artifact.path": str(artifact.path)})
        self.tracker.finish(run_id, "FINISHED")
        return artifact


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


def test_tags_carry_the_upstreams(tracker: Tracker) -> None:
    parents = {
        "policy": ParentRef(
            kind="policy_checkpoint", fingerprint="a", path="/p", mlflow_run_id="r"
        ),
        "source.x": ParentRef(kind="file", fingerprint="b", path="/f"),
    }
    run_id = tracker.start_run("distill", upstream_tags(parents), {})
    assert upstreams_of(tracker.read_run(run_id)) == parents
