"""`rlhf reproduce`: a stage again from its record, on real servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import get_current_settings
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.reproduce import reproduce
from flows.ingest import ingest
from tasks.artifacts import MANIFEST_NAME, PolicyCheckpoint, load_artifact, read_manifest
from tasks.config.shared import STAGES, TrackingConfig
from tasks.errors import ArtifactError, ConfigError, DataError, MissingInputError
from tasks.ingest.config import DemoWorldConfig, IngestConfig
from tasks.tracking.mlflow import PIPELINE, Tracker
from tasks.workspace import Workspace

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
SMALL_CHAIN = ROOT / "tests" / "small_chain.yaml"
FAILURE = 1
SMALL = IngestConfig(demo=DemoWorldConfig(n_pairs=60), seed=7)


@pytest.fixture
def servers(prefect_server: None, tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """The test's Prefect server, named as a user names theirs."""
    monkeypatch.setenv("PREFECT_API_URL", str(get_current_settings().api.url))
    return tracker


def _reproduce(ref: str) -> Any:
    return reproduce(ref, TrackingConfig())


def _run_id(path: str | Path) -> str:
    run_id = read_manifest(Path(path)).mlflow_run_id
    assert run_id is not None
    return run_id


def _edit_manifest(path: str | Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = Path(path) / MANIFEST_NAME
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


@pytest.mark.slow
def test_repeat_has_the_same_bits_and_touches_nothing(
    servers: Tracker, workspace: Workspace
) -> None:
    path = ingest(SMALL)
    run_id = _run_id(path)
    found = _reproduce(run_id)
    assert found.is_equal
    assert set(found.files.values()) == {"equal"}
    assert "train.parquet" in found.files and "quarantine.parquet" in found.files
    assert found.environment == [] and found.metrics == []
    # The repeat is not what the next stage starts from, and its files are gone.
    latest = servers.latest_finished("ingest")
    assert latest is not None and latest.run_id == run_id
    assert found.repeat_path is None
    assert list((workspace.root / "reproductions").iterdir()) == []
    assert list(workspace.artifacts_dir("ingest").iterdir()) == [Path(path)]
    tags = servers.read_run(run_id).tags
    assert tags["reproduced"].startswith("equal, ")
    assert tags["reproduced.run_id"] == found.repeat_run_id
    repeat = servers.read_run(str(found.repeat_run_id))
    assert repeat.status == "FINISHED" and repeat.tags["fingerprint"] == latest.tags["fingerprint"]
    kept = servers.read_text(run_id, f"reproductions/{repeat.run_id}.json")
    assert kept is not None and json.loads(kept)["files"] == found.files


@pytest.mark.slow
def test_what_differs_is_listed_and_kept(servers: Tracker) -> None:
    path = ingest(SMALL)

    def edit(content: dict[str, Any]) -> None:
        content["package_versions"]["pyarrow"] = "1.0"
        content["git_commit"] = "abc"
        content["files"]["train.parquet"]["sha256"] = "0" * 64
        content["counts"]["kept"] = 59

    _edit_manifest(path, edit)
    servers.set_tags(_run_id(path), {"machine.cpu": "another processor"})
    result = CliRunner().invoke(app, ["reproduce", path, "--json"])
    assert result.exit_code == FAILURE, result.stderr
    found = json.loads(result.stdout)
    assert [name for name, status in found["files"].items() if status != "equal"] == [
        "train.parquet"
    ]
    differ = {entry["name"]: entry["first"] for entry in found["environment"]}
    assert differ["pyarrow"] == "1.0"
    assert differ["git commit"] == "abc"
    assert differ["machine.cpu"] == "another processor"
    (figure,) = found["metrics"]
    assert (figure["name"], figure["first"], figure["repeat"]) == ("kept", "59", "60")
    assert (Path(found["repeat_path"]) / "train.parquet").is_file()
    assert servers.read_run(_run_id(path)).tags["reproduced"].startswith("different, ")


@pytest.mark.slow
def test_artefact_that_is_gone_is_compared_by_its_hashes(servers: Tracker) -> None:
    path = ingest(SMALL)
    run_id = _run_id(path)
    shutil.rmtree(path)
    found = _reproduce(f"runs:/{run_id}")
    assert found.is_equal
    assert any("is gone" in note for note in found.notes)


@pytest.mark.slow
def test_raw_file_that_has_changed_is_refused(servers: Tracker, workspace: Workspace) -> None:
    path = ingest(SMALL)
    source = Path(read_manifest(Path(path)).parents["source"].path)
    source.write_text("{}\n")
    with pytest.raises(DataError, match=rf"source: {source} has changed since run"):
        _reproduce(path)
    assert not (workspace.root / "reproductions").exists()


@pytest.mark.slow
def test_parent_that_is_gone_or_torn_is_refused(servers: Tracker, make_artifact: Make) -> None:
    data = make_artifact("ingest", run_id=servers.start_run("ingest", {"stage": "ingest"}, {}))
    run_id = servers.start_run("sft", {"stage": "sft"}, {})
    base = make_artifact("sft", {"preferences": data}, run_id)
    servers.set_tags(run_id, {"artifact.path": str(base.path), "fingerprint": base.fingerprint})
    servers.finish(run_id, "FINISHED")
    assert load_artifact(base.path, PolicyCheckpoint)
    (data.path / "payload.bin").write_bytes(b"other!!")
    with pytest.raises(ArtifactError, match=r"The preferences of run .* cannot be used.*SHA-256"):
        _reproduce(run_id)
    shutil.rmtree(data.path)
    with pytest.raises(MissingInputError, match=r"rlhf reproduce \w+ --keep"):
        _reproduce(run_id)
    # Made again it will do: the stage starts, and misses the files that this one never had.
    again = make_artifact("ingest")
    assert again.fingerprint == data.fingerprint and again.path != data.path
    with pytest.raises(ArtifactError, match=str(again.path / "train.parquet")):
        _reproduce(run_id)


@pytest.mark.slow
def test_run_that_is_no_finished_stage_is_refused(servers: Tracker, make_artifact: Make) -> None:
    chain = servers.start_run("chain", {"stage": PIPELINE}, {})
    servers.finish(chain, "FINISHED")
    with pytest.raises(ConfigError, match="is a chain's"):
        _reproduce(chain)
    failed = servers.start_run("sft", {"stage": "sft"}, {})
    servers.finish(failed, "FAILED")
    with pytest.raises(MissingInputError, match="of sft is FAILED"):
        _reproduce(failed)
    bare = servers.start_run("sft", {"stage": "sft"}, {})
    servers.finish(bare, "FINISHED")
    with pytest.raises(MissingInputError, match=r"MLflow has no copy of artifact\.json"):
        _reproduce(bare)
    old = servers.start_run("ingest", {"stage": "ingest"}, {})
    data = make_artifact("ingest", run_id=old, field_of_an_older_version=1)
    servers.set_tags(old, {"artifact.path": str(data.path), "fingerprint": data.fingerprint})
    servers.finish(old, "FINISHED")
    with pytest.raises(ConfigError, match=r"not one of this version.*check out the commit"):
        _reproduce(old)


def _rlhf(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a user does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT")}
    environment |= {"RLHF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    return subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the small chain ran once."""
    home = tmp_path_factory.mktemp("reproduce")
    done = _rlhf(home, "run", str(SMALL_CHAIN))
    assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.mark.endurance
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_a_chain_repeats_with_the_same_bits(finished: Path, stage: str) -> None:
    done = _rlhf(finished, "reproduce", stage, "--json")
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert found["stage"] == stage and found["environment"] == []
    assert "different" not in found["files"].values()
