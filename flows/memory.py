"""Whether a config's stages fit into the GPUs: an estimate for each, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.preflight import uses_gpus
from tasks.config import (
    LoraConfig,
    ModelConfig,
    OfflinePPOConfig,
    PipelineConfig,
    RenderingConfig,
    RuntimeConfig,
)
from tasks.models.memory import (
    KNOWN_MODELS,
    ModelShape,
    RoleBytes,
    adapted_bytes,
    frozen_bytes,
    trained_bytes,
)

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
