"""Configuration: one frozen model per stage, nested by concern.

A YAML file has one section per stage and three shared ones: ``seed``, ``runtime`` and
``rendering`` at the top level are defaults for every stage that has such a field and does not
set it. Unknown keys are errors. Fields marked with ``_setting`` do not change what a stage
produces (addresses, thread counts, logging) and stay out of its fingerprint.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seed = Annotated[
    int, Field(ge=0, le=2**53 - 1, description="Seed; at most 2^53 - 1, so that JSON carries it.")
]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]

Stage = Literal["ingest", "sft", "reward_model", "offline_ppo", "distill", "evaluate"]
STAGES: tuple[Stage, ...] = ("ingest", "sft", "reward_model", "offline_ppo", "distill", "evaluate")


def _setting(default: Any, **kwargs: Any) -> Any:
    """Declare a field that does not change the result of a stage."""
    return Field(default, json_schema_extra={"identity": False}, **kwargs)


class Section(BaseModel):
    """Base of every configuration model: frozen, strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class OptimizerConfig(Section):
    """AdamW with a warm-up and a constant or cosine schedule."""

    learning_rate: PositiveFloat = 1e-4
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_share: Share = Field(0.05, description="Share of all steps spent warming up.")
    min_lr_share: Share = Field(0.0, description="Where the cosine ends, as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad_norm: PositiveFloat = 1.0


class RuntimeConfig(Section):
    """Where and how verl workers run. The same fields serve a laptop and a GPU cluster."""

    ranks: PositiveInt = Field(1, description="Data-parallel workers.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Compute; master weights are fp32.")
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    remove_padding: bool = Field(False, description="Pack rows instead of padding them.")
    gradient_checkpointing: bool = False
    offload: bool = Field(False, description="Weights and optimizer state in host memory.")
    tokens_per_micro_batch: PositiveInt = Field(
        16384, description="Padded tokens of one micro-batch per rank."
    )
    ray_address: str | None = _setting(
        None, description="host:port or 'auto' of a running cluster; null starts one."
    )
    ray_start_timeout_seconds: PositiveInt = _setting(30)
    cpu_threads: PositiveInt = _setting(2, description="Torch threads, shared by CPU ranks.")


class RenderingConfig(Section):
    """Limits of the one renderer that every stage uses."""

    max_prompt_tokens: PositiveInt = 512
    max_response_tokens: PositiveInt = 256
    truncate_response: bool = Field(
        False, description="Cut an over-long response instead of leaving its pair out."
    )


class TinyModelConfig(Section):
    """A Llama built from scratch, with a tokenizer trained on the ingested text."""

    hidden_size: PositiveInt = 128
    n_layers: PositiveInt = 2
    n_heads: PositiveInt = 4
    vocab_size: PositiveInt = 512
    max_position_embeddings: PositiveInt = 1024


class ModelConfig(Section):
    """Where the base model comes from."""

    source: str = Field(
        "tiny", description="'tiny', a directory in transformers format, or a hub id."
    )
    revision: str | None = Field(None, description="Commit, tag or branch of a hub id.")
    tiny: TinyModelConfig = TinyModelConfig()


class CheckpointConfig(Section):
    """How often training state is written, so that a killed run continues."""

    save_every_steps: PositiveInt = _setting(50)
    keep: PositiveInt = _setting(2, description="Complete checkpoints kept on disk.")


class LoraConfig(Section):
    """A low-rank adapter (Hu et al., 2021)."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: str | tuple[str, ...] = "all-linear"


class DemoWorldConfig(Section):
    """The synthetic preference world behind ``ingest.source: demo``."""

    n_pairs: PositiveInt = 4000
    flip_rate: float = Field(
        0.1, ge=0.0, lt=0.5, description="Share of pairs whose label is wrong on purpose."
    )


class StageConfig(Section):
    """Fields that every stage has."""

    seed: Seed = 0


class IngestConfig(StageConfig):
    """Preference pairs in, validated Parquet out."""

    source: str = Field("demo", description="'demo', or a .jsonl, .jsonl.gz file of HH-RLHF pairs.")
    demo: DemoWorldConfig = DemoWorldConfig()
    validation_share: Share = 0.1
    test_share: Share = 0.1
    max_quarantine_share: float = Field(
        0.2, ge=0.0, le=1.0, description="Above this the source counts as broken."
    )
    rows_per_group: PositiveInt = 10_000


class SftConfig(StageConfig):
    """Behaviour cloning: the base model, and the policy that wrote the demo's data."""

    enabled: bool = Field(
        True, description="Off: the model is used as it is, for instance an instruct model."
    )
    model: ModelConfig = ModelConfig()
    responses: Literal["both", "chosen"] = "both"
    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    batch_pairs: PositiveInt = 32
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class RewardModelConfig(StageConfig):
    """Bradley-Terry reward model on the base model's backbone."""

    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    batch_pairs: PositiveInt = 32
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    center_coef: float = Field(
        0.0, ge=0.0, description="Weight of (r_chosen + r_rejected)^2: pins the offset."
    )
    evaluate_every_steps: PositiveInt = Field(
        50, description="Steps between looks at the held-out loss."
    )
    select_best: bool = Field(
        True, description="Keep the step with the lowest held-out loss, not the last."
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class BehaviorConfig(Section):
    """Which policy wrote the data."""

    policy: Literal["reference", "cloned"] = Field(
        "reference",
        description="reference: the base model; cloned: two-fold cross-fitted behaviour cloning.",
    )
    clone_epochs: PositiveFloat = 1.0
    clone_batch_pairs: PositiveInt = 32
    clone_optimizer: OptimizerConfig = OptimizerConfig()


class RewardConfig(Section):
    """What a response is worth."""

    components: dict[str, float] = Field(
        {"reward_model": 1.0},
        description="Weights of: reward_model, labels (+1 chosen, -1 rejected), function.",
    )
    function_path: str | None = Field(None, description="Python file with the reward function.")
    function_name: str = "reward_fn"
    normalize: Literal["standardize", "unit_range", "raw", "binary"] = "standardize"
    clip: PositiveFloat = 5.0
    center: Literal["none", "prompt"] = "none"
    kl_coef: float = Field(0.0, ge=0.0, description="KL-in-reward coefficient per token; 0 is off.")
    kl_target: PositiveFloat | None = Field(
        None, description="Adapt kl_coef towards this KL per token."
    )
    kl_horizon: PositiveInt = 10_000

    @model_validator(mode="after")
    def _check_components(self) -> RewardConfig:
        known = {"reward_model", "labels", "function"}
        unknown = set(self.components) - known
        if unknown or not self.components:
            raise ValueError(
                f"unknown components {sorted(unknown)}; choose one or more of {sorted(known)}"
            )
        if all(weight == 0.0 for weight in self.components.values()):
            raise ValueError("all component weights are zero; give at least one a weight")
        if "function" in self.components and self.function_path is None:
            raise ValueError(
                "component 'function' needs function_path, the Python file that defines it"
            )
        return self


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Literal["group", "rloo", "gae", "reinforce_pp"] = "group"
    normalize_std: bool = Field(
        True, description="Divide the group advantage by the group's standard deviation."
    )
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    gae_lambda: float | Literal["adaptive"] = 0.95
    whiten: bool = False


class CriticConfig(Section):
    """The value function, used by ``estimator: gae`` only."""

    warmup_steps: PositiveInt = Field(40, description="Steps on returns with the policy frozen.")
    value_clip: PositiveFloat = 0.2
    force: bool = Field(
        False, description="Go on although the warmed-up critic explains no variance."
    )
    optimizer: OptimizerConfig = OptimizerConfig()


class ImportanceConfig(Section):
    """Truncated weights between the frozen proximal and the behaviour policy."""

    level: Literal["sequence", "geometric", "token"] = "sequence"
    cap: float = Field(2.0, ge=1.0)


class PolicyLossConfig(Section):
    """Clipped surrogate with a lower bound for negative advantages."""

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(0.2, gt=0.0)
    dual_clip: float = Field(3.0, gt=1.0)
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    entropy_coef: float = Field(0.0, ge=0.0)


class OfflinePPOConfig(StageConfig):
    """Offline PPO over the stored responses, with a re-anchored proximal policy."""

    steps: PositiveInt = 80
    batch_prompts: PositiveInt = 64
    reanchor_steps: int = Field(
        8, ge=0, description="Steps between snapshots of the proximal policy; 0 never moves it."
    )
    behavior: BehaviorConfig = BehaviorConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    importance: ImportanceConfig = ImportanceConfig()
    loss: PolicyLossConfig = PolicyLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class GenerationConfig(Section):
    """Sampling."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = _setting(128)


class SoftLabelConfig(Section):
    """Top-k soft labels with a tail bucket."""

    top_k: PositiveInt = 16
    tau: PositiveFloat = 2.0
    alpha: float = Field(
        0.5, ge=0.0, le=1.0, description="Weight of the soft loss; the rest is cross-entropy."
    )


class DistillConfig(StageConfig):
    """The aligned policy teaches a LoRA student."""

    student: Literal["base", "model"] = Field(
        "base", description="Adapter on the chain's base, or on `model`."
    )
    model: ModelConfig | None = None
    data: Literal["teacher", "chosen", "all"] = Field(
        "teacher", description="Responses the student learns on."
    )
    lora: LoraConfig = LoraConfig()
    soft_labels: SoftLabelConfig = SoftLabelConfig()
    generation: GenerationConfig = GenerationConfig()
    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    batch_rows: PositiveInt = 64
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check_student(self) -> DistillConfig:
        if (self.student == "model") != (self.model is not None):
            raise ValueError("give `model` exactly when `student` is 'model'")
        if self.model is not None and self.model.source == "tiny":
            raise ValueError("a tiny student would have another tokenizer than its teacher")
        return self


class EvaluateConfig(StageConfig):
    """Two-turn questions in MT-Bench format, scored by the reward model."""

    questions: str = Field("demo", description="'demo', or a question.jsonl in FastChat's format.")
    judge: Literal["reward_model"] = "reward_model"
    max_questions: PositiveInt | None = None
    generation: GenerationConfig = GenerationConfig()
    category_temperatures: dict[str, float] = Field(
        {
            "writing": 0.7,
            "roleplay": 0.7,
            "extraction": 0.0,
            "math": 0.0,
            "coding": 0.0,
            "reasoning": 0.0,
            "stem": 0.1,
            "humanities": 0.1,
        },
        description="Temperature by question category; others use generation.temperature.",
    )
    held_out_prompts: PositiveInt = Field(
        400, description="Test prompts for win rates and the demo's oracle."
    )
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class TrackingConfig(Section):
    """Where runs are recorded. The defaults need no server."""

    tracking_uri: str | None = _setting(
        None, description="MLflow address; null is the workspace's database."
    )
    experiment: str = _setting("rlhf-flows")


class PipelineConfig(Section):
    """The chain."""

    name: str = _setting("rlhf", min_length=1)
    reuse: bool = _setting(True, description="Reuse a stage whose fingerprint exists and verifies.")
    tracking: TrackingConfig = TrackingConfig()
    ingest: IngestConfig = IngestConfig()
    sft: SftConfig = SftConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    offline_ppo: OfflinePPOConfig = OfflinePPOConfig()
    distill: DistillConfig = DistillConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


def identity_fields(section: BaseModel) -> dict[str, Any]:
    """Return the fields of a section that change what a stage produces, nested, as plain JSON
    values."""
    plain = section.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        value = getattr(section, name)
        kept[name] = identity_fields(value) if isinstance(value, BaseModel) else plain[name]
    return kept
