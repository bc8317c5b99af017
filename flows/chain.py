"""The frame around a chain: its MLflow run, one cluster for all stages, the summary at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.runtime import flow_run

from flows.outcomes import (
    StageOutcome,
    chain_rows,
    headlines,
    monitored,
    publish_chain,
    publish_link,
    summary_of,
)
from flows.promote import champion_run
from flows.stage_run import end_dead_runs, ended, place_tags, prefect_tags
from flows.stages import RunOptions, check_inputs
from tasks.artifacts import (
    EvalReport,
    Manifest,
    load_artifact,
    read_manifest,
    standing_path,
    write_whole,
)
from tasks.config.shared import STAGES, Stage
from tasks.errors import ArtifactError, MissingInputError
from tasks.pipeline_config import PipelineConfig
from tasks.report.page import cell, table
from tasks.tracking.mlflow import PIPELINE, RunRecord, Tracker, connect, flat_params
from tasks.tracking.run_log import ProgressDisplay, StageLog
from tasks.workspace import Workspace, git_commit

# The frame.


@dataclass(frozen=True)
class Chain:
    """One run of the chain.

    Args:
        run_id: its MLflow run.
        rerun_from: stages from here on are not reused.
    """

    cfg: PipelineConfig
    run_id: str
    rerun_from: Stage | None

    def options(self, stage: Stage) -> RunOptions:
        """Return how a stage is run in this chain."""
        rerun = STAGES[STAGES.index(self.rerun_from) :] if self.rerun_from else ()
        return RunOptions(
            reuse=self.cfg.reuse and stage not in rerun,
            tracking=self.cfg.tracking,
            pipeline_run_id=self.run_id,
            timeout_seconds=self.cfg.stage_timeout_seconds,
        )


@contextmanager
def chain_run(cfg: PipelineConfig, rerun_from: Stage | None) -> Iterator[Chain]:
    """Yield the chain; afterwards end its MLflow run and write ``summary.json``.

    Raises:
        RlhfError: an input that cannot be used, before any work; or what a stage raised.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(cfg.tracking, workspace)
    with (
        monitored() as monitor,
        cluster_closed(),
        command_run(tracker, workspace, cfg, ProgressDisplay(PIPELINE)) as log,
    ):
        if not monitor.inputs_checked:
            check_inputs(cfg)
        champion = champion_run(tracker)
        yield Chain(cfg, log.run_id, rerun_from)
        outcomes = _outcomes(tracker, log.run_id)
        monitor.outcomes.update(outcomes)
        monitor.read()
        summary = summary_of(outcomes, monitor.wall_seconds, monitor.peak_rss_bytes)
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        write_whole(workspace.summary_path, text)
        log.file(workspace.summary_path)
        page = chain_summary(tracker, outcomes, champion)
        tracker.log_text(log.run_id, page, "summary.md")
        publish_chain(page, outcomes)


@contextmanager
def cluster_closed() -> Iterator[None]:
    """Close the cluster after the block, if a stage opened one.

    Reused stages never load its libraries, which takes seconds.
    """
    try:
        yield
    finally:
        if "tasks.runtime.session" in sys.modules:
            from tasks.runtime.session import cluster_session

            with cluster_session():
                pass


@contextmanager
def command_run(
    tracker: Tracker, workspace: Workspace, cfg: PipelineConfig, display: ProgressDisplay
) -> Iterator[StageLog]:
    """Open the MLflow run of a chain or an ablation, as its display is named; afterwards end it.

    A retry of the same Prefect run continues the one it had.
    """
    kind, known = display.title, None
    if flow_run.id is not None:
        found = tracker.find_runs({"stage": kind, "prefect.flow_run_id": flow_run.id})
        known = found[0].run_id if found else None
    if known is not None:
        # With its new process: the old one's would make it a dead run to the next stage.
        tracker.reopen(known, place_tags(workspace))
    else:
        end_dead_runs(tracker, workspace)
        tags = {"stage": kind, "git.commit": git_commit()}
        tags |= {**prefect_tags(), **place_tags(workspace)}
        known = tracker.start_run(cfg.name, tags, cfg.model_dump(mode="json"))
    log = StageLog(tracker, known, kind, display)
    with ended(log):
        publish_link(tracker, kind, known)
        yield log


def _outcomes(tracker: Tracker, run_id: str) -> dict[str, StageOutcome]:
    tags = tracker.read_run(run_id).tags
    return {
        stage: StageOutcome.model_validate_json(tags[f"outcome.{stage}"])
        for stage in STAGES
        if f"outcome.{stage}" in tags
    }


# The summary at the end of a chain: its numbers, and what changed against the last champion.

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
    return [
        [
            stage,
            name,
            f"{before.metrics[name]:.4g}",
            f"{now.metrics[name]:.4g}",
            f"{now.metrics[name] - before.metrics[name]:+.4g}",
        ]
        for name in headlines(stage, both, _METRICS)
    ]


def _setting_rows(stage: str, before: Manifest, now: Manifest) -> list[list[str]]:
    old, new = flat_params(before.config), flat_params(now.config)
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return [[f"{stage}.{name}", old.get(name, ""), new.get(name, "")] for name in names]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return table(header, [[cell(value) for value in row] for row in rows]).splitlines()
