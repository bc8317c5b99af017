"""Flow `ingest`: preference pairs in, validated Parquet out."""

from __future__ import annotations

from typing import Annotated

from prefect import flow

from flows.inputs import input_files
from flows.outcomes import publish_card
from flows.stage_run import HOOKS, stage_run
from flows.stages import AS_GIVEN, DEFAULT_OPTIONS, RunOptions
from tasks.ingest.config import IngestConfig

DEFAULTS = IngestConfig()


@flow(name="ingest", persist_result=True, **HOOKS)
def ingest(
    cfg: Annotated[IngestConfig, AS_GIVEN] = DEFAULTS,
    options: RunOptions = DEFAULT_OPTIONS,
    preset: str | None = None,
) -> str:
    """Validate preference pairs, yours or the demo world's, and return the path of the dataset.

    Args:
        cfg: Settings; what is left out comes from the preset.
        options: How it is run; nothing here changes the result.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    with stage_run("ingest", cfg, options, preset) as run:
        if run.is_needed:
            from tasks.ingest.stage import ingest_pairs_task

            files = input_files(run.cfg, run.sources)
            run.artifact = ingest_pairs_task(run.context, run.cfg, files)
            publish_card(run.artifact)
    return run.path
