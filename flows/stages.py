"""The stages: one record each, which flows, chain, checks and command line go by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from flows.inputs import (
    TINY,
    check_evaluation,
    check_groups,
    check_own_code,
    check_pairs,
    check_ray_address,
    evaluate_fields,
    evaluate_sources,
    ingest_fields,
    ingest_sources,
    judge_model,
    model_source,
    own_code,
    own_code_fields,
    ray_addresses,
    runtimes_of,
)
from tasks.artifacts import (
    Artifact,
    EvalReport,
    ParentRef,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.config.loading import find_config, load_config
from tasks.config.messages import problems_of
from tasks.config.shared import (
    STAGES,
    ModelConfig,
    PositiveInt,
    Section,
    Stage,
    StageConfig,
    TrackingConfig,
    identity_fields,
)
from tasks.distill.config import DistillConfig
from tasks.errors import ConfigError
from tasks.evaluate.config import EvaluateConfig
from tasks.ingest.config import IngestConfig
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.reward_model.config import RewardModelConfig
from tasks.sft.config import SftConfig
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from prefect import Flow


@dataclass(frozen=True)
class StageSpec:
    """One stage.

    Args:
        name: its section of the config.
        config: class of that section.
        entrypoint: its flow, as ``module:function``; imported when it is wanted.
        kind: what it writes.
        code_version: part of the fingerprint; raise it when the stage's code starts to give another
            result for the same config and inputs, so that finished artefacts are not reused.
        inputs: upstream stages, by the parameter of the flow that takes their artefact.
        sources: what it reads besides, by name: raw files, each with its hash.
        models: models of the config that it reads; None and the tiny one are built from scratch.
        fields: turns the config's fields into those of the fingerprint, where a raw file counts
            by its hash and not by its path.
        check: refuses raw files and keys that cannot be used, before any work.
        headlines: metrics that people look for first.
        pages: files of the artefact that people look at in MLflow.
    """

    name: Stage
    config: type[StageConfig]
    entrypoint: str
    kind: type[Artifact]
    code_version: int
    inputs: Mapping[str, StageSpec] = field(default_factory=dict)
    sources: Callable[[Any, Workspace], dict[str, ParentRef]] = lambda cfg, workspace: {}
    models: Callable[[Any], dict[str, ModelConfig | None]] = lambda cfg: {}
    fields: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda cfg, fields: fields
    check: Callable[[Any, Workspace], None] = lambda cfg, workspace: None
    headlines: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()

    @property
    def flow(self) -> Flow[..., str]:
        """The stage's flow."""
        module, _, function = self.entrypoint.partition(":")
        found: Flow[..., str] = getattr(import_module(module), function)
        return found

    def refs(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Return the inputs of the flow, given the path of what each stage made."""
        return {name: paths[upstream.name] for name, upstream in self.inputs.items()}


INGEST = StageSpec(
    name="ingest",
    config=IngestConfig,
    entrypoint="flows.ingest:ingest",
    kind=PreferenceDataset,
    code_version=4,
    sources=ingest_sources,
    fields=ingest_fields,
    check=check_pairs,
    pages=("card.md",),
)
SFT = StageSpec(
    name="sft",
    config=SftConfig,
    entrypoint="flows.sft:sft",
    kind=PolicyCheckpoint,
    code_version=2,
    inputs={"preferences": INGEST},
    models=lambda cfg: {"model": cfg.model},
)
REWARD_MODEL = StageSpec(
    name="reward_model",
    config=RewardModelConfig,
    entrypoint="flows.reward_model:train_reward_model",
    kind=RewardModelCheckpoint,
    code_version=4,
    inputs={"preferences": INGEST, "base": SFT},
    headlines=("test_accuracy", "test_accuracy_low", "test_accuracy_high", "test_ece"),
)
OFFLINE_PPO = StageSpec(
    name="offline_ppo",
    config=OfflinePPOConfig,
    entrypoint="flows.offline_ppo:train_offline_ppo",
    kind=PolicyCheckpoint,
    code_version=3,
    inputs={"preferences": INGEST, "reward_model": REWARD_MODEL, "base": SFT},
    sources=own_code,
    fields=own_code_fields,
    check=check_own_code,
    headlines=("reward_agrees_with_label", "chosen_logprob_drift", "rejected_logprob_drift"),
)
DISTILL = StageSpec(
    name="distill",
    config=DistillConfig,
    entrypoint="flows.distill:distill",
    kind=StudentAdapter,
    code_version=2,
    inputs={
        "preferences": INGEST,
        "policy": OFFLINE_PPO,
        "base": SFT,
        "reward_model": REWARD_MODEL,
    },
    models=lambda cfg: {"model": cfg.model},
    headlines=("teacher_same_top", "win_rate_against_base", "win_rate_against_teacher"),
)
EVALUATE = StageSpec(
    name="evaluate",
    config=EvaluateConfig,
    entrypoint="flows.evaluate:evaluate",
    kind=EvalReport,
    code_version=2,
    inputs={
        "preferences": INGEST,
        "student": DISTILL,
        "policy": OFFLINE_PPO,
        "base": SFT,
        "reward_model": REWARD_MODEL,
    },
    sources=evaluate_sources,
    models=judge_model,
    fields=evaluate_fields,
    check=check_evaluation,
    headlines=(
        "policy_win_rate_against_base",
        "student_win_rate_against_base",
        "policy_oracle_good_rate",
        "student_oracle_good_rate",
    ),
    pages=("report.md", "report.json", "report.html", "scores.png", "radar.png"),
)

# In the chain's order.
STAGE_SPECS: Mapping[str, StageSpec] = {
    spec.name: spec for spec in (INGEST, SFT, REWARD_MODEL, OFFLINE_PPO, DISTILL, EVALUATE)
}


def spec_of(cfg: StageConfig) -> StageSpec:
    """Return the stage that a config is of."""
    return next(spec for spec in STAGE_SPECS.values() if isinstance(cfg, spec.config))


def raw_sources(cfg: StageConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return what a stage reads besides the artefacts of other stages; hub models are downloaded.

    Raises:
        MissingInputError: a file or model that is not there.
        ModelError: a model that cannot be used.
    """
    sources = spec_of(cfg).sources(cfg, workspace)
    return sources | {name: model_source(m, workspace) for name, m in _models(cfg).items()}


def result_fields(cfg: StageConfig) -> dict[str, Any]:
    """Return the fields for the fingerprint; a raw file counts by its hash, not by its path."""
    return spec_of(cfg).fields(cfg, identity_fields(cfg))


def models_of(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> list[ModelConfig]:
    """Return the models that are not built from scratch, each once."""
    models = [model for stage in stages for model in _models(getattr(cfg, stage)).values()]
    return list({(model.source, model.revision): model for model in models}.values())


def _models(cfg: StageConfig) -> dict[str, ModelConfig]:
    named = spec_of(cfg).models(cfg)
    return {name: m for name, m in named.items() if m is not None and m.source != TINY}


def check_inputs(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> None:
    """Check files, models and Ray clusters of these stages, before they do any work.

    Raises:
        RlhfError: as `check_sources`.
        ClusterError: nothing answers at a Ray address, or there are too few CPUs or GPUs for
            separate placement groups.
    """
    check_sources(cfg, stages)
    for address in sorted(ray_addresses(cfg, stages)):
        check_ray_address(address)
    for stage, runtime in runtimes_of(cfg, stages).items():
        check_groups(runtime, getattr(cfg, stage).worker_groups)


def check_sources(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> None:
    """Check files and models of these stages.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file is in another format.
        ModelError: a model lacks weights, tokenizer or chat template, or the hub does not have it.
        ConfigError: a file or environment variable without what is wanted of it.
    """
    workspace = Workspace.from_environment()
    for stage in stages:
        STAGE_SPECS[stage].check(getattr(cfg, stage), workspace)
    for model in models_of(cfg, stages):
        model_source(model, workspace)


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
