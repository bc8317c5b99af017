"""What `rlhf export` does: find a dataset and write it in another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts import PreferenceDataset
from tasks.config.shared import TrackingConfig
from tasks.data.export import export_dataset
from tasks.tracking.lineage import resolve_reference
from tasks.tracking.mlflow import connect
from tasks.workspace import Workspace


@dataclass(frozen=True)
class ExportRequest:
    """One invocation.

    Args:
        ref: the dataset.
        to: name of the format.
        output: directory to make.
    """

    ref: str
    to: str
    output: Path
    tracking: TrackingConfig


def run_export(request: ExportRequest) -> list[str]:
    """Write the files; return a line of text for each.

    Raises:
        RlhfError: no such dataset or format, or the directory is there already.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(request.tracking, workspace)
    dataset = resolve_reference(tracker, request.ref, "ingest", PreferenceDataset)
    assert isinstance(dataset, PreferenceDataset)
    written = export_dataset(dataset, request.to, request.output)
    return [f"{path}: {rows} rows" for path, rows in written.items()]
