"""What `rlhf run` does: check, start a Prefect server, run the chain, one stage or an ablation."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flows.cli.shared import say
from flows.outcomes import STOPPED, RunMonitor, StageOutcome, chain_rows, demo_figures, monitored
from flows.services.prefect_server import (
    TemporaryServer,
    prepare_environment,
    start_prefect_api,
    termination_as_interrupt,
)
from flows.stages import RunOptions, check_inputs
from tasks.config.shared import STAGES, Stage, TrackingConfig
from tasks.errors import ConfigError, RlhfError, without_credentials
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.tracking.mlflow import Tracker


@dataclass(frozen=True)
class RunRequest:
    """One invocation.

    Args:
        rerun_from: stages from here on are not reused.
        only: this stage alone, on the newest upstreams; it always runs.
    """

    cfg: PipelineConfig
    rerun_from: Stage | None = None
    only: Stage | None = None
    is_debug: bool = False


def run(request: RunRequest) -> RunMonitor:
    """Run the chain, one stage or an ablation; return what was done.

    Raises:
        RlhfError: an input that cannot be used, before any work; or what a stage raised.
    """
    if request.only is not None and request.rerun_from is not None:
        raise ConfigError("--only and --from were both given", "one of them", "remove one")
    if request.cfg.ablation is not None and (request.only or request.rerun_from):
        raise ConfigError(
            f"{'--only' if request.only else '--from'} was given with a config that has `ablation`",
            "neither --only nor --from: an ablation runs the stages that it needs",
            "leave it out; what is finished is reused",
        )
    workspace = Workspace.from_environment()
    workspace.prepare()
    prepare_environment(workspace, is_debug=request.is_debug)
    with (
        termination_as_interrupt(),
        workspace.space_watched(),
        monitored(_process_start()) as monitor,
    ):
        server = start_prefect_api(workspace)
        # The server takes seconds to start; the inputs are checked in the meantime.
        _check(request, workspace, monitor)
        call = _flow_call(request)
        if server is not None:
            server.wait_ready()
        with server_settings(server):
            call()
    return monitor


def _check(request: RunRequest, workspace: Workspace, monitor: RunMonitor) -> None:
    from tasks.tracking.mlflow import connect

    tracker = connect(request.cfg.tracking, workspace)
    stages = STAGES if request.only is None else (request.only,)
    try:
        if request.cfg.ablation is None:
            check_inputs(request.cfg, stages)
        else:
            from flows.ablation import check_ablation

            check_ablation(request.cfg)
        monitor.inputs_checked = True
    except RlhfError as error:
        _record_refusal(request, tracker, error)
        raise


def _record_refusal(request: RunRequest, tracker: Tracker, error: RlhfError) -> None:
    """Leave a FAILED run in MLflow, so that a nightly run that never started is seen there too."""
    from flows.ablation import ABLATION
    from tasks.tracking.mlflow import PIPELINE

    config = request.cfg.model_dump(mode="json")
    whole = PIPELINE if request.cfg.ablation is None else ABLATION
    tags = {"stage": request.only or whole}
    run_id = tracker.start_run(request.cfg.name, tags, config)
    tracker.finish(run_id, "FAILED", failure=str(error))


def _flow_call(request: RunRequest) -> Callable[[], str]:
    """Import the flow, which imports Prefect, and return the call."""
    cfg = request.cfg
    if cfg.ablation is not None:
        from flows.ablation import rlhf_ablation

        return lambda: rlhf_ablation(cfg)
    if request.only is None:
        from flows.rlhf_pipeline import rlhf_pipeline

        return lambda: rlhf_pipeline(cfg, request.rerun_from)
    from flows.chain import cluster_closed
    from flows.rlhf_pipeline import STAGE_FLOWS

    stage = request.only
    options = RunOptions(tracking=cfg.tracking)

    def call() -> str:
        with cluster_closed():
            return STAGE_FLOWS[stage](getattr(cfg, stage), options=options)

    return call


def _process_start() -> float:
    """Return when this command was started, imports included, in seconds since 1970."""
    return psutil.Process().create_time()


def server_settings(server: TemporaryServer | None) -> AbstractContextManager[Any]:
    """Return Prefect's settings for runs on a temporary server, or on the user's."""
    if server is None:
        return nullcontext()
    from prefect.settings import temporary_settings

    # Heartbeats serve automations, which a temporary server has none of, and cost a second a flow.
    updates: Any = {"flows.heartbeat_frequency": None}
    return temporary_settings(updates)


# What the command line prints.


def print_result(console: Console, monitor: RunMonitor) -> None:
    """Print a row per stage, the demo's figures, and what was reused."""
    outcomes = monitor.outcomes
    table = Table("stage", "state", "seconds", "metrics", title="rlhf run", title_justify="left")
    for row in chain_rows(outcomes):
        state = f"[{_colour(row['state'])}]{row['state']}[/]"
        table.add_row(row["stage"], state, row["seconds"], row["metrics"])
    console.print(table)
    reused = [stage for stage, outcome in outcomes.items() if outcome.reused]
    if len(reused) == len(outcomes):
        console.print("All stages were reused: config, inputs and code versions are the same.")
    elif reused:
        console.print(f"Reused: {', '.join(reused)}.")
    print_demo(console, outcomes)
    print_cost(console, monitor)


def _colour(state: str) -> str:
    if STOPPED in state:
        return "yellow"
    return "cyan" if state == "reused" else "green"


def print_ablation(console: Console, workspace: Workspace, monitor: RunMonitor) -> None:
    """Print a row per method, what is measured, and where the files are."""
    # matplotlib comes with the page, and a chain needs neither.
    from flows.ablation import result_dir
    from tasks.ablation.report import read_ablation, result_rows

    directory = result_dir(workspace)
    report = read_ablation(directory)
    rows = result_rows(report)
    figures = list(rows[0])[:4]
    table = Table(title="rlhf ablation", title_justify="left", box=SIMPLE)
    for name in figures:
        table.add_column(name, no_wrap=True)
    table.add_column("chosen setting", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in figures), row["chosen setting"])
    console.print(table)
    console.print(f"Measured: {report.judge}, mean +- standard error over seeds.")
    failures = sum(len(method.failures) for method in report.methods)
    if failures:
        console.print(f"{failures} runs failed; ablation.md says why.", style="red")
    say(console, f"Files: {directory}")
    print_cost(console, monitor)


def print_cost(console: Console, monitor: RunMonitor) -> None:
    """Print time and memory."""
    gib = monitor.peak_rss_bytes / 2**30
    console.print(f"{monitor.wall_seconds:.0f} s in all, {gib:.1f} GiB of memory at the peak.")


def print_demo(console: Console, outcomes: Mapping[str, StageOutcome]) -> None:
    """Print the oracle's verdict, where the data is the demo world's."""
    demo = demo_figures(outcomes)
    rates = [(name, rate) for name, rate in demo["oracle_good_rate"].items() if rate is not None]
    if rates:
        text = ", ".join(f"{name} {rate:.3f}" for name, rate in rates)
        console.print(f"Good answers by the demo's oracle: {text}.")
    if demo["reward_accuracy_clean"] is not None:
        console.print(f"Reward model accuracy on clean pairs: {demo['reward_accuracy_clean']:.3f}.")


def print_places(
    console: Console, workspace: Workspace, tracking: TrackingConfig, prefect_url: str | None
) -> None:
    """Print how to see the runs in both UIs."""
    console.print()
    for line in ui_commands(workspace, tracking, prefect_url):
        say(console, line)


def ui_commands(
    workspace: Workspace, tracking: TrackingConfig, prefect_url: str | None
) -> list[str]:
    """Return commands that serve what is in the workspace, or the addresses of running servers.

    Args:
        prefect_url: address of the user's own Prefect server.
    """
    home = shlex.quote(os.environ.get("PREFECT_HOME") or str(workspace.prefect_home))
    uri = without_credentials(tracking.tracking_uri or workspace.tracking_uri)
    prefect = f"Prefect UI: PREFECT_HOME={home} prefect server start   # http://127.0.0.1:4200"
    mlflow = (
        "MLflow UI:  MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --workers 1"
        f" --backend-store-uri {shlex.quote(uri)}"
        f" --artifacts-destination {shlex.quote(str(workspace.mlflow_artifacts_dir))}"
        "   # http://127.0.0.1:5000"
    )
    return [
        f"Prefect UI: {prefect_url.removesuffix('/api')}" if prefect_url else prefect,
        f"MLflow UI:  {uri}" if uri.startswith("http") else mlflow,
    ]
