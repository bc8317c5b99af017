"""Flow `rlhf-pipeline`: the chain from preference pairs to a scored student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from prefect import Flow, flow

from flows.chain import chain_run
from flows.distill import distill
from flows.evaluate import evaluate
from flows.ingest import ingest
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.sft import sft
from flows.stage_run import HOOKS
from flows.stages import AS_GIVEN, completed
from tasks.config.shared import Stage
from tasks.pipeline_config import PipelineConfig

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
    with chain_run(cfg, rerun_from) as chain:
        preferences = ingest(cfg.ingest, chain.options("ingest"))
        base = sft(cfg.sft, preferences, chain.options("sft"))
        reward_model = train_reward_model(
            cfg.reward_model, preferences, base, chain.options("reward_model")
        )
        policy = train_offline_ppo(
            cfg.offline_ppo, preferences, reward_model, base, chain.options("offline_ppo")
        )
        student = distill(
            cfg.distill, preferences, policy, base, reward_model, chain.options("distill")
        )
        report = evaluate(
            cfg.evaluate,
            preferences,
            student,
            policy,
            base,
            reward_model,
            chain.options("evaluate"),
        )
    return report


# The flow of each stage by name, for the command line.

STAGE_FLOWS: Mapping[Stage, Flow[..., str]] = {
    "ingest": ingest,
    "sft": sft,
    "reward_model": train_reward_model,
    "offline_ppo": train_offline_ppo,
    "distill": distill,
    "evaluate": evaluate,
}
