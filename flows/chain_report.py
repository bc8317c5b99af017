"""The summary at the end of a chain: its numbers, and what changed against the last champion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.monitor import StageOutcome
from flows.results import HEADLINES, chain_rows
from flows.staleness import champion_run
from tasks.artifacts import EvalReport, Manifest, load_artifact, read_manifest
from tasks.config import STAGES
from tasks.data.markdown import cell, table
from tasks.errors import ArtifactError, MissingInputError
from tasks.successors import standing_path
from tasks.tracking import RunRecord, Tracker
from tasks.tracking_values import flat_params

_MAX_CHANGES = 40
_METRICS = 6


def chain_summary(
    tracker: Tracker, outcomes: Mapping[str, StageOutcome], champion: RunRecord | None
) -> str:
    """Return the page of a finished chain as Markdown.

    Args:
        tracker: the experiment to look in.
        outcomes: by stage.
        champion: the run that had made the champion when the chain began, if there was one; the
            chain itself may have made another since.
    """
    rows = [
        [row["stage"], row["state"], row["seconds"], row["metrics"]] for row in chain_rows(outcomes)
    ]
    lines = ["# Chain", "", *_table(["stage", "state", "seconds", "metrics"], rows)]
    own = {name: read_manifest(Path(outcome.artifact)) for name, outcome in outcomes.items()}
    lines += [*_verdict(outcomes), "", "## Against the last champion", ""]
    lines += _standing(tracker, own.get("distill"), champion)
    if champion is not None and not _made(champion, own.get("distill")):
        lines += ["", *differences(champion_manifests(tracker, champion), own)]
    return "\n".join([*lines, ""])


def _made(run: RunRecord | None, student: Manifest | None) -> bool:
    return run is not None and student is not None and student.mlflow_run_id == run.run_id


def _standing(tracker: Tracker, student: Manifest | None, champion: RunRecord | None) -> list[str]:
    """Say who is and who was the champion."""
    if _made(champion, student):
        return ["The student of this chain was the champion already."]
    is_promoted = _made(champion_run(tracker), student)
    now = " The student of this chain took its place." if is_promoted else ""
    if champion is not None:
        return [f"The champion was the student of MLflow run `{champion.run_id}`.{now}"]
    if is_promoted:
        return ["The student of this chain is the first champion."]
    return ["No student has the alias `champion` yet."]


def _verdict(outcomes: Mapping[str, StageOutcome]) -> list[str]:
    if "evaluate" not in outcomes:
        return []
    report = load_artifact(Path(outcomes["evaluate"].artifact), EvalReport).report
    gate = report.get("gate") or {}
    return ["", f"Gate: the student has {gate['verdict']}."] if gate.get("verdict") else []


def champion_manifests(tracker: Tracker, champion: RunRecord) -> dict[str, Manifest]:
    """Return what the champion's chain made, as far as it is still on the disk, by stage."""
    evaluations = tracker.find_runs({"upstream.student.run_id": champion.run_id}, "FINISHED", 1)
    tags = [run.tags.get("artifact.path") for run in (*evaluations, champion)]
    paths = [Path(tag) for tag in tags if tag is not None]
    found: dict[str, Manifest] = {}
    while paths:
        try:
            manifest = read_manifest(paths.pop(0))
        except (MissingInputError, ArtifactError):
            # What is gone is left out of the comparison; `rlhf lineage` names broken links.
            continue
        if manifest.stage not in found:
            found[manifest.stage] = manifest
            paths += [standing_path(parent) for parent in manifest.parents.values()]
    return found


def differences(before: Mapping[str, Manifest], now: Mapping[str, Manifest]) -> list[str]:
    """Return two tables: metrics, and settings that differ."""
    stages = [stage for stage in STAGES if stage in before and stage in now]
    metrics = [row for stage in stages for row in _metric_rows(stage, before[stage], now[stage])]
    settings = [row for stage in stages for row in _setting_rows(stage, before[stage], now[stage])]
    lines = _table(["stage", "metric", "last champion", "this chain", "change"], metrics)
    lines += ["", *_table(["setting", "last champion", "this chain"], settings[:_MAX_CHANGES])]
    if not settings:
        lines = [*lines[:-2], "No setting differs."]
    if len(settings) > _MAX_CHANGES:
        lines.append(f"\nand {len(settings) - _MAX_CHANGES} settings more.")
    same = [stage for stage in stages if before[stage].fingerprint == now[stage].fingerprint]
    if same:
        lines += ["", f"The same in both: {', '.join(same)}."]
    return lines


def _metric_rows(stage: str, before: Manifest, now: Manifest) -> list[list[str]]:
    both = [name for name in now.metrics if name in before.metrics]
    wanted = [name for name in HEADLINES.get(stage, ()) if name in both] or both[:_METRICS]
    return [
        [
            stage,
            name,
            f"{before.metrics[name]:.4g}",
            f"{now.metrics[name]:.4g}",
            f"{now.metrics[name] - before.metrics[name]:+.4g}",
        ]
        for name in wanted
    ]


def _setting_rows(stage: str, before: Manifest, now: Manifest) -> list[list[str]]:
    old, new = flat_params(before.config), flat_params(now.config)
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return [[f"{stage}.{name}", old.get(name, ""), new.get(name, "")] for name in names]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return table(header, [[cell(value) for value in row] for row in rows]).splitlines()
