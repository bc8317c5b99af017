"""The frame around a chain: its MLflow run, one cluster for all stages, the summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefect.runtime import flow_run

from flows.chain_report import chain_summary
from flows.mlflow_run import describe, end_dead_runs, place_tags, prefect_tags
from flows.monitor import StageOutcome, monitored, summary_of, write_summary
from flows.options import RunOptions
from flows.preflight import check_inputs
from flows.reporting import publish_chain, publish_link
from flows.staleness import champion_run
from tasks.config import STAGES, PipelineConfig, Stage
from tasks.errors import RlhfError
from tasks.provenance import git_commit
from tasks.run_log import run_logger
from tasks.tracking import PIPELINE, Status, Tracker, connect
from tasks.workspace import Workspace


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
        is_rerun = self.rerun_from is not None and STAGES.index(stage) >= STAGES.index(
            self.rerun_from
        )
        return RunOptions(
            reuse=self.cfg.reuse and not is_rerun,
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
    with monitored() as monitor, cluster_closed(), _tracked(tracker, workspace, cfg) as run_id:
        publish_link(tracker, PIPELINE, run_id)
        if not monitor.inputs_checked:
            check_inputs(cfg)
        champion = champion_run(tracker)
        yield Chain(cfg, run_id, rerun_from)
        outcomes = _outcomes(tracker, run_id)
        monitor.outcomes.update(outcomes)
        monitor.read()
        summary = summary_of(outcomes, monitor.wall_seconds, monitor.peak_rss_bytes)
        write_summary(workspace.summary_path, summary)
        tracker.log_file(run_id, workspace.summary_path)
        page = chain_summary(tracker, outcomes, champion)
        tracker.log_text(run_id, page, "summary.md")
        publish_chain(page, outcomes)


@contextmanager
def cluster_closed() -> Iterator[None]:
    """Close the cluster after the block, if a stage opened one.

    Reused stages never load its libraries, which takes seconds.
    """
    try:
        yield
    finally:
        if "tasks.backends.session" in sys.modules:
            from tasks.backends.cluster import cluster_session

            with cluster_session():
                pass


@contextmanager
def _tracked(tracker: Tracker, workspace: Workspace, cfg: PipelineConfig) -> Iterator[str]:
    run_id = open_command_run(tracker, workspace, cfg, PIPELINE)
    try:
        yield run_id
    except Exception as error:
        _end(tracker, run_id, "FAILED", error)
        raise
    except BaseException as error:
        _end(tracker, run_id, "KILLED", error)
        raise
    tracker.finish(run_id, "FINISHED")


def _end(tracker: Tracker, run_id: str, status: Status, error: BaseException) -> None:
    try:
        tracker.finish(run_id, status, describe(error))
    except RlhfError as second:
        # What MLflow says now must not hide why the chain stopped.
        run_logger(PIPELINE).warning("MLflow run %s was not ended: %s", run_id, second)


def open_command_run(tracker: Tracker, workspace: Workspace, cfg: PipelineConfig, kind: str) -> str:
    """Open the MLflow run of a chain or an ablation.

    A retry of the same Prefect run continues the one it had.

    Args:
        kind: its tag ``stage``.
    """
    if flow_run.id is not None:
        earlier = tracker.find_runs({"stage": kind, "prefect.flow_run_id": flow_run.id})
        if earlier:
            # With its new process: the old one's would make it a dead run to the next stage.
            tracker.reopen(earlier[0].run_id, place_tags(workspace))
            return earlier[0].run_id
    end_dead_runs(tracker, workspace)
    tags = {
        "stage": kind,
        "git.commit": git_commit(),
        **prefect_tags(),
        **place_tags(workspace),
    }
    return tracker.start_run(cfg.name, tags, cfg.model_dump(mode="json"))


def _outcomes(tracker: Tracker, run_id: str) -> dict[str, StageOutcome]:
    tags = tracker.read_run(run_id).tags
    return {
        stage: StageOutcome.model_validate_json(tags[f"outcome.{stage}"])
        for stage in STAGES
        if f"outcome.{stage}" in tags
    }
