"""Serve every flow from one process: schedules and runs from the UI on a laptop, without a worker.

Start a Prefect server, set ``PREFECT_API_URL`` to it, then ``python deployments/serve.py CONFIG``.
Deployments, schedules and parameters are those of ``deployments/prefect.yaml``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prefect import Flow, serve
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron

from flows.rlhf_pipeline import STAGE_FLOWS, rlhf_pipeline
from flows.services.deploy import rendered

_FLOWS: dict[str, Flow[..., str]] = {**STAGE_FLOWS, "rlhf_pipeline": rlhf_pipeline}


def served(deployment: dict[str, Any]) -> RunnerDeployment:
    """Return what `serve` takes for an entry of ``prefect.yaml``."""
    flow = _FLOWS[Path(deployment["entrypoint"].partition(":")[0]).stem]
    schedules = [
        Cron(one["cron"], timezone=one["timezone"], slug=one["slug"])
        for one in deployment.get("schedules", [])
    ]
    made: RunnerDeployment = flow.to_deployment(
        deployment["name"],
        schedules=schedules,
        parameters=deployment["parameters"],
        description=deployment["description"],
        tags=deployment["tags"],
    )
    return made


def main() -> None:
    """Serve the chain and each stage; one run at a time."""
    config = sys.argv[1] if len(sys.argv) > 1 else "demo"
    serve(*map(served, rendered(config)["deployments"]), limit=1)


if __name__ == "__main__":
    main()
