"""The summary page: the numbers of a chain, and what changed against the champion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.chain import champion_manifests, differences
from flows.promote import champion_run, stale_artifacts
from tasks.artifacts import Manifest
from tasks.config.shared import STAGES
from tasks.tracking.lineage import resolve_reference
from tasks.tracking.mlflow import PIPELINE, Tracker

Run = Callable[..., str]


def _manifest(stage: str, fingerprint: str, metrics: dict[str, float], **config: Any) -> Manifest:
    return Manifest(
        kind="policy_checkpoint",
        schema_version=1,
        stage=stage,
        fingerprint=fingerprint,
        created_at="",
        config=config,
        parents={},
        counts={},
        metrics=metrics,
        renderer_fingerprint=None,
        package_versions={},
        git_commit=None,
        mlflow_run_id=None,
        prefect_flow_run_id=None,
        files={},
    )


def test_metrics_and_settings_that_differ() -> None:
    before = {
        "ingest": _manifest("ingest", "a", {}),
        "sft": _manifest("sft", "b", {"nll": 2.0, "old": 1.0}, epochs=1, model={"source": "tiny"}),
    }
    now = {
        "ingest": _manifest("ingest", "a", {}),
        "sft": _manifest("sft", "c", {"nll": 1.5, "new": 1.0}, epochs=3, model={"source": "tiny"}),
        "distill": _manifest("distill", "d", {"x": 1.0}),
    }
    text = "\n".join(differences(before, now))
    # 1.5 - 2.0 = -0.5; metrics that only one of them has are no comparison.
    assert "| sft | nll | 2 | 1.5 | -0.5 |" in text
    assert "old" not in text and "distill" not in text
    assert "| sft.epochs | 1 | 3 |" in text and "source" not in text
    assert text.endswith("The same in both: ingest.")


def test_same_settings_are_said_to_be_the_same() -> None:
    one = {"sft": _manifest("sft", "b", {"nll": 2.0}, epochs=1)}
    assert "No setting differs." in "\n".join(differences(one, one))


def _promote(tracker: Tracker) -> None:
    """Do what a person does in MLflow's model registry."""
    from mlflow import MlflowClient

    client = MlflowClient(tracker.tracking_uri)
    name = tracker.student_model_name
    newest = client.get_model_version_by_alias(name, "candidate").version
    client.set_registered_model_alias(name, "champion", newest)


def _page(tracker: Tracker) -> str:
    """Return the page of the newest chain as MLflow and Prefect have it."""
    from mlflow import MlflowClient

    chain = tracker.find_runs({"stage": PIPELINE})[0]
    path = MlflowClient(tracker.tracking_uri).download_artifacts(chain.run_id, "summary.md")
    text = Path(path).read_text()
    key = ArtifactFilter(key=ArtifactFilterKey(any_=["rlhf-pipeline-summary"]))
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(artifact_filter=key)
    (shown,) = [p for p in pages if str(p.flow_run_id) == chain.tags["prefect.flow_run_id"]]
    assert shown.data == text
    return text


@pytest.mark.slow
def test_page_of_a_chain_compares_with_the_champion(
    run_chain: Run, tracker: Tracker, before_publishing: Any
) -> None:
    run_chain()
    assert champion_run(tracker) is None
    page = _page(tracker)
    assert "No student has the alias `champion` yet." in page
    assert all(f"| {stage.replace('_', chr(92) + '_')} | ran |" in page for stage in STAGES)

    _promote(tracker)
    champion = champion_run(tracker)
    assert champion is not None
    # All six are found from the champion's evaluation.
    assert sorted(champion_manifests(tracker, champion)) == sorted(STAGES)
    run_chain()
    assert "The student of this chain was the champion already." in _page(tracker)

    def better(ctx: Any) -> None:
        ctx.draft.metrics["accuracy"] = 0.875

    before_publishing("distill", better)
    run_chain("distill")
    page = _page(tracker)
    assert champion.run_id in page
    # 0.875 - 0.75 = 0.125
    assert "| distill | accuracy | 0.75 | 0.875 | +0.125 |" in page
    assert "No setting differs." in page and "took its place" not in page
    assert stale_artifacts(tracker) == []


@pytest.mark.slow
def test_champion_that_the_chain_itself_made_is_not_what_it_is_compared_with(
    run_chain: Run, tracker: Tracker, before_publishing: Any
) -> None:
    def promote(ctx: Any) -> None:
        _promote(tracker)  # as the verdict of an evaluation does

    before_publishing("evaluate", promote)
    run_chain()
    assert "The student of this chain is the first champion." in _page(tracker)
    first = champion_run(tracker)
    run_chain("distill")
    page = _page(tracker)
    assert first is not None and champion_run(tracker) != first
    assert f"student of MLflow run `{first.run_id}`. The student of this chain took" in page
    assert "| distill | accuracy | 0.75 | 0.75 | +0 |" in page


@pytest.mark.slow
def test_upstream_reference_finds_what_a_student_stands_on(
    run_chain: Run, run_stage: Run, tracker: Tracker
) -> None:
    from flows.stages import STAGE_SPECS

    run_chain()
    _promote(tracker)
    champion = champion_run(tracker)
    assert champion is not None
    wanted = champion_manifests(tracker, champion)
    run_stage("ingest")  # newer ones, which `latest` would take
    run_stage("sft")
    ref = f"upstream:models:/{tracker.student_model_name}@champion"
    for spec in STAGE_SPECS["evaluate"].inputs.values():
        found = resolve_reference(tracker, ref, spec.name, spec.kind)
        assert found.manifest == wanted[spec.name]
