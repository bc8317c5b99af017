"""verl's FSDP engines with micro-batches of like length, in which rows may share their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as verl_fsdp
from peft import LoraConfig, TaskType, get_peft_model
from tensordict import TensorDict
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_functional
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from tasks.algorithms.prefix_rows import MergeLimit, RowLayout, dense_mask, prefix_mask_mod
from tasks.backends.micro_batches import layout_of, make_micro_batches
from tasks.backends.prompt_sharing import FLEX_ATTENTION, attention_tokens

VALUE_HEAD = "score"
STATES = "last_states"
STATES_FLAG = "return_last_states"


def attention_mask(segments: Tensor, attention: str) -> Any:
    """Return the mask of merged rows as an attention implementation of transformers takes it.

    Args:
        segments: (G, W), see `RowLayout`.
        attention: name of the implementation.

    Returns:
        A block mask for flex attention, else a bool tensor (G, 1, W, W), True = attends.
    """
    if attention != FLEX_ATTENTION:
        return dense_mask(segments)
    n_rows, width = segments.shape
    mask_mod = prefix_mask_mod(segments)
    return create_block_mask(mask_mod, n_rows, None, width, width, device=segments.device)


class _MergedRows:
    """Mixed into a verl engine: cuts micro-batches by length and merges rows of the same prompt.

    The batch and the outputs keep verl's layout, one jagged row per prompt and response.
    """

    module: Any
    attention_tokens: float | None = None

    def share_prompts(self) -> None:
        """Merge rows of the same prompt from now on."""
        self.attention_tokens = attention_tokens(self.module.config)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        # With this flag verl puts the outputs back into the order of the rows.
        tu.assign_non_tensor(data, use_dynamic_bsz=True)
        original = verl_fsdp.prepare_micro_batches
        verl_fsdp.prepare_micro_batches = self._micro_batches
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        finally:
            verl_fsdp.prepare_micro_batches = original

    def _micro_batches(
        self, data: TensorDict, dp_group: Any = None, **_: Any
    ) -> tuple[list[TensorDict], list[list[int]]]:
        limit = None
        if self.attention_tokens is not None:
            limit = MergeLimit(int(data["max_token_len_per_gpu"]), self.attention_tokens)
        return make_micro_batches(data, limit, dp_group)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        """Return the model's arguments, and what `prepare_model_outputs` needs."""
        layout = layout_of(micro_batch)
        if layout is None:
            plain: tuple[dict[str, Any], Any] = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
            return plain
        ids = micro_batch["input_ids"].values()
        layout = layout.to(ids.device)
        # What padding holds changes nothing; 0 is an id of every vocabulary.
        inputs = {
            "input_ids": layout.merge(ids, 0),
            "attention_mask": attention_mask(
                layout.segments, self.module.config._attn_implementation
            ),
            "position_ids": layout.positions,
        }
        return inputs, layout


def _like_rows(values: Tensor, micro_batch: TensorDict) -> Tensor:
    """Return (N,) values of all tokens as jagged rows."""
    offsets = micro_batch["input_ids"].offsets()
    rows: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return rows


class LanguageEngine(_MergedRows, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Language model with a vocabulary head."""

    head_slots: Tensor | None = None

    def share_prompts(self) -> None:
        super().share_prompts()
        self.module.get_output_embeddings().register_forward_pre_hook(self._only_before_response)

    def _only_before_response(self, head: Any, args: Sequence[Any]) -> Any:
        """Give the vocabulary head only the states from which a response token is predicted."""
        slots, self.head_slots = self.head_slots, None
        if slots is None:
            return None
        return (args[0].flatten(0, 1)[slots][None], *args[1:])

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        inputs, layout = super().prepare_model_inputs(micro_batch)
        merged = isinstance(layout, RowLayout)
        self.head_slots = layout.slots[layout.before_response] if merged else None
        return inputs, layout

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return log-probabilities and what else is asked for as jagged rows, 0 in the prompts."""
        if not isinstance(output_args, RowLayout):
            plain: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return plain
        found: dict[str, Tensor] = {}
        logits = output.logits[0]
        temperature = float(tu.get_non_tensor_data(micro_batch, "temperature", 1.0))
        if temperature != 1.0:
            logits = logits / temperature
        if tu.get_non_tensor_data(micro_batch, "distillation_use_topk", False):
            columns = logits_processor_func(student_logits=logits[None], data=micro_batch)
            found |= {name: column[0] for name, column in columns.items()}
        labels = micro_batch["input_ids"].values()[output_args.before_response + 1]
        found["log_probs"] = verl_fsdp.logprobs_from_logits(logits=logits, labels=labels)
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            found["entropy"] = verl_functional.entropy_from_logits(logits)
        return {
            name: _like_rows(output_args.fill(values), micro_batch)
            for name, values in found.items()
        }


class ValueEngine(_MergedRows, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Model with one score per token."""

    head_inputs: list[Tensor] | None = None

    def _build_lora_module(self, module: Any) -> Any:
        """Adapt the backbone and train the new head whole; verl would adapt the head as well, and
        leave it as it was drawn."""
        module.enable_input_require_grads()
        config = LoraConfig(
            task_type=TaskType.TOKEN_CLS,
            r=self.model_config.lora_rank,
            lora_alpha=self.model_config.lora_alpha,
            target_modules=self.model_config.target_modules,
            exclude_modules=[VALUE_HEAD],
            modules_to_save=[VALUE_HEAD],
            bias="none",
        )
        return get_peft_model(module, config)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        wanted = bool(tu.get_non_tensor_data(micro_batch, STATES_FLAG, False))
        if wanted and self.head_inputs is None:
            self.head_inputs = []
            getattr(self.module, VALUE_HEAD).register_forward_pre_hook(self._keep_inputs)
        return super().prepare_model_inputs(micro_batch)

    def _keep_inputs(self, head: Any, args: Sequence[Any]) -> None:
        assert self.head_inputs is not None
        self.head_inputs[:] = [args[0].detach()]

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return the values as jagged rows and, if asked for, the state that each row's score is
        made of, (H,) per row."""
        merged = isinstance(output_args, RowLayout)
        found: dict[str, Tensor]
        if merged:
            found = {"values": _like_rows(output_args.spread(output.logits), micro_batch)}
        else:
            found = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        if self.head_inputs and tu.get_non_tensor_data(micro_batch, STATES_FLAG, False):
            layout = output_args if merged else None
            found[STATES] = _last_states(self.head_inputs.pop(), micro_batch, layout)
        return found


def _last_states(states: Tensor, micro_batch: TensorDict, layout: RowLayout | None) -> Tensor:
    """Return the state at the last token of each of B rows as a jagged tensor of B rows of H.

    Args:
        states: merged (G, W, H), packed (1, N, H) or padded on the right (B, L, H).
        micro_batch: the rows.
        layout: how they are merged, if they are.
    """
    offsets = micro_batch["input_ids"].offsets()
    last = offsets[1:] - 1
    if layout is not None:
        at = layout.slots[last]
    elif states.shape[0] == 1 and states.shape[1] == int(offsets[-1]):
        at = last
    else:
        starts = torch.arange(len(last), device=last.device) * states.shape[1]
        at = starts + offsets.diff() - 1
    chosen = states.flatten(0, 1)[at]
    width = chosen.shape[1]
    ends = torch.arange(len(last) + 1, device=chosen.device) * width
    rows: Tensor = torch.nested.nested_tensor_from_jagged(chosen.flatten(), ends)
    return rows


def _cpu_logprobs(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return log softmax of the labels, shape (N,), for logits (N, V), in one operation.

    Without a fused CUDA kernel verl takes the tokens one by one, to save memory that a CPU does not
    lack; with the tiny model that is two thirds of a training step.
    """
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def register_engines() -> None:
    """Make verl build these engines, on CPU, for which it has none, and before its own on CUDA."""
    if get_device_name() == "cpu":
        verl_fsdp.logprobs_from_logits = _cpu_logprobs
    kinds = (("language_model", LanguageEngine), ("value_model", ValueEngine))
    for model_type, engine in kinds:
        EngineRegistry.register(model_type, ["fsdp2"], device="cpu")(engine)
        EngineRegistry.register(model_type, ["fsdp2"], device="cuda", vendor=["nvidia", "amd"])(
            engine
        )
