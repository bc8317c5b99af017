"""What `rlhf run` does: check, start a Prefect server, run the chain, one stage or an ablation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from flows.environment import prepare_environment, start_prefect_api, termination_as_interrupt
from flows.monitor import RunMonitor, monitored
from flows.preflight import check_inputs
from flows.temporary_server import TemporaryServer
from tasks.config import STAGES, PipelineConfig, Stage
from tasks.errors import ConfigError, RlhfError
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.tracking import Tracker


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
    from tasks.tracking import connect

    tracker = connect(request.cfg.tracking, workspace)
    stages = STAGES if request.only is None else (request.only,)
    try:
        if request.cfg.ablation is None:
            check_inputs(request.cfg, stages)
        else:
            from flows.ablation_plan import check_ablation

            check_ablation(request.cfg)
        monitor.inputs_checked = True
    except RlhfError as error:
        _record_refusal(request, tracker, error)
        raise


def _record_refusal(request: RunRequest, tracker: Tracker, error: RlhfError) -> None:
    """Leave a FAILED run in MLflow, so that a nightly run that never started is seen there too."""
    from flows.ablation_plan import ABLATION
    from tasks.tracking import PIPELINE

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
    from flows.options import RunOptions
    from flows.registry import STAGE_FLOWS

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
