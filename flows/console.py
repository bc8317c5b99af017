"""What the command line prints."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flows.monitor import RunMonitor, StageOutcome, summary_of
from flows.results import STOPPED, chain_rows
from tasks.config import TrackingConfig
from tasks.redaction import without_credentials
from tasks.workspace import Workspace


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
    from flows.ablation_plan import result_dir
    from tasks.data.ablation_page import read_ablation, result_rows

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
    console.print(f"Files: {directory}", highlight=False, soft_wrap=True, markup=False)
    print_cost(console, monitor)


def print_cost(console: Console, monitor: RunMonitor) -> None:
    """Print time and memory."""
    gib = monitor.peak_rss_bytes / 2**30
    console.print(f"{monitor.wall_seconds:.0f} s in all, {gib:.1f} GiB of memory at the peak.")


def print_demo(console: Console, outcomes: Mapping[str, StageOutcome]) -> None:
    """Print the oracle's verdict, where the data is the demo world's."""
    demo = summary_of(outcomes, 0.0, 0)["demo"]
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
        console.print(line, highlight=False, soft_wrap=True, markup=False)


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
