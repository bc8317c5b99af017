"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show logs and tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow address; default: the workspace's database.")
]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]
