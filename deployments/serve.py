"""Serve every flow from one process: schedules and runs from the UI on a laptop, without a worker.

Start a Prefect server, point ``PREFECT_API_URL`` at it, then ``python deployments/serve.py``.
"""

from __future__ import annotations

from prefect import serve
from prefect.schedules import Cron

from flows.registry import STAGE_FLOWS
from flows.rlhf_pipeline import rlhf_pipeline


def main() -> None:
    """Serve the chain, with a paused nightly schedule, and each stage; one run at a time."""
    nightly = rlhf_pipeline.to_deployment(
        "nightly",
        schedule=Cron("0 2 * * *", timezone="UTC", slug="nightly", active=False),
        tags=["rlhf", "chain"],
    )
    stages = [
        flow.to_deployment(stage.replace("_", "-"), tags=["rlhf", "stage"])
        for stage, flow in STAGE_FLOWS.items()
    ]
    serve(nightly, *stages, limit=1)


if __name__ == "__main__":
    main()
