"""What each stage reads and writes: the one table behind flows, chain and command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.config import Stage


@dataclass(frozen=True)
class InputSpec:
    """An upstream artefact: which stage makes it and what it is."""

    stage: Stage
    kind: type[Artifact]


@dataclass(frozen=True)
class StageSpec:
    """One stage.

    Args:
        kind: what it writes.
        code_version: part of the fingerprint; raise it when the stage's code starts to give another
            result for the same config and inputs, so that finished artefacts are not reused.
        inputs: upstream artefacts by parameter name of the flow.
    """

    kind: type[Artifact]
    code_version: int
    inputs: Mapping[str, InputSpec]


_PREFERENCES = InputSpec("ingest", PreferenceDataset)
_BASE = InputSpec("sft", PolicyCheckpoint)
_REWARD_MODEL = InputSpec("reward_model", RewardModelCheckpoint)
_POLICY = InputSpec("offline_ppo", PolicyCheckpoint)
_STUDENT = InputSpec("distill", StudentAdapter)

STAGE_SPECS: Mapping[Stage, StageSpec] = {
    "ingest": StageSpec(PreferenceDataset, 4, {}),
    "sft": StageSpec(PolicyCheckpoint, 2, {"preferences": _PREFERENCES}),
    "reward_model": StageSpec(
        RewardModelCheckpoint, 4, {"preferences": _PREFERENCES, "base": _BASE}
    ),
    "offline_ppo": StageSpec(
        PolicyCheckpoint,
        3,
        {"preferences": _PREFERENCES, "reward_model": _REWARD_MODEL, "base": _BASE},
    ),
    "distill": StageSpec(
        StudentAdapter,
        2,
        {
            "preferences": _PREFERENCES,
            "policy": _POLICY,
            "base": _BASE,
            "reward_model": _REWARD_MODEL,
        },
    ),
    "evaluate": StageSpec(
        EvalReport,
        2,
        {
            "preferences": _PREFERENCES,
            "student": _STUDENT,
            "policy": _POLICY,
            "base": _BASE,
            "reward_model": _REWARD_MODEL,
        },
    ),
}
