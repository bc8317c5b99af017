"""Artefacts: whole or not there, and verified before use."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.artifacts import (
    MANIFEST_NAME,
    Draft,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    build_artifact,
    fingerprint,
    load_any_artifact,
    load_artifact,
    newest_artifact,
    read_manifest,
)
from tasks.errors import ArtifactError, MissingInputError, WorkspaceError

Make = Callable[..., Any]
_DRAFT: dict[str, Any] = {
    "kind": "policy_checkpoint",
    "stage": "sft",
    "fingerprint": "ab" * 32,
    "config": {},
}


def test_round_trip(make_artifact: Make) -> None:
    data = make_artifact("ingest", seed=1)
    base = make_artifact("sft", {"preferences": data}, run_id="r1", seed=2)
    loaded = load_artifact(base.path, PolicyCheckpoint)
    assert loaded.manifest.parents["preferences"] == data.as_parent()
    assert loaded.fingerprint == base.fingerprint
    assert loaded.as_parent().mlflow_run_id == "r1"
    assert isinstance(load_any_artifact(data.path), PreferenceDataset)


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), build_artifact(tmp_path, Draft(**_DRAFT)) as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_workspace_error(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkspaceError, match="No space left"),
        build_artifact(tmp_path, Draft(**_DRAFT)),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_a_workspace_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WorkspaceError, match="RLHF_HOME"),
        build_artifact(tmp_path / "file" / "models", Draft(**_DRAFT)),
    ):
        pass


def _flip_a_byte(path: Path) -> None:
    file = path / "payload.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(bytes(content))


def _truncate(path: Path) -> None:
    (path / "payload.bin").write_bytes(b"pay")


def _remove(path: Path) -> None:
    (path / "payload.bin").unlink()


def _add(path: Path) -> None:
    (path / "more").write_text("x")


def _tear_manifest(path: Path) -> None:
    file = path / MANIFEST_NAME
    file.write_text(file.read_text()[:-20])


def _edit_schema(path: Path) -> None:
    file = path / MANIFEST_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 99}))


def _add_manifest_key(path: Path) -> None:
    file = path / MANIFEST_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra": 1}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_flip_a_byte, "payload.bin has SHA-256"),
        (_truncate, "payload.bin has 3 bytes"),
        (_remove, "payload.bin is missing"),
        (_add, "more is not in the manifest"),
        (_tear_manifest, "torn or edited"),
        (_edit_schema, "schema version 99"),
        (_add_manifest_key, "torn or edited"),
    ],
)
def test_damage_is_named(
    make_artifact: Make, damage: Callable[[Path], None], expected: str
) -> None:
    artifact = make_artifact("sft")
    damage(artifact.path)
    with pytest.raises(ArtifactError, match=expected) as caught:
        load_artifact(artifact.path, PolicyCheckpoint)
    if damage is not _edit_schema:
        assert "`rlhf run CONFIG --from sft`" in str(caught.value)


def test_another_kind_is_refused(make_artifact: Make) -> None:
    artifact = make_artifact("sft")
    with pytest.raises(ArtifactError, match="holds a policy_checkpoint"):
        load_artifact(artifact.path, EvalReport)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=str(tmp_path)):
        read_manifest(tmp_path)


def test_newest_wins_and_others_are_not_taken(workspace: Any, make_artifact: Make) -> None:
    first = make_artifact("sft", seed=1)
    second = make_artifact("sft", seed=1)
    make_artifact("sft", seed=2)
    directory = workspace.artifacts_dir("sft")
    assert first.path != second.path
    found = newest_artifact(directory, PolicyCheckpoint, first.fingerprint)
    assert found is not None
    assert found.path == second.path
    assert newest_artifact(directory, PolicyCheckpoint, "0" * 64) is None


def test_damaged_newest_is_an_error_not_a_rerun(workspace: Any, make_artifact: Make) -> None:
    artifact = make_artifact("sft", seed=1)
    _flip_a_byte(artifact.path)
    with pytest.raises(ArtifactError, match="SHA-256"):
        newest_artifact(workspace.artifacts_dir("sft"), PolicyCheckpoint, artifact.fingerprint)


_IDENTITY = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5)


@given(_IDENTITY)
def test_fingerprint_ignores_the_order_of_keys(identity: dict[str, Any]) -> None:
    backwards = dict(reversed(identity.items()))
    parents = {"a": "1", "b": "2"}
    turned = dict(reversed(parents.items()))
    assert fingerprint("sft", 1, identity, parents) == fingerprint("sft", 1, backwards, turned)


def test_fingerprint_depends_on_each_part() -> None:
    variants = [
        fingerprint("sft", 1, {"a": 1}, {"p": "x"}),
        fingerprint("distill", 1, {"a": 1}, {"p": "x"}),
        fingerprint("sft", 2, {"a": 1}, {"p": "x"}),
        fingerprint("sft", 1, {"a": 2}, {"p": "x"}),
        fingerprint("sft", 1, {"a": 1}, {"p": "y"}),
        fingerprint("sft", 1, {"a": 1}, {"q": "x"}),
    ]
    assert len(set(variants)) == len(variants)
