"""Flow `rlhf-pipeline`: the chain from preference pairs to a scored student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from prefect import Flow, flow

from flows.chain import chain_run
from flows.stage_run import HOOKS
from flows.stages import AS_GIVEN, STAGE_SPECS, completed
from tasks.config.shared import Stage
from tasks.pipeline_config import PipelineConfig

# The flow of each stage by name, in the chain's order.
STAGE_FLOWS: Mapping[str, Flow[..., str]] = {name: spec.flow for name, spec in STAGE_SPECS.items()}
DEFAULTS = PipelineConfig()


@flow(name="rlhf-pipeline", persist_result=True, **HOOKS)
def rlhf_pipeline(
    cfg: Annotated[PipelineConfig, AS_GIVEN] = DEFAULTS,
    rerun_from: Stage | None = None,
    preset: str | None = None,
) -> str:
    """Run all stages one after another and return the path of the evaluation report.

    Each hands the next the path of its artefact. A stage whose artefact exists with the same
    fingerprint is reused, unless ``cfg.reuse`` is off or the stage is ``rerun_from`` or after it.

    Args:
        cfg: Settings of all stages; what is left out comes from the preset.
        rerun_from: This stage and all after it run even if they are finished.
        preset: Config file that completes `cfg`: a path on the worker, or a packaged name such as
            `demo`; without it the defaults do.
    """
    cfg = completed(PipelineConfig, cfg, preset)
    paths: dict[str, str] = {}
    with chain_run(cfg, rerun_from) as chain:
        for name, spec in STAGE_SPECS.items():
            run_stage = STAGE_FLOWS[name]
            refs = spec.refs(paths)
            paths[name] = run_stage(getattr(cfg, name), **refs, options=chain.options(spec.name))
    return paths["evaluate"]
