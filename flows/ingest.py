"""Flow `ingest`: preference pairs in, validated Parquet out."""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.options import DEFAULT_OPTIONS, RunOptions
from flows.raw_sources import input_files
from flows.reporting import publish_card
from flows.stage_run import stage_run
from tasks.config import IngestConfig

DEFAULTS = IngestConfig()


@flow(name="ingest", persist_result=True, **HOOKS)
def ingest(cfg: IngestConfig = DEFAULTS, options: RunOptions = DEFAULT_OPTIONS) -> str:
    """Validate preference pairs, yours or the demo world's, and return the path of the dataset."""
    with stage_run("ingest", cfg, options) as run:
        if run.is_needed:
            from tasks.ingest import ingest_pairs_task

            files = input_files(cfg, run.prepared.sources)
            dataset = ingest_pairs_task(run.context, cfg, files)
            run.publish(dataset)
            publish_card(dataset)
    return run.path
