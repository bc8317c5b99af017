"""What a run leaves in the Prefect UI: links and tables."""

from __future__ import annotations

from collections.abc import Mapping

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.context import FlowRunContext

from flows.monitor import StageOutcome
from flows.results import chain_rows
from tasks.artifacts import Artifact
from tasks.tracking import Tracker


def _key(stage: str, suffix: str) -> str:
    return f"{stage.replace('_', '-')}-{suffix}"


def publish_link(tracker: Tracker, stage: str, run_id: str) -> None:
    """Link the Prefect run to its MLflow page, or say where the database is."""
    if FlowRunContext.get() is None:
        return
    url = tracker.run_url(run_id)
    if url is not None:
        create_link_artifact(link=url, link_text=f"MLflow run {run_id}", key=_key(stage, "mlflow"))
        return
    text = (
        f"MLflow run `{run_id}` of experiment `{tracker.experiment}`.\n\n"
        f"Open it with `mlflow server --backend-store-uri {tracker.shown_uri}`."
    )
    create_markdown_artifact(text, key=_key(stage, "mlflow"))


def publish_result(artifact: Artifact, outcome: StageOutcome) -> None:
    """Show what a stage made as a table."""
    if FlowRunContext.get() is None:
        return
    manifest = artifact.manifest
    rows = [("artifact", str(artifact.path)), ("fingerprint", manifest.fingerprint)]
    rows += [("reused" if outcome.reused else "seconds", f"{outcome.seconds:.1f} s")]
    rows += [(name, str(count)) for name, count in manifest.counts.items()]
    rows += [(name, f"{value:.4g}") for name, value in manifest.metrics.items()]
    table = [{"name": name, "value": value} for name, value in rows]
    create_table_artifact(table=table, key=_key(manifest.stage, "result"))


def publish_card(artifact: Artifact) -> None:
    """Show the data card of a dataset as a page."""
    if FlowRunContext.get() is not None:
        text = (artifact.path / "card.md").read_text(encoding="utf-8")
        create_markdown_artifact(text, key=_key(artifact.manifest.stage, "card"))


def publish_chain(summary: str, outcomes: Mapping[str, StageOutcome]) -> None:
    """Show the stages of a chain as a table, and its summary as a page."""
    if FlowRunContext.get() is not None and outcomes:
        create_table_artifact(table=chain_rows(outcomes), key="rlhf-pipeline-result")
        create_markdown_artifact(summary, key="rlhf-pipeline-summary")
