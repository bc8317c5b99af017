"""What this machine has, and what of a config would fail on it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flows.inputs import (
    TINY,
    check_gpus,
    check_groups,
    check_ray_address,
    count_gpus,
    ray_addresses,
    runtimes_of,
    uses_gpus,
)
from flows.services.prefect_server import API_URL, is_healthy
from flows.stages import check_sources, models_of
from tasks.config.shared import STAGES, LoraConfig, ModelConfig, RenderingConfig, RuntimeConfig
from tasks.errors import RlhfError, sentence
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import DISTRIBUTION, Workspace, package_versions

#
# How much memory a decoder needs to be trained and to answer, by arithmetic on its shape.
#
# For decoders with RMSNorm and a gated feed-forward layer (Llama, Qwen2, Mistral and the like), as
# the workers run them: master weights, gradients and AdamW's two moments in fp32, sharded over the
# ranks (FSDP2); computation in fp32 or bf16; attention without a stored matrix of scores.

# Bytes of a number.
FP32: Final = 4
COMPUTE_BYTES: Final = {"fp32": 4, "bf16": 2}

KNOWN_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
# Attention with a bias in its input matrices and none in the output one.
_QKV_BIAS_TYPES: Final = frozenset({"qwen2"})
_GATHERED_LAYERS: Final = 2  # the one in work and the one that is fetched meanwhile


@dataclass(frozen=True)
class ModelShape:
    """What decides the size of a decoder.

    Args:
        width: h, of the residual stream.
        layers: L.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_width: d, of each head.
        feed_forward: f, width of the gated feed-forward layer.
        vocabulary: V, rows of the embedding.
        tied: the vocabulary head is the embedding.
        qkv_bias: queries, keys and values have a bias.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    tied: bool
    qkv_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Return the shape that a model's config.json tells; None for another kind of model."""
        if config.get("model_type") not in KNOWN_TYPES:
            return None
        heads = int(config["num_attention_heads"])
        width = int(config["hidden_size"])
        return cls(
            width=width,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or width // heads),
            feed_forward=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", config["model_type"] in _QKV_BIAS_TYPES)),
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer: four attention matrices, three of the feed-forward layer, two norms,
        biases."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = self.width * (2 * queries + 2 * keys)
        bias = queries + 2 * keys if self.qkv_bias else 0
        return attention + bias + 3 * self.width * self.feed_forward + 2 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, V h; the vocabulary head has as many."""
        return self.vocabulary * self.width

    @property
    def n_parameters(self) -> int:
        """All weights of the language model, tied ones once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.width
        return self.layers * self.layer_parameters + ends

    @property
    def n_value_parameters(self) -> int:
        """All weights with one score per token (and its bias) instead of the vocabulary head."""
        ends = self.embedding_parameters + self.width
        return self.layers * self.layer_parameters + ends + self.width + 1

    def adapter_parameters(self, rank: int, targets: str | tuple[str, ...]) -> int:
        """Return the weights of a low-rank adapter: rank (in + out) for each matrix it adapts.

        Args:
            targets: names such as ``q_proj``; ``all-linear`` is all seven of a layer.
        """
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        sizes = {
            "q_proj": self.width + queries,
            "k_proj": self.width + keys,
            "v_proj": self.width + keys,
            "o_proj": queries + self.width,
            "gate_proj": self.width + self.feed_forward,
            "up_proj": self.width + self.feed_forward,
            "down_proj": self.feed_forward + self.width,
        }
        names = (targets,) if isinstance(targets, str) else targets
        if targets == "all-linear":
            names = tuple(sizes)
        return self.layers * rank * sum(sizes.get(name, 0) for name in names)

    def saved_bytes_per_token(self, dtype: str) -> int:
        """Return what one layer keeps of a token for the backward pass.

        With b bytes a number: each norm its fp32 input, its normalised input and its result
        (2 (4 + 2 b) h), attention queries, keys, values and result (4 b heads d), the feed-forward
        layer its gate, the gate's activation, the other half and their product (4 b f).
        """
        b = COMPUTE_BYTES[dtype]
        norms = 2 * (FP32 + 2 * b) * self.width
        return norms + 4 * b * self.heads * self.head_width + 4 * b * self.feed_forward

    def activation_bytes(self, tokens: int, dtype: str, *, checkpointing: bool) -> int:
        """Return what a micro-batch keeps for the backward pass: all layers, or with checkpointing
        the input of each (b h) and one layer whole."""
        layer = self.saved_bytes_per_token(dtype)
        if checkpointing:
            return tokens * (self.layers * COMPUTE_BYTES[dtype] * self.width + layer)
        return tokens * self.layers * layer

    def logits_bytes(self, tokens: int, dtype: str, *, soft_labels: bool = False) -> int:
        """Return what a micro-batch needs at the vocabulary head: logits, log-probabilities and
        their gradient (3 b V a token), and for soft labels two more in fp32 (8 V)."""
        per_entry = 3 * COMPUTE_BYTES[dtype] + (2 * FP32 if soft_labels else 0)
        return tokens * per_entry * self.vocabulary

    def gathered_bytes(self, dtype: str) -> int:
        """Return the whole weights that FSDP2 has in hand, and gradients before they are shared.

        Embedding or head, which stay whole during a pass, and two layers in b bytes; the larger of
        the two as gradients in b bytes and, to be summed, in fp32.
        """
        b = COMPUTE_BYTES[dtype]
        layers = _GATHERED_LAYERS * self.layer_parameters
        whole = b * (self.embedding_parameters + layers)
        return whole + (b + FP32) * max(self.embedding_parameters, layers)

    def generation_bytes(self, prompts: int, prompt_tokens: int, new_tokens: int) -> int:
        """Return what transformers needs to answer prompts together, in fp32: weights (4 N), keys
        and values of all tokens (8 L kv_heads d each), and either reading the prompts, which takes
        three widths of the feed-forward layer and four of the residual stream a token, or the
        logits of the last token and their softmax.
        """
        cached = 2 * FP32 * self.layers * self.kv_heads * self.head_width
        reading = prompts * prompt_tokens * FP32 * (3 * self.feed_forward + 4 * self.width)
        last = prompts * 2 * FP32 * self.vocabulary
        cache = prompts * (prompt_tokens + new_tokens) * cached
        return FP32 * self.n_parameters + cache + max(reading, last)


# The models that configs/ names, so that an estimate needs no download.
KNOWN_MODELS: Final = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        width=896, layers=24, heads=14, kv_heads=2, head_width=64, feed_forward=4864,
        vocabulary=151_936, tied=True, qkv_bias=True,
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(
        width=3584, layers=28, heads=28, kv_heads=4, head_width=128, feed_forward=18_944,
        vocabulary=152_064, tied=False, qkv_bias=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RoleBytes:
    """Memory of a model's state on one rank.

    Args:
        weights, gradients, optimizer: in bytes.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: RoleBytes) -> RoleBytes:
        return RoleBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def frozen_bytes(n_parameters: int, ranks: int) -> RoleBytes:
    """Return the state of a model that only computes: 4 N / ranks."""
    return RoleBytes(weights=FP32 * n_parameters // ranks)


def trained_bytes(n_parameters: int, ranks: int) -> RoleBytes:
    """Return the state of a model of which all weights learn: 4 N of weights, 4 N of gradients and
    8 N of AdamW's moments, each over the ranks."""
    share = FP32 * n_parameters // ranks
    return RoleBytes(share, share, 2 * share)


def adapted_bytes(n_parameters: int, n_trained: int, ranks: int) -> RoleBytes:
    """Return the state of a model with N frozen weights and an adapter that learns."""
    return frozen_bytes(n_parameters, ranks) + trained_bytes(n_trained, ranks)


# Whether a config's stages fit into the GPUs: an estimate for each, before anything runs.

# What CUDA, NCCL and torch's allocator take beside the tensors, as a share of the GPU.
RESERVED_SHARE = 0.1
# Answers to a probe or a report are generated this many at a time.
_PROBE_BATCH = 512
_REPORT_BATCH = 512


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a stage on each GPU, in bytes.

    Args:
        stage: its name.
        states: weights, gradients and optimizer of all roles that are loaded together.
        gathered: whole weights and gradients of the layers in work.
        working: of one micro-batch, what the backward pass needs and the logits; or what the
            optimizer's step needs, if that is more.
        generator: of the driver's own copy of a model that answers prompts; on one GPU only.
        group: says which GPUs, where a stage has several groups of them.
    """

    stage: str
    states: RoleBytes
    gathered: int
    working: int
    generator: int = 0
    group: str = ""

    @property
    def per_rank(self) -> int:
        """On every GPU."""
        return self.states.total + self.gathered + self.working

    @property
    def driver_gpu(self) -> int:
        """On the driver's GPU, which a rank has as well."""
        return self.per_rank + self.generator

    def fits(self, gpu_bytes: int) -> bool:
        """Return whether both fit, with a tenth of the GPU left over."""
        return self.driver_gpu <= (1.0 - RESERVED_SHARE) * gpu_bytes

    def __str__(self) -> str:
        parts = {
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "gathered layers": self.gathered,
            "micro-batch": self.working,
        }
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
        text = f"about {_gib(self.per_rank)} GiB per GPU ({listed})"
        if self.generator:
            text += f"; {_gib(self.driver_gpu)} on the driver's, which also generates"
        return text


def estimate(cfg: PipelineConfig, base: ModelShape, student: ModelShape) -> list[StageMemory]:
    """Return the memory of the stages that compute, each at its peak.

    A language model as judge in this process (`evaluate.judge: transformers`) is not counted.

    Args:
        cfg: the config.
        base: shape of ``sft.model``.
        student: shape of ``distill.model``, or of the base.
    """
    stages = [_sft(cfg, base)] if cfg.sft.enabled else []
    return [
        *stages,
        _reward_model(cfg, base),
        *_offline_ppo(cfg, base),
        _distill(cfg, base, student),
        _evaluate(cfg, base),
    ]


def shape_of(model: ModelConfig, directory: Path | None) -> ModelShape | None:
    """Return the shape of a model: of its directory, else of a model that configs/ names."""
    file = None if directory is None else directory / "config.json"
    if file is not None and file.is_file():
        return ModelShape.from_config(json.loads(file.read_text()))
    return KNOWN_MODELS.get(model.source)


def _sft(cfg: PipelineConfig, base: ModelShape) -> StageMemory:
    runtime = cfg.sft.runtime
    state = trained_bytes(base.n_parameters, runtime.ranks)
    return _training("sft", runtime, base, (state,))


def _reward_model(cfg: PipelineConfig, base: ModelShape) -> StageMemory:
    section = cfg.reward_model
    runtime, size = section.runtime, base.n_value_parameters
    if section.freeze_backbone:
        states, gathered = frozen_bytes(size, runtime.ranks), base.gathered_bytes(runtime.dtype)
        return StageMemory("reward_model", states, gathered, _reading(runtime, base))
    state = _adapted_or_trained(base, size, section.lora, runtime.ranks)
    return _training("reward_model", runtime, base, (state,), has_logits=False)


def _offline_ppo(cfg: PipelineConfig, base: ModelShape) -> list[StageMemory]:
    section = cfg.offline_ppo
    runtime, ranks = section.runtime, section.runtime.ranks
    policy = trained_bytes(base.n_parameters, ranks)
    others = [frozen_bytes(base.n_parameters, ranks)]
    if any(name.partition(".")[0] == "reward_model" for name in section.reward.components):
        others += _reward_roles(cfg, base, ranks)
    critic = []
    if section.advantage.estimator == "gae":
        critic = [trained_bytes(base.n_value_parameters, ranks)]
    generator = _policy_answers(section, base)
    if section.worker_groups == 1:
        roles = (policy, *others, *critic)
        return [_training("offline_ppo", runtime, base, roles, generator=generator)]
    alone = _training("offline_ppo", runtime, base, (policy,), generator=generator)
    # The driver's GPU may be one of either group.
    rest = _training(
        "offline_ppo", runtime, base, (*critic, *others), has_logits=False, generator=generator
    )
    # The reference reads one layer at a time, up to the vocabulary head.
    reading = _reading(runtime, base)
    reading += base.logits_bytes(runtime.tokens_per_micro_batch, runtime.dtype)
    working = max(rest.working, reading) if critic else reading
    rest = replace(rest, working=working)
    return [replace(alone, group="policy"), replace(rest, group="critic and frozen models")]


def _policy_answers(section: OfflinePPOConfig, base: ModelShape) -> int:
    """Return what the driver needs to answer the prompts of probes, report and candidates."""
    guards, report = section.guards, section.report
    answers = [
        (min(guards.probe_prompts, _PROBE_BATCH), guards.probe_max_new_tokens),
        (min(report.prompts, _PROBE_BATCH), report.max_new_tokens),
    ]
    if section.candidates.per_prompt:
        answers.append((section.candidates.batch_size, section.candidates.max_new_tokens))
    return max(_answering(base, section.rendering, *answer) for answer in answers)


def _distill(cfg: PipelineConfig, base: ModelShape, student: ModelShape) -> StageMemory:
    section = cfg.distill
    state = _adapted_or_trained(student, student.n_parameters, section.lora, section.runtime.ranks)
    report, how = section.report, section.generation
    answers = [(min(report.prompts, _REPORT_BATCH), report.max_new_tokens)]
    if section.uses_teacher_text:
        answers.append((how.batch_size, how.max_new_tokens))
    # The teacher is of the base's shape, and the student is not larger.
    generator = max(_answering(base, section.rendering, *answer) for answer in answers)
    return _training(
        "distill", section.runtime, student, (state,), soft_labels=True, generator=generator
    )


def _evaluate(cfg: PipelineConfig, base: ModelShape) -> StageMemory:
    section = cfg.evaluate
    runtime = section.runtime
    states = sum(_reward_roles(cfg, base, runtime.ranks), RoleBytes())
    generator = 0
    if section.answers.backend == "transformers":
        how = section.generation
        most = max(section.held_out_prompts, section.answers.batch_questions)
        n_prompts = min(how.batch_size, most)
        generator = _answering(base, section.rendering, n_prompts, how.max_new_tokens)
    gathered = base.gathered_bytes(runtime.dtype)
    return StageMemory("evaluate", states, gathered, _reading(runtime, base), generator)


def _training(
    stage: str,
    runtime: RuntimeConfig,
    shape: ModelShape,
    roles: tuple[RoleBytes, ...],
    **how: Any,
) -> StageMemory:
    """Return the memory of a stage whose first role learns.

    Args:
        how: ``has_logits``, ``soft_labels`` and ``generator``, where they are not the usual.
    """
    # Offloaded roles take turns on the GPU.
    states = max(roles, key=lambda role: role.total) if runtime.offload else sum(roles, RoleBytes())
    tokens = runtime.tokens_per_micro_batch
    working = shape.activation_bytes(
        tokens, runtime.dtype, checkpointing=runtime.gradient_checkpointing
    )
    if how.get("has_logits", True):
        soft = how.get("soft_labels", False)
        working += shape.logits_bytes(tokens, runtime.dtype, soft_labels=soft)
    # AdamW over all weights at once makes one more copy of them when the rest is free again.
    working = max(working, roles[0].gradients)
    gathered = shape.gathered_bytes(runtime.dtype)
    return StageMemory(stage, states, gathered, working, how.get("generator", 0))


def _adapted_or_trained(
    shape: ModelShape, n_parameters: int, lora: LoraConfig | None, ranks: int
) -> RoleBytes:
    if lora is None:
        return trained_bytes(n_parameters, ranks)
    n_trained = shape.adapter_parameters(lora.rank, lora.target_modules)
    return adapted_bytes(n_parameters, n_trained, ranks)


def _reward_roles(cfg: PipelineConfig, base: ModelShape, ranks: int) -> list[RoleBytes]:
    """Return the members of all components, which score together."""
    section = cfg.reward_model
    folds = section.noise.folds if section.noise.keep_folds else 0
    n_members = len(section.components) * (section.members + folds)
    return [frozen_bytes(base.n_value_parameters, ranks)] * n_members


def _reading(runtime: RuntimeConfig, shape: ModelShape) -> int:
    """Return what a micro-batch takes without a backward pass: one layer's tensors."""
    return runtime.tokens_per_micro_batch * shape.saved_bytes_per_token(runtime.dtype)


def _answering(shape: ModelShape, rendering: RenderingConfig, prompts: int, new_tokens: int) -> int:
    if not prompts:
        return 0
    return shape.generation_bytes(prompts, rendering.max_prompt_tokens, new_tokens)


def gpu_stages(
    cfg: PipelineConfig, stages: list[StageMemory], n_gpus: int
) -> Iterator[StageMemory]:
    """Yield the stages that will run on GPUs: told to, or for lack of another word where this
    machine has enough of them."""
    for stage in stages:
        if uses_gpus(getattr(cfg, stage.stage).runtime, n_gpus):
            yield stage


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


_PROBE_SECONDS = 5
_WANTED_MEMORY_BYTES = 4 * 2**30
_WANTED_SHM_BYTES = 600 * 2**20
_HUB = "https://huggingface.co"
_PACKAGE = "package:"  # as in tasks.models.packages, which takes seconds to import
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


class Finding(BaseModel):
    """One line of the examination; ``fail`` means that the config would not run here."""

    subject: str
    status: Literal["ok", "note", "warn", "fail"]
    detail: str


def examine(cfg: PipelineConfig, workspace: Workspace) -> list[Finding]:
    """Look at packages, accelerators, memory, disk, servers, files and models."""
    return [
        *_packages(),
        *_accelerators(cfg),
        *_memory(),
        _checked("workspace", workspace.prepare, f"{workspace.root}, {_free_gib(workspace)}"),
        *_ray(cfg),
        _prefect(),
        _mlflow(cfg, workspace),
        *_files(cfg),
        *_models(cfg, workspace),
        *gpu_memory(cfg, workspace),
    ]


def _checked(subject: str, check: Callable[[], object], detail: str) -> Finding:
    try:
        check()
    except RlhfError as error:
        return Finding(subject=subject, status="fail", detail=str(error))
    return Finding(subject=subject, status="ok", detail=detail)


def _failed(subject: str, check: Callable[[], object]) -> list[Finding]:
    """Return a line where the check fails."""
    found = _checked(subject, check, "")
    return [found] if found.status == "fail" else []


def _packages() -> Iterable[Finding]:
    versions = package_versions()
    # The project itself may run from its source tree.
    missing = [
        name
        for name, version in versions.items()
        if version == "not installed" and name != DISTRIBUTION
    ]
    text = f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    yield Finding(subject="packages", status="fail" if missing else "ok", detail=text)


def _accelerators(cfg: PipelineConfig) -> Iterable[Finding]:
    import torch

    n_gpus = count_gpus()
    names = [
        f"{torch.cuda.get_device_name(i)}"
        f" ({torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
        for i in range(n_gpus)
    ]
    cpus = f"{os.cpu_count()} CPU cores"
    yield Finding(
        subject="accelerators",
        status="ok",
        detail=", ".join([*names, cpus]) if names else f"no GPU, {cpus}",
    )
    for stage, runtime in runtimes_of(cfg).items():
        if runtime.ray_address is None:
            groups = getattr(cfg, stage).worker_groups
            yield from _failed(f"{stage}.runtime", partial(check_gpus, runtime, groups, n_gpus))
        if runtime.attention == "flash_attention_2" and not importlib.util.find_spec("flash_attn"):
            yield Finding(
                subject=f"{stage}.runtime",
                status="fail",
                detail="attention is flash_attention_2, but flash-attn is not installed. "
                "Fix: install it, or set runtime.attention=sdpa.",
            )


def _memory() -> Iterable[Finding]:
    memory = psutil.virtual_memory()
    limit = _memory_limit_bytes()
    available = min(memory.available, limit) if limit else memory.available
    text = f"{available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f}"
    if limit:
        text += f", limited to {limit / 2**30:.1f}"
    status: Literal["ok", "warn"] = "ok" if available >= _WANTED_MEMORY_BYTES else "warn"
    yield Finding(subject="memory", status=status, detail=text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        yield Finding(
            subject="shared memory",
            status="ok" if free >= _WANTED_SHM_BYTES else "warn",
            detail=f"{free / 2**20:.0f} MiB free in {shared}; Ray's object store wants 512 MiB",
        )


def _memory_limit_bytes() -> int | None:
    """Return the limit of the control group this process is in, as in a container."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _free_gib(workspace: Workspace) -> str:
    root = workspace.root
    while not root.exists():
        root = root.parent
    return f"{shutil.disk_usage(root).free / 2**30:.1f} GiB free"


def _ray(cfg: PipelineConfig) -> Iterable[Finding]:
    addresses = ray_addresses(cfg)
    if not addresses:
        yield Finding(subject="ray", status="ok", detail="started here for each run")
    for address in sorted(addresses):
        yield _checked("ray", partial(check_ray_address, address), f"{address} answers")
    for stage, runtime in runtimes_of(cfg).items():
        groups = getattr(cfg, stage).worker_groups
        if runtime.ray_address is not None and groups > 1:
            text = f"{runtime.ray_address} has room for {groups} groups of {runtime.ranks} ranks"
            yield _checked(f"{stage}.runtime", partial(_check_cluster, runtime, groups), text)


def _check_cluster(runtime: RuntimeConfig, groups: int) -> None:
    assert runtime.ray_address is not None
    # Ray itself waits much longer for a cluster that does not answer.
    check_ray_address(runtime.ray_address)
    check_groups(runtime, groups)


def _prefect() -> Finding:
    url = os.environ.get(API_URL)
    if not url:
        return Finding(subject="prefect", status="ok", detail="a temporary server for each run")
    if is_healthy(url, _PROBE_SECONDS):
        return Finding(subject="prefect", status="ok", detail=f"{url} answers")
    text = f"{API_URL}={url} does not answer. Fix: start it, or unset {API_URL}."
    return Finding(subject="prefect", status="fail", detail=text)


def _mlflow(cfg: PipelineConfig, workspace: Workspace) -> Finding:
    from tasks.tracking.mlflow import connect

    uri = cfg.tracking.tracking_uri or workspace.tracking_uri
    return _checked(
        "mlflow",
        partial(connect, cfg.tracking, workspace),
        f"{uri}, experiment {cfg.tracking.experiment}",
    )


def _files(cfg: PipelineConfig) -> Iterable[Finding]:
    named = {
        "ingest": ", ".join(s.path for s in cfg.ingest.sources) or cfg.ingest.source,
        "evaluate": cfg.evaluate.questions,
        "offline_ppo": cfg.offline_ppo.reward.function_path,
    }
    for stage in STAGES:
        if stage in named and named[stage] is not None:
            yield _checked(
                f"{stage} file",
                partial(check_sources, cfg, [stage]),
                str(named[stage]),
            )


def _models(cfg: PipelineConfig, workspace: Workspace) -> Iterable[Finding]:
    models = models_of(cfg)
    is_hub_needed = False
    for model in models:
        if model.source.startswith(_PACKAGE):
            yield package_model(model, workspace)
        elif Path(model.source).expanduser().is_dir():
            yield _checked("model", partial(_resolve, model, workspace), model.source)
        elif _cached_dir(model, workspace) is not None:
            yield Finding(subject="model", status="ok", detail=f"{model.source} is downloaded")
        else:
            is_hub_needed = True
            yield _hub_model(model)
    if not models:
        yield Finding(subject="model", status="ok", detail="tiny, built from scratch")
    yield _hub(is_hub_needed)


def _resolve(model: ModelConfig, workspace: Workspace) -> None:
    from tasks.models.sources import resolve_model

    resolve_model(model.source, revision=model.revision, cache_dir=workspace.cache_dir)


def package_model(model: ModelConfig, workspace: Workspace) -> Finding:
    """Verify a converted package, or ask pip whether there is one; nothing is fetched."""
    from tasks.models import packages

    try:
        name, package = packages.find_package(model.source)
    except RlhfError as error:
        return Finding(subject="model", status="fail", detail=str(error))
    directory = packages.converted_dir(name, workspace.cache_dir)
    if directory.exists():
        return _checked(
            "model", partial(_resolve, model, workspace), f"{model.source}, {directory}"
        )
    wanted = f"{package.distribution} {package.version}"
    if packages.wheel_path(name, workspace.cache_dir).is_file():
        text = f"{model.source}: {wanted} is downloaded, and converted at the first run"
        return Finding(subject="model", status="ok", detail=text)
    reason = packages.why_not_on_index(name)
    if reason is None:
        text = f"{model.source}: {wanted} is on the package index, and fetched at the first run"
        return Finding(subject="model", status="ok", detail=text)
    text = sentence(f"{model.source}: pip does not find {wanted}: {reason}")
    fix = "Fix: configure an index that has it, or name a local directory."
    return Finding(subject="model", status="fail", detail=f"{text} {fix}")


def _cached_dir(model: ModelConfig, workspace: Workspace) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model.source,
            revision=model.revision,
            cache_dir=workspace.cache_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def _hub_model(model: ModelConfig) -> Finding:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(model.source, revision=model.revision, timeout=_PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        text = sentence(f"{model.source} cannot be fetched: {reason}")
        detail = f"{text} Fix: name a local directory."
        return Finding(subject="model", status="fail", detail=detail)
    return Finding(subject="model", status="ok", detail=f"{model.source} is on the hub")


def _hub(is_needed: bool) -> Finding:
    url = os.environ.get("HF_ENDPOINT") or _HUB
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_SECONDS):
            return Finding(subject="hub", status="ok", detail=f"{url} answers")
    except (urllib.error.URLError, OSError, ValueError) as error:
        need = "the config needs it" if is_needed else "the config does not need it"
        text = f"{url} does not answer ({error}); {need}"
        return Finding(subject="hub", status="fail" if is_needed else "note", detail=text)


def gpu_memory(cfg: PipelineConfig, workspace: Workspace) -> Iterable[Finding]:
    """Compare what the stages need of each GPU with the smallest one here."""
    import torch

    n_gpus = count_gpus()
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(n_gpus)]
    student = cfg.distill.model or cfg.sft.model
    shapes = [shape_of(model, _model_dir(model, workspace)) for model in (cfg.sft.model, student)]
    if shapes[0] is None or shapes[1] is None:
        return
    for stage in gpu_stages(cfg, estimate(cfg, shapes[0], shapes[1]), n_gpus):
        yield gpu_finding(stage, min(sizes, default=None))


def _model_dir(model: ModelConfig, workspace: Workspace) -> Path | None:
    from tasks.models import packages

    if model.source == TINY:
        return None
    if model.source.startswith(_PACKAGE):
        name = model.source.removeprefix(_PACKAGE)
        is_known = name in packages.PACKAGES
        return packages.converted_dir(name, workspace.cache_dir) if is_known else None
    local = Path(model.source).expanduser()
    return local if local.is_dir() else _cached_dir(model, workspace)


def gpu_finding(stage: StageMemory, gpu_bytes: int | None) -> Finding:
    """Return a line about a stage and GPUs of this size; None = there are none here."""
    subject = " ".join(filter(None, (stage.stage, stage.group, "memory")))
    if gpu_bytes is None:
        detail = f"{stage}; there is no GPU here to compare with"
        return Finding(subject=subject, status="note", detail=detail)
    has = f"{gpu_bytes / 2**30:.1f} GiB of a GPU here"
    if stage.fits(gpu_bytes):
        return Finding(subject=subject, status="ok", detail=f"{stage}, of {has}")
    fix = "lower runtime.tokens_per_micro_batch, set runtime.gradient_checkpointing, or raise ranks"
    if stage.per_rank <= gpu_bytes:
        fix += ", or answer fewer prompts at a time (probe_prompts, report.prompts, batch_size)"
    return Finding(
        subject=subject,
        # What a micro-batch needs is an upper bound, the states are not.
        status="fail" if stage.states.total > gpu_bytes else "warn",
        detail=f"{stage}: does not fit into {has}. Fix: {fix}.",
    )


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print a line per finding and a verdict."""
    table = Table("what", "state", "detail", show_lines=False)
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(finding.subject, f"[{colour}]{finding.status}[/]", finding.detail)
    console.print(table)
    n_failed = sum(finding.status == "fail" for finding in findings)
    verdict = f"{n_failed} would fail." if n_failed else "Nothing would fail."
    console.print(verdict)
