"""What each stage reads and writes: the one table behind flows, chain and command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.config.loading import find_config, load_config
from tasks.config.messages import problems_of
from tasks.config.shared import PositiveInt, Section, Stage, TrackingConfig
from tasks.errors import ConfigError
from tasks.pipeline_config import PipelineConfig


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


# What the chain tells a stage besides its config and inputs.


class RunOptions(Section):
    """How a stage is run; nothing here changes its result.

    The defaults suit a run from the Prefect UI.
    """

    reuse: bool = Field(
        False,
        description="Answer with a finished artefact of the same fingerprint, if there is one.",
    )
    tracking: TrackingConfig = Field(
        TrackingConfig(), description="Where the run is recorded; the preset's where not given."
    )
    timeout_seconds: PositiveInt | None = Field(
        None,
        description="After this time the stage ends as failed; it continues from its checkpoint.",
    )
    pipeline_run_id: str | None = Field(
        None, description="MLflow run of the chain that this stage belongs to."
    )
    is_trial: bool = Field(
        False,
        description="Part of a comparison: `latest` passes it over, and a student is no candidate.",
    )


DEFAULT_OPTIONS = RunOptions()


#
# Partial parameters: what a run from the UI or an API call leaves out comes from a config file.
#
# Prefect merges parameters at the top level only: a ``cfg`` of one field replaces the deployment's
# whole ``cfg``. So the fields that are not given are filled in here, from the ``preset``.

C = TypeVar("C", bound=Section)


def _keep(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, Mapping) else validate(value)


# Annotates a flow's `cfg`: a mapping stays as it was given until it is completed, because checks
# between fields would judge it by defaults that the preset replaces.
AS_GIVEN = WrapValidator(_keep)


def completed(model: type[C], cfg: C, preset: str | None) -> C:
    """Return a valid config of a stage, or of the chain.

    Args:
        model: its class.
        cfg: a config, or a mapping of the fields that were given.
        preset: a config file, by path or packaged name, whose section has the other fields; None
            for the defaults. A config keeps the fields that it was made with.

    Raises:
        MissingInputError: no such file.
        ConfigError: the file, or the whole, is not valid.
    """
    if isinstance(cfg, Mapping):
        given: Mapping[str, Any] = cfg
    elif preset is None:
        return cfg
    else:
        given = cfg.model_dump(exclude_unset=True)
    start = model() if preset is None else _section(load_config(find_config(preset)), model)
    try:
        return model.model_validate(lay_over(start, given))
    except ValidationError as error:
        raise ConfigError(problems_of(error, "cfg"), "", "correct the parameter cfg") from None


def completed_options(options: RunOptions, preset: str | None) -> RunOptions:
    """Return how a stage is run, recorded where the preset says unless told otherwise."""
    if preset is None or "tracking" in options.model_fields_set:
        return options
    return options.model_copy(update={"tracking": tracking_of(preset)})


def tracking_of(preset: str) -> TrackingConfig:
    """Return where runs with this preset are recorded."""
    return load_config(find_config(preset)).tracking


def _section(whole: PipelineConfig, model: type[C]) -> C:
    found = (whole, *(getattr(whole, name) for name in PipelineConfig.model_fields))
    return next(section for section in found if type(section) is model)


def lay_over(section: BaseModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's fields with the given ones on top, at every depth.

    Where the section has values instead of a section, as in a table of weights, the given ones
    replace them all.
    """
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    for name, value in given.items():
        below = fields.get(name)
        if isinstance(below, BaseModel) and isinstance(value, Mapping):
            value = lay_over(below, value)
        fields[name] = value
    return fields
