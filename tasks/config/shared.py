"""Sections that several stages share, and the checks between their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Seed = Annotated[
    int, Field(ge=0, le=2**53 - 1, description="Seed; at most 2^53 - 1, so that JSON carries it.")
]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]

# The name of the one source that `ingest.source` gives.
UNNAMED = "source"
RowForm = Literal["auto", "hh", "prompt", "messages", "scored", "verl"]

# In the chain's order; each is a section of `PipelineConfig` and a record of `flows.stages`.
Stage = Literal["ingest", "sft", "reward_model", "offline_ppo", "distill", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def setting(default: Any, **kwargs: Any) -> Any:
    """Declare a field that does not change the result of a stage."""
    return Field(default, json_schema_extra={"identity": False}, **kwargs)


def later(default: Any, **kwargs: Any) -> Any:
    """Declare a field whose default is what was done before there was the field.

    At its default it is no part of the fingerprint, so that artefacts from before it are reused.
    """
    return Field(default, json_schema_extra={"identity": "unless default"}, **kwargs)


def _is_numeric(annotation: Any) -> bool:
    """Return whether a field holds numbers and can't hold true or false."""
    kinds = set(_leaves(annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, Any, object}


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for one in inner:
        yield from _leaves(one)


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


class Section(BaseModel):
    """Base of every configuration model: frozen, strict about unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # Without it a section's heading in Prefect's new UI is the name of its class.
        field_title_generator=lambda name, _: name.replace("_", " ").capitalize(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_numbers(cls, value: object, info: ValidationInfo) -> object:
        # Python takes true for 1, which nobody means who writes `seed: true`.
        field = cls.model_fields[info.field_name or ""]
        if _is_numeric(field.annotation) and any(isinstance(one, bool) for one in _items(value)):
            raise ValueError("Input should be a number, not true or false")
        return value


class StageConfig(Section):
    """Fields that every stage has."""

    seed: Seed = 0

    @property
    def worker_groups(self) -> int:
        """How many groups of ``runtime.ranks`` workers the stage asks Ray for."""
        return 1

    def settings_without_effect(self) -> dict[str, str]:
        """Return the settings that were changed and that nothing reads in this combination, each
        with the reason."""
        return {}


class OptimizerConfig(Section):
    """AdamW with a warm-up and a constant or cosine schedule."""

    learning_rate: PositiveFloat = Field(1e-4, description="Peak of the schedule.")
    schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="What follows the warm-up."
    )
    warmup_share: Share = Field(0.05, description="Share of all steps spent warming up.")
    min_lr_share: Share = Field(0.0, description="Where the cosine ends, as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0.0, description="Decoupled, as in AdamW.")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.999), description="Decay of the running mean and of the running square."
    )
    clip_grad_norm: PositiveFloat = Field(1.0, description="A longer gradient is cut to this norm.")

    def idle(self, prefix: str) -> list[str]:
        """Return the changed settings that this schedule does not read."""
        return [] if self.schedule == "cosine" else changed_fields(self, prefix, "min_lr_share")


class RuntimeConfig(Section):
    """Where and how verl workers run. The same fields serve a laptop and a GPU cluster."""

    ranks: PositiveInt = Field(1, description="Data-parallel workers.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: GPUs where there are enough of them."
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Compute; master weights are fp32.")
    attention: Literal["sdpa", "flash_attention_2"] = Field(
        "sdpa", description="flash_attention_2 needs the package flash-attn."
    )
    remove_padding: bool = Field(False, description="Pack rows instead of padding them.")
    share_prompts: bool = Field(
        True, description="Compute the prompt of several responses once, where the model allows it."
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations twice to save memory."
    )
    offload: bool = Field(False, description="Weights and optimizer state in host memory.")
    tokens_per_micro_batch: PositiveInt = Field(
        16384,
        description="Tokens of one micro-batch per rank, padding included; on CPU no more "
        "than 2048 where prompts are shared, since more would not be faster.",
    )
    nodes: PositiveInt = setting(
        1, description="Nodes of the Ray cluster that share the ranks, as many on each."
    )
    placement: Literal["colocated", "separate"] = setting(
        "colocated",
        description="separate: in offline PPO the policy has the ranks to itself, and the critic "
        "and the frozen models have as many again in a placement group of their own.",
    )
    ray_address: str | None = setting(
        None, description="host:port or 'auto' of a running cluster; null starts one."
    )
    ray_start_timeout_seconds: PositiveInt = setting(
        30, description="How long to wait for ray_address."
    )
    cpu_threads: PositiveInt = setting(2, description="Torch threads, shared by CPU ranks.")

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.ranks % self.nodes:
            raise ValueError(
                f"ranks {self.ranks} is not a multiple of nodes {self.nodes}: each node runs as "
                "many ranks"
            )
        return self


class RenderingConfig(Section):
    """Limits of the one renderer that every stage uses."""

    max_prompt_tokens: PositiveInt = Field(
        512, description="A longer prompt loses its oldest turns."
    )
    max_response_tokens: PositiveInt = Field(
        256, description="A longer response leaves its pair out."
    )
    truncate_response: bool = Field(
        False, description="Cut an over-long response instead of leaving its pair out."
    )


class TinyModelConfig(Section):
    """A Llama built from scratch, with a tokenizer trained on the ingested text."""

    hidden_size: PositiveInt = Field(128, description="Width.")
    n_layers: PositiveInt = Field(2, description="Decoder layers.")
    n_heads: PositiveInt = Field(4, description="Attention heads.")
    vocab_size: PositiveInt = Field(512, description="Entries of the tokenizer.")
    max_position_embeddings: PositiveInt = Field(1024, description="Longest row in tokens.")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % self.n_heads or self.hidden_size // self.n_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} / n_heads {self.n_heads} must be whole and even"
            )
        return self


class ModelConfig(Section):
    """Where the base model comes from."""

    source: str = Field(
        "tiny",
        description="'tiny', a directory in transformers format, a hub id, or "
        "'package:smollm2-135m': a wheel of the package index, converted once.",
    )
    revision: str | None = Field(None, description="Commit, tag or branch of a hub id.")
    tiny: TinyModelConfig = TinyModelConfig()


class GenerationConfig(Section):
    """Sampling."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Nucleus: share of the probability that is sampled from."
    )
    max_new_tokens: PositiveInt = Field(64, description="Longest answer.")
    batch_size: PositiveInt = Field(
        128, description="Prompts at a time; another number draws other samples."
    )


class CheckpointConfig(Section):
    """How often training state is written, so that a killed run continues."""

    save_every_steps: PositiveInt = setting(50, description="Steps between checkpoints.")
    keep: PositiveInt = setting(2, description="Complete checkpoints kept on disk.")


class LoraConfig(Section):
    """A low-rank adapter (Hu et al., 2021)."""

    rank: PositiveInt = Field(16, description="Rank of the update.")
    alpha: PositiveInt = Field(32, description="The update is scaled by alpha / rank.")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear", description="Names of the adapted layers, or all-linear."
    )


class StudentLoraConfig(LoraConfig):
    """The student's adapter."""

    dropout: Share = 0.0
    use_rslora: bool = Field(
        False, description="Scale by alpha / sqrt(rank) (Kalajdzievski, 2023), not alpha / rank."
    )
    use_dora: bool = Field(
        False, description="Learn magnitude and direction of the weights apart (Liu et al., 2024)."
    )


class SourceConfig(Section):
    """One source of several."""

    name: str = Field(min_length=1, description="Stored with each row.")
    path: str = Field(
        min_length=1,
        description="A file, a glob, a directory, or a hub data set: owner/name.",
    )
    format: RowForm = Field("auto", description="Format of the rows; auto looks at their fields.")
    weight: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Share of the source's conversations that is taken, by seeded hash.",
    )
    subset_column: str | None = Field(
        None, description="Field of a row that names its subset; null: the folder of the file."
    )
    hub_subset: str | None = Field(None, description="Configuration of a hub data set.")
    hub_dir: str | None = Field(None, description="Directory in a hub data set (data_dir).")
    hub_split: str = Field("train", description="Split of a hub data set.")
    revision: str | None = Field(None, description="Commit, tag or branch of a hub data set.")


class PromotionConfig(Section):
    """When a student that passes the gate becomes the champion.

    A student is compared with the champion only in what both were measured with the same yardstick:
    the same judge or reward model, and the same questions or data. Where that is nothing, the
    champion stays. A reused evaluation decides anew.
    """

    enabled: bool = Field(True, description="Off: a champion is made by `rlhf promote` alone.")
    max_rate_drop: float = Field(
        0.02,
        ge=0.0,
        le=1.0,
        description="How far below the champion's an accuracy, a win rate or a share may be.",
    )
    max_score_drop: float = Field(
        0.1, ge=0.0, description="How far below the champion's the score on the questions may be."
    )


class TrackingConfig(Section):
    """Where runs are recorded. The defaults need no server."""

    tracking_uri: str | None = setting(
        None, description="MLflow address; null is the workspace's database."
    )
    experiment: str = setting("rlhf-flows", description="MLflow experiment.")
    system_metrics_seconds: PositiveFloat | None = setting(
        10.0, description="How often load, memory, disk and network are recorded; null is never."
    )


def check_shares(field: str, units: int, runtime: RuntimeConfig) -> None:
    """Refuse a batch that the ranks cannot share evenly.

    Raises:
        ValueError: naming both fields.
    """
    if units % runtime.ranks:
        raise ValueError(f"{field} {units} is not a multiple of runtime.ranks {runtime.ranks}")


def check_budget(rendering: RenderingConfig, runtime: RuntimeConfig, rows: int) -> None:
    """Refuse a micro-batch budget that the longest group of rows exceeds.

    Raises:
        ValueError: naming the budget and what it must hold.
    """
    longest = rows * (rendering.max_prompt_tokens + rendering.max_response_tokens)
    if runtime.tokens_per_micro_batch < longest:
        raise ValueError(
            f"runtime.tokens_per_micro_batch {runtime.tokens_per_micro_batch} is less than the "
            f"{longest} tokens that {rows} row(s) may have; raise it or lower rendering limits"
        )


def identity_fields(section: BaseModel) -> dict[str, Any]:
    """Return the fields of a section that change what a stage produces, nested, as plain JSON
    values."""
    plain = section.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        counts = extra.get("identity", True) if isinstance(extra, dict) else True
        value = getattr(section, name)
        if counts is False or (counts == "unless default" and value == field.default):
            continue
        kept[name] = identity_fields(value) if isinstance(value, BaseModel) else plain[name]
    return kept


def changed_fields(section: BaseModel, prefix: str, *names: str) -> list[str]:
    """Return the dotted names of fields that differ from their defaults, ``names`` or all."""
    fields = type(section).model_fields
    return [
        f"{prefix}.{name}"
        for name in names or fields
        if getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]
