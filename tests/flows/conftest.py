"""Small real flows on the stage runner: each writes one file instead of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.chain import chain_run
from flows.stage_run import HOOKS, stage_run
from flows.stages import STAGE_SPECS, RunOptions
from tasks.artifacts import KINDS, Artifact, build_artifact, newest_artifact
from tasks.config.shared import STAGES, Stage
from tasks.context import StageContext
from tasks.ingest.config import DemoWorldConfig, IngestConfig
from tasks.pipeline_config import PipelineConfig

SMALL = PipelineConfig(ingest=IngestConfig(demo=DemoWorldConfig(n_pairs=60)))
DEFAULT_OPTIONS = RunOptions()

# What the next write does before it publishes: raise, look at the context, or add to its report.
Before = Callable[[StageContext], dict[str, Any] | None]
_before: dict[str, Before] = {}


@task(cache_policy=NO_CACHE)
def write_payload(ctx: StageContext) -> Artifact:
    """Leave a checkpoint, report, and publish one file."""
    ctx.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    (ctx.checkpoint_dir / "step-1").write_text("state")
    ctx.log.metrics({"loss": 0.5}, 1)
    ctx.log.progress(1, 2)
    ctx.log.progress(2, 2)
    ctx.draft.metrics["accuracy"] = 0.75
    ctx.draft.counts["rows"] = 3
    report: dict[str, Any] = {"demo": {"reward_accuracy_clean": 0.9}}
    if ctx.stage in _before:
        report |= _before[ctx.stage](ctx) or {}
    with build_artifact(ctx.artifacts_dir, ctx.draft) as directory:
        (directory / "payload.bin").write_bytes(ctx.stage.encode())
        (directory / "report.json").write_text(json.dumps(report))
    made = newest_artifact(ctx.artifacts_dir, KINDS[ctx.draft.kind], ctx.fingerprint)
    assert made is not None
    return made


@flow(name="mini-stage", persist_result=True, **HOOKS)
def mini_stage(
    stage: Stage,
    refs: dict[str, str],
    options: RunOptions = DEFAULT_OPTIONS,
    changes: dict[str, Any] | None = None,
) -> str:
    """Run one stage with a payload of one file."""
    cfg = getattr(SMALL, stage)
    cfg = type(cfg).model_validate(cfg.model_dump() | (changes or {}))
    with stage_run(stage, cfg, options, None, **refs) as run:
        if run.is_needed:
            run.artifact = write_payload(run.context)
    return run.path


@flow(name="mini-chain", persist_result=True, **HOOKS)
def mini_chain(cfg: PipelineConfig = SMALL, rerun_from: Stage | None = None) -> str:
    """Run all stages one after another, as the real chain does."""
    paths: dict[str, str] = {}
    with chain_run(cfg, rerun_from) as chain:
        for stage in STAGES:
            refs = STAGE_SPECS[stage].refs(paths)
            paths[stage] = mini_stage(stage, refs, chain.options(stage))
    return paths["evaluate"]


@pytest.fixture
def before_publishing() -> Any:
    """A function that says what a stage does before it publishes; forgotten after the test."""
    yield _before.__setitem__
    _before.clear()


@pytest.fixture
def run_stage(prefect_server: None, workspace: Any) -> Callable[..., str]:
    """A function that runs one mini stage on the test's Prefect server."""

    def run(
        stage: Stage,
        options: RunOptions = DEFAULT_OPTIONS,
        changes: dict[str, Any] | None = None,
        **refs: str,
    ) -> str:
        return mini_stage(stage, refs, options, changes)

    return run


@pytest.fixture
def run_chain(prefect_server: None, workspace: Any) -> Callable[..., str]:
    """A function that runs the mini chain; keywords change its config."""

    def run(rerun_from: Stage | None = None, **changes: Any) -> str:
        return mini_chain(SMALL.model_copy(update=changes), rerun_from)

    return run


@pytest.fixture
def chain_flow() -> Any:
    """The mini chain itself."""
    return mini_chain
