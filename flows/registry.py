"""The flow of each stage by name, for the command line."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import Flow

from flows.distill import distill
from flows.evaluate import evaluate
from flows.ingest import ingest
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.sft import sft
from tasks.config import Stage

STAGE_FLOWS: Mapping[Stage, Flow[..., str]] = {
    "ingest": ingest,
    "sft": sft,
    "reward_model": train_reward_model,
    "offline_ppo": train_offline_ppo,
    "distill": distill,
    "evaluate": evaluate,
}
