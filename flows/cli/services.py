"""The commands `rlhf up`, `down`, `status` and `deploy`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared import FAILURE, AsJson, Debug, Experiment, TrackingUri, reported, terminal
from tasks.config.shared import TrackingConfig
from tasks.workspace import Workspace

services_app = typer.Typer()


@services_app.command("up")
def up_command(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="What the deployments run by default.")
    ] = "demo",
    prefect_port: Annotated[
        int | None, typer.Option(help="Port of the Prefect server; default: 4200.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="Port of the MLflow server; default: 5000.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Start a Prefect server, an MLflow server and a worker here, and deploy all flows.

    They listen on loopback only and go on after the command. What runs already is left alone, so
    the command may be repeated, for instance after a change of CONFIG or a crash.
    """
    with reported(debug):
        from flows.services.up import print_services, up

        services, deployments = up(config, prefect_port, mlflow_port)
        console = terminal()
        print_services(console, services)
        console.print(f"Deployments: {', '.join(deployments)}.", highlight=False, soft_wrap=True)
        console.print("Stop everything with `rlhf down`.", highlight=False)


@services_app.command("down")
def down_command(debug: Debug = False) -> None:
    """Stop what `rlhf up` started in this workspace, and nothing else.

    A run that is at work is ended first; its MLflow run is marked as killed, and a retry goes on
    from its last checkpoint.
    """
    with reported(debug):
        from flows.services.up import down

        ended, notes = down(Workspace.from_environment())
        for name, n_processes in ended.items():
            print(f"{name}: {f'{n_processes} processes ended' if n_processes else 'did not run'}")
        for note in notes:
            print(note)


@services_app.command("status")
def status_command(
    as_json: AsJson = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Tell what runs in this workspace, and which artefacts have a newer upstream.

    The exit code is 1 when something that `rlhf up` started does not work.
    """
    with reported(debug):
        from flows.services.up import print_status, read_status

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        status = read_status(Workspace.from_environment(), tracking)
        if as_json:
            print(status.model_dump_json(indent=2))
        else:
            print_status(terminal(), status)
        if status.is_broken:
            raise typer.Exit(FAILURE)


@services_app.command("deploy")
def deploy_command(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="What the deployments run by default.")
    ] = "demo",
    debug: Debug = False,
) -> None:
    """Deploy all flows, the work pool and the automations to the server at PREFECT_API_URL."""
    with reported(debug):
        from flows.services.deploy import deploy
        from flows.services.prefect_server import required_api_url

        workspace = Workspace.from_environment()
        workspace.prepare()
        for name in deploy(config, required_api_url(workspace), workspace):
            print(name)
