"""The ingest flow on a directory: lineage, MLflow, Prefect, and the export of its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from typer.testing import CliRunner

from flows.cli.main import app
from flows.ingest import ingest
from flows.stages import RunOptions, raw_sources, result_fields
from tasks.artifacts import PreferenceDataset, fingerprint, load_artifact
from tasks.config.shared import SourceConfig
from tasks.ingest.config import IngestConfig
from tasks.tracking.lineage import lineage_tree
from tasks.workspace import Workspace

H, A = "\n\nHuman: ", "\n\nAssistant: "


def write_subsets(root: Path) -> Path:
    for subset in ("harmless-base", "helpful-base"):
        path = root / subset / "train.jsonl"
        path.parent.mkdir(parents=True)
        heads = [f"{H}{subset} {number}{A}" for number in range(60)]
        rows = [{"chosen": f"{head}yes", "rejected": f"{head}no"} for head in heads]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_moved_directory_keeps_the_identity(tmp_path: Path, workspace: Workspace) -> None:
    found = []
    for name in ("a", "b"):
        directory = write_subsets(tmp_path / name / "hh")
        cfg = IngestConfig(source=str(directory))
        source = raw_sources(cfg, workspace)["source"]
        assert source.kind == "files"
        found.append((result_fields(cfg), source.fingerprint))
    assert found[0] == found[1]
    (tmp_path / "b" / "hh" / "helpful-base" / "train.jsonl").write_text("{}\n")
    assert raw_sources(cfg, workspace)["source"].fingerprint != found[1][1]


def test_the_name_of_a_lone_file_counts_where_it_says_the_split(
    tmp_path: Path, workspace: Workspace
) -> None:
    found = {}
    for assign in ("hash", "file"):
        for name in ("train", "test", "train-2"):
            path = tmp_path / "d" / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}\n")
            cfg = IngestConfig.model_validate({"source": str(path), "splits": {"assign": assign}})
            source = raw_sources(cfg, workspace)["source"]
            found[assign, name] = fingerprint(
                "ingest", 1, result_fields(cfg), {"source": source.fingerprint}
            )
    assert found["hash", "train"] == found["hash", "test"]
    assert found["file", "train"] != found["file", "test"]
    assert found["file", "train"] == found["file", "train-2"]


def test_number_of_processes_is_no_part_of_the_identity() -> None:
    assert result_fields(IngestConfig(workers=2)) == result_fields(IngestConfig())
    other = IngestConfig(reasons={"duplicate": "keep"})
    assert result_fields(other) != result_fields(IngestConfig())


@pytest.mark.slow
def test_a_directory_from_source_to_export(
    tmp_path: Path, workspace: Workspace, tracker: Any, prefect_server: None
) -> None:
    directory = write_subsets(tmp_path / "hh")
    sources = (
        SourceConfig(name="one", path=str(directory / "harmless-base" / "train.jsonl")),
        SourceConfig(name="all", path=str(directory / "helpful*")),
    )
    path = ingest(IngestConfig(sources=sources), RunOptions())
    dataset = load_artifact(Path(path), PreferenceDataset)
    assert dataset.manifest.counts["kept"] == 120
    run_id = dataset.manifest.mlflow_run_id
    assert run_id is not None
    tree = lineage_tree(tracker, path)
    parents = {name: (node.kind, node.status) for name, node in tree.parents.items()}
    assert parents == {"source.one": ("file", "verified"), "source.all": ("files", "verified")}
    _check_mlflow(tracker, run_id, dataset)
    _check_prefect(dataset)
    _check_export(tmp_path, dataset)
    (directory / "helpful-base" / "train.jsonl").write_text("{}\n")
    assert lineage_tree(tracker, path).parents["source.all"].status == "changed"


def _check_mlflow(tracker: Any, run_id: str, dataset: PreferenceDataset) -> None:
    client = MlflowClient(tracking_uri=tracker.tracking_uri)
    names = {info.path for info in client.list_artifacts(run_id)}
    assert {"card.md", "artifact.json", "card"} <= names
    plots = {info.path for info in client.list_artifacts(run_id, "card")}
    assert plots == {"card/lengths.svg", "card/rows.svg"}
    inputs = {
        entry.dataset.name: entry.dataset for entry in client.get_run(run_id).inputs.dataset_inputs
    }
    assert set(inputs) == {"source.one", "source.all", "preferences"}
    assert inputs["preferences"].digest == dataset.fingerprint[:36]


def _check_prefect(dataset: PreferenceDataset) -> None:
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["ingest-card"]))
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(artifact_filter=wanted)
    assert (dataset.path / "card.md").read_text() in [page.data for page in pages]


def _check_export(tmp_path: Path, dataset: PreferenceDataset) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", "latest", "--to", "trl", "--output", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{out / 'train.parquet'}: {dataset.manifest.counts['train']} rows" in done.output
    again = CliRunner().invoke(app, ["export", "latest", "--to", "trl", "--output", str(out)])
    assert again.exit_code == 2
