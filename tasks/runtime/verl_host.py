"""The Ray actor: one process per rank that holds the verl workers of all roles.

The process lives through the whole chain and roles come and go in it, because starting a process
and importing its libraries costs more than a small stage. The layout is the one of verl's own
colocated worker: workers as members, one dispatch table outside.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl.utils.model as verl_model
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.trainer.config import CheckpointConfig as VerlCheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker

from tasks.config.shared import RuntimeConfig
from tasks.errors import ModelError
from tasks.models.loading import list_weight_files
from tasks.runtime.micro_batches import attention_implementation, plain_rows_reason, shares_prompts
from tasks.runtime.rows import RoleSpec
from tasks.runtime.verl_engine import register_engines

_HEAD_KEYS = ("score.weight", "classifier.weight")
# Sharding a small model layer by layer saves no memory worth the hooks of every layer.
_ONE_SHARD_BYTES = 64 * 2**20
_WHOLE_MODEL = {"disable": True, "transformer_layer_cls_to_wrap": ["no class of this name"]}

register_engines()


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> torch.nn.Module:
    """Load a token classifier with the attention that the config names; verl hard-codes flash
    attention."""
    from transformers import AutoModelForTokenClassification

    model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    return model


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _check_head(spec: RoleSpec) -> None:
    """Refuse a reward model whose head is missing: transformers would initialise one at random with
    a warning."""
    from safetensors import safe_open

    files = sorted(Path(spec.model_dir).glob("*.safetensors"))
    for file in files:
        with safe_open(str(file), "pt") as tensors:
            if any(key in _HEAD_KEYS for key in tensors.keys()):  # noqa: SIM118  (not a dict)
                return
    raise ModelError(
        f"{spec.model_dir} has no value head ({' or '.join(_HEAD_KEYS)})",
        "a reward model written by the reward_model stage",
        "train the reward model again, or give its artefact instead of a language model",
    )


def _engine_config(spec: RoleSpec, runtime: RuntimeConfig) -> FSDPEngineConfig:
    dtype = {"param_dtype": runtime.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    files = list_weight_files(Path(spec.model_dir))
    is_small = sum(file.stat().st_size for file in files) <= _ONE_SHARD_BYTES
    return FSDPEngineConfig(
        strategy="fsdp2",
        wrap_policy=_WHOLE_MODEL if is_small else {},
        # True would pin parameters in host memory, which fails without a GPU and is slow with one.
        forward_only=False,
        param_offload=runtime.offload,
        optimizer_offload=runtime.offload,
        fsdp_size=-1,
        model_dtype="fp32",
        use_torch_compile=False,
        mixed_precision=dtype,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=runtime.tokens_per_micro_batch,
        infer_max_token_len_per_gpu=runtime.tokens_per_micro_batch,
    )


def _optimizer_config(spec: RoleSpec) -> FSDPOptimizerConfig:
    optimizer = spec.optimizer
    return FSDPOptimizerConfig(
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        clip_grad=optimizer.clip_grad_norm,
        lr_scheduler_type=optimizer.schedule,
        lr_warmup_steps_ratio=optimizer.warmup_share,
        min_lr_ratio=optimizer.min_lr_share,
        total_training_steps=spec.total_steps,
        # One operation for all weights, where torch's default on a CPU takes a dozen for each.
        override_optimizer_config={"fused": True} if get_device_name() == "cpu" else None,
    )


def _worker_config(spec: RoleSpec, runtime: RuntimeConfig, attention: str) -> TrainingWorkerConfig:
    lora: dict[str, Any] = {}
    if spec.lora is not None:
        targets = spec.lora.target_modules
        lora = {
            "lora_rank": spec.lora.rank,
            "lora_alpha": spec.lora.alpha,
            "target_modules": targets if isinstance(targets, str) else list(targets),
        }
    return TrainingWorkerConfig(
        model_type=spec.kind,
        model_config=HFModelConfig(
            path=spec.model_dir,
            use_remove_padding=runtime.remove_padding,
            enable_gradient_checkpointing=runtime.gradient_checkpointing,
            # Without the second key verl writes the first into config.json, and no other program
            # has the workers' attention.
            override_config={"attn_implementation": attention, "model_config": {}},
            **lora,
        ),
        engine_config=_engine_config(spec, runtime),
        optimizer_config=_optimizer_config(spec),
        checkpoint_config=VerlCheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    )


class RoleHost(Worker):  # type: ignore[misc]
    """Holds one verl `TrainingWorker` per role; every method runs on all ranks."""

    def __init__(self, threads: int) -> None:
        Worker.__init__(self)
        verl_model.load_valuehead_model = _load_value_model
        if get_device_name() == "cpu":
            torch.set_num_threads(threads)
            # verl's default, "cpu:gloo,cpu:gloo", names the device twice, which torch refuses.
            initialize_global_process_group_ray(backend="gloo")
        else:
            initialize_global_process_group_ray()
        rank = torch.distributed.get_rank()
        self._register_dispatch_collect_info(mesh_name="train", dp_rank=rank, is_collect=True)
        self.workers: dict[str, TrainingWorker] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_role(self, spec: RoleSpec, runtime: RuntimeConfig) -> str | None:
        """Build a role; a role of the same name is replaced.

        Returns:
            Why its rows do not share their prompts though they should, or None.
        """
        if spec.trained_head:
            _check_head(spec)
        self.workers.pop(spec.name, None)
        _seed_everything(spec.seed)
        model = AutoConfig.from_pretrained(spec.model_dir)
        attention = attention_implementation(model, runtime, get_device_name())
        worker = TrainingWorker(_worker_config(spec, runtime, attention))
        worker.engine.lora = spec.lora
        worker.engine.initialize()
        if shares_prompts(model, runtime):
            worker.engine.share_prompts()
        self.workers[spec.name] = worker
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        print(f"rank {rank} of {ranks}: role {spec.name} is {spec.model_dir}", flush=True)
        return plain_rows_reason(model, runtime)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_roles(self) -> None:
        """Free all roles."""
        self.workers.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss(self, role: str, loss_fn: Callable[..., Any]) -> None:
        """Set the loss (or the logits hook) that the next calls of this role use."""
        self.workers[role].set_loss_fn(loss_fn)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def train(self, data: TensorDict) -> TensorDict:
        """Take one optimizer step."""
        return self.workers[tu.pop(data, key="role")].train_batch(data)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def infer(self, data: TensorDict) -> TensorDict:
        """Run one forward pass without gradients."""
        return self.workers[tu.pop(data, key="role")].infer_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale_learning_rate(self, role: str, scale: float) -> None:
        """Set a role's learning rate to ``scale`` times the configured one; a second call replaces
        the first, and so does a restored checkpoint."""
        worker = self.workers[role]
        engine, rate = worker.engine, worker.config.optimizer_config.lr * scale
        scheduler = engine.lr_scheduler
        scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
        for group, factor in zip(engine.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["initial_lr"] = rate
            group["lr"] = rate * factor(scheduler.last_epoch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, role: str, directory: str) -> None:
        """Write weights, optimizer, schedule and random state of this rank."""
        self.workers[role].engine.save_checkpoint(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, role: str, directory: str) -> None:
        """Restore what `save_checkpoint` wrote."""
        self.workers[role].engine.load_checkpoint(directory, del_local_after_load=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, role: str, directory: str) -> None:
        """Write a directory that plain transformers (or peft, for an adapter) loads."""
        engine = self.workers[role].engine
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(engine.module, options=options)
        if torch.distributed.get_rank() == 0:
            _write_model(
                engine.module, state, Path(directory), self.workers[role].model_config.tokenizer
            )
        torch.distributed.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resources(self) -> dict[str, Any]:
        """Return where this rank runs."""
        return {"pid": os.getpid(), "device": get_device_name(), "threads": torch.get_num_threads()}


def _write_model(
    module: torch.nn.Module, state: dict[str, Any], directory: Path, tokenizer: Any
) -> None:
    save_pretrained: Callable[..., None] = module.save_pretrained  # type: ignore[assignment]
    config: Any = module.config
    if hasattr(module, "peft_config"):
        kept = ("lora_", "modules_to_save")
        adapter = {
            key: value.float() for key, value in state.items() if any(word in key for word in kept)
        }
        save_pretrained(str(directory), state_dict=adapter)
        _sort_target_modules(directory / "adapter_config.json")
    else:
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        state = {key: value.float().contiguous() for key, value in state.items()}
        save_pretrained(str(directory), state_dict=state)
        _correct_config(directory, type(module).__name__.removeprefix("FSDP"))
    tokenizer.save_pretrained(str(directory))


def _sort_target_modules(file: Path) -> None:
    """Give the modules, a set in peft, the same order in every process: same bits again."""
    config = json.loads(file.read_text())
    if isinstance(config.get("target_modules"), list):
        config["target_modules"].sort()
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _correct_config(directory: Path, architecture: str) -> None:
    """Name the class and the dtype that were really written."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [architecture]
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
