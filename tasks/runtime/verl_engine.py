"""verl's FSDP engines: micro-batches with little or no padding, rows that may share prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as verl_fsdp
from peft import LoraConfig, TaskType, get_peft_model
from tensordict import TensorDict
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_functional
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from tasks.algorithms.packed_rows import (
    PromptTree,
    RowLayout,
    dense_mask,
    prefix_mask_mod,
    tree_attention,
)
from tasks.config.shared import LoraConfig as AdapterConfig
from tasks.config.shared import StudentLoraConfig
from tasks.runtime.logits_hooks import FLAG, LOSS, LogitsHook, Tokens
from tasks.runtime.micro_batches import (
    FLEX_ATTENTION,
    TREE_ATTENTION,
    layout_of,
    make_micro_batches,
    merge_limit,
)

# Runs a vocabulary head on the states that predict a response token, in parts where the logits of
# all of them would be large.

# Logits that exist at a time: 64 MiB in fp32, of which a loss holds a few copies.
LOGITS_AT_A_TIME = 2**24

Columns = dict[str, Tensor]
ColumnsOf = Callable[[Tensor, slice], Columns]
# What some models do to logits behind the head; in parts the head alone would be missing it.
_AFTER_HEAD = ("logits_scaling", "final_logit_softcapping", "logit_scale")


def head_is_last(config: Any) -> bool:
    """Return whether a model's logits are what its head returns."""
    return all(getattr(config, name, None) in (None, 1, 1.0) for name in _AFTER_HEAD)


@dataclass
class HeadReading:
    """What one forward pass reads from the logits.

    Args:
        slots: (M,) of the flattened positions of the model's input: those before response tokens.
        before_response: (M,) the same among the N tokens of the rows, end to end.
        columns_of: reads the logits of some of the M tokens.
        in_parts: do not compute the logits of all of them at once.
        found: columns of all M tokens, once the head ran in parts.
        is_done: the head has had its states.
    """

    slots: Tensor
    before_response: Tensor
    columns_of: ColumnsOf
    in_parts: bool
    found: Columns = field(default_factory=dict)
    is_done: bool = False

    def pick(self, head: Any, states: Tensor) -> Tensor:
        """Return the states that the head itself has to see, (1, M, H), or none of them, (1, 0, H),
        where the parts are done here."""
        self.is_done = True
        picked = states.flatten(0, 1)[self.slots]
        if not self.in_parts:
            return picked[None]
        self.found = read_in_parts(head, picked, self.columns_of)
        return picked[None, :0]

    def columns(self, logits: Tensor) -> Columns:
        """Return the columns of all M tokens, for what the model returned for `pick`."""
        if not self.in_parts:
            return self.columns_of(logits[0], slice(0, len(self.slots)))
        if torch.is_grad_enabled():
            # The gradient has to pass through the model's own output, to which FSDP ties its hooks.
            self.found[LOSS] = self.found[LOSS] + logits.sum()
        return self.found


def read_in_parts(head: Any, states: Tensor, columns_of: ColumnsOf) -> Columns:
    """Return columns of M tokens without ever holding the logits of all of them.

    Where a gradient is wanted, only the column `LOSS` has one.

    Args:
        head: the vocabulary head.
        states: (M, H).
        columns_of: reads logits.
    """
    vocabulary = head.weight.shape[0]
    step = max(1, LOGITS_AT_A_TIME // vocabulary)
    spans = [slice(i, min(i + step, len(states))) for i in range(0, len(states), step)]
    is_trained = any(parameter.requires_grad for parameter in head.parameters())
    if torch.is_grad_enabled() and not is_trained:
        others: dict[str, list[Tensor]] = {}
        loss = _FrozenHead.apply(  # type: ignore[no-untyped-call]
            states, head.forward, columns_of, spans, others
        )
        return {LOSS: loss} | {name: torch.cat(parts) for name, parts in others.items()}
    parts = [
        checkpoint(_columns_of_part, head.forward, states[s], columns_of, s, use_reentrant=False)
        if torch.is_grad_enabled()
        else _columns_of_part(head.forward, states[s], columns_of, s)
        for s in spans
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _columns_of_part(
    project: Callable[[Tensor], Tensor], states: Tensor, columns_of: ColumnsOf, span: slice
) -> Columns:
    return columns_of(project(states), span)


class _FrozenHead(torch.autograd.Function):
    """Computes the gradient of each token's loss together with the loss, part by part.

    A token's loss depends on its own state only, so that its gradient is known up to the factor
    that comes in the backward pass, and no logits are computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        project: Callable[[Tensor], Tensor],
        columns_of: ColumnsOf,
        spans: list[slice],
        others: dict[str, list[Tensor]],
    ) -> Tensor:
        gradients, losses = torch.empty_like(states), []
        for span in spans:
            with torch.enable_grad():
                part = states[span].detach().requires_grad_()
                columns = columns_of(project(part), span)
                loss = columns.pop(LOSS)
                (gradients[span],) = torch.autograd.grad(loss.sum(), part)
            losses.append(loss.detach())
            for name, values in columns.items():
                others.setdefault(name, []).append(values.detach())
        ctx.save_for_backward(gradients)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        return gradients * grads[0][:, None].to(gradients.dtype), None, None, None, None


def label_logprobs(
    logits: Tensor, labels: Tensor, at_a_time: int = LOGITS_AT_A_TIME, **_: Any
) -> Tensor:
    """Return log softmax of the labels, in fp32.

    Computed for as many tokens together as ``at_a_time`` logits are, and for the backward pass
    again, so that of all logits there is never an fp32 copy.

    Args:
        logits: (N, V).
        labels: (N,) token ids.
        at_a_time: logits; more of them take more memory and fewer operations.

    Returns:
        (N,) fp32.
    """
    step = max(1, at_a_time // logits.shape[1])
    if len(labels) <= step:
        return _logprobs_of_part(logits, labels)
    parts = [
        checkpoint(
            _logprobs_of_part, logits[i : i + step], labels[i : i + step], use_reentrant=False
        )
        for i in range(0, len(labels), step)
    ]
    return torch.cat(parts)


def _logprobs_of_part(logits: Tensor, labels: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


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


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    trees: Sequence[PromptTree] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it, over packed rows where they are given."""
    if trees is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return plain
    heads = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, heads), repeat_kv(value, heads)
    attended = tree_attention(query, key, value, trees, kwargs.get("scaling"))
    return attended.transpose(1, 2), None


class _MergedRows:
    """Mixed into a verl engine: cuts micro-batches so that little or nothing is padded, and merges
    rows of the same prompt.

    The batch and the outputs keep verl's layout, one jagged row per prompt and response.
    """

    module: Any
    merges: bool = False

    def share_prompts(self) -> None:
        """Merge rows of the same prompt from now on."""
        self.merges = True

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
        budget = int(data["max_token_len_per_gpu"])
        limit = merge_limit(self.module.config, budget) if self.merges else None
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
        inputs: dict[str, Any] = {
            "input_ids": layout.merge(ids, 0),
            "position_ids": layout.positions,
        }
        if layout.trees:
            inputs["trees"] = layout.trees
            # Transformers takes what has four dimensions as it is, and makes no mask of its own.
            inputs["attention_mask"] = layout.segments[:, None, None]
        else:
            attention = self.module.config._attn_implementation
            inputs["attention_mask"] = attention_mask(layout.segments, attention)
        return inputs, layout


def _like_rows(values: Tensor, micro_batch: TensorDict) -> Tensor:
    """Return (N,) values of all tokens as jagged rows."""
    offsets = micro_batch["input_ids"].offsets()
    rows: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return rows


def _like_responses(values: Tensor, micro_batch: TensorDict) -> Tensor:
    """Return what belongs to the M response tokens, (M,) or (M, K), as jagged rows; K values lie
    behind each other."""
    width = values.shape[1] if values.dim() == 2 else 1
    offsets = micro_batch["responses"].offsets() * width
    rows: Tensor = torch.nested.nested_tensor_from_jagged(values.flatten(), offsets)
    return rows


def _like_all_tokens(values: Tensor, before: Tensor, micro_batch: TensorDict) -> Tensor:
    """Return (M,) values at the positions before the response tokens as jagged rows of all tokens,
    0 elsewhere."""
    n_tokens = int(micro_batch["input_ids"].offsets()[-1])
    zeros = torch.zeros(n_tokens, dtype=values.dtype, device=values.device)
    return _like_rows(zeros.index_put((before,), values), micro_batch)


class LanguageEngine(_MergedRows, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Language model with a vocabulary head.

    Attributes:
        lora: of the adapter that is trained, if one is.
        hook: the loss of the running call, if it reads logits.
        reading: what the running forward pass reads.
    """

    lora: AdapterConfig | None = None
    hook: LogitsHook | None = None
    reading: HeadReading | None = None

    def initialize(self) -> None:
        super().initialize()
        self.watch_head()

    def watch_head(self) -> None:
        """Give the head only what is read of it from now on."""
        self.module.get_output_embeddings().register_forward_pre_hook(self._only_what_is_read)

    def _build_lora_module(self, module: Any) -> Any:
        """Adapt the model; verl passes neither dropout nor the kinds of adapters on."""
        assert self.lora is not None, "a role with an adapter tells its engine"
        module.enable_input_require_grads()
        return get_peft_model(module, adapter_config(self.lora))

    def _only_what_is_read(self, head: Any, args: Sequence[Any]) -> Any:
        if self.reading is None or self.reading.is_done:
            return None
        return (self.reading.pick(head, args[0]), *args[1:])

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        wanted = tu.get_non_tensor_data(micro_batch, FLAG, False)
        self.hook = loss_function if wanted else None
        try:
            return super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self.hook = self.reading = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        inputs, layout = super().prepare_model_inputs(micro_batch)
        shape = inputs["input_ids"].shape
        if isinstance(layout, RowLayout):
            before = layout.before_response
            slots = layout.slots[before]
        else:
            before = positions_before_response(micro_batch)
            slots = _plain_slots(before, micro_batch, shape)
        large = len(before) * self.module.config.vocab_size > LOGITS_AT_A_TIME
        # Without a hook the loss takes gradients through log-probabilities, of all logits at once.
        in_parts = (
            large
            and head_is_last(self.module.config)
            and (self.hook is not None or not torch.is_grad_enabled())
        )
        wanted = isinstance(layout, RowLayout) or self.hook is not None or in_parts
        self.reading = None
        if wanted:
            labels = micro_batch["input_ids"].values()[before + 1]
            read = partial(self._read, micro_batch, labels)
            self.reading = HeadReading(slots, before, read, in_parts)
        return inputs, layout

    def _read(
        self, micro_batch: TensorDict, labels: Tensor, logits: Tensor, span: slice
    ) -> dict[str, Tensor]:
        if self.hook is not None:
            return self.hook.columns(logits, Tokens(micro_batch, labels[span], span))
        temperature = float(tu.get_non_tensor_data(micro_batch, "temperature", 1.0))
        if temperature != 1.0:
            logits = logits / temperature
        found = {"log_probs": verl_fsdp.logprobs_from_logits(logits=logits, labels=labels[span])}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            found["entropy"] = verl_functional.entropy_from_logits(logits)
        return found

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return jagged rows: a hook's columns of the response tokens, or log-probabilities and
        what else is asked for of all tokens, 0 in the prompts."""
        reading = self.reading
        if reading is None:
            plain: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return plain
        columns = reading.columns(output.logits)
        if self.hook is not None:
            return {n: _like_responses(values, micro_batch) for n, values in columns.items()}
        return {
            name: _like_all_tokens(values, reading.before_response, micro_batch)
            for name, values in columns.items()
        }


def adapter_config(cfg: AdapterConfig) -> LoraConfig:
    """Return peft's configuration of a language model's adapter."""
    lora = StudentLoraConfig.model_validate(cfg.model_dump())
    targets = lora.target_modules
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias="none",
    )


def positions_before_response(micro_batch: TensorDict) -> Tensor:
    """Return the flat positions whose logits predict the response tokens, shape (M,)."""
    offsets = micro_batch["input_ids"].offsets()
    prompt_tokens = micro_batch["prompts"].offsets().diff()
    response_tokens = micro_batch["responses"].offsets().diff()
    starts = offsets[:-1] + prompt_tokens - 1
    ends = response_tokens.cumsum(0)
    steps = torch.arange(int(ends[-1]), device=offsets.device)
    shift = starts - (ends - response_tokens)
    return steps + torch.repeat_interleave(shift, response_tokens)


def _plain_slots(before: Tensor, micro_batch: TensorDict, shape: Sequence[int]) -> Tensor:
    """Return where these tokens lie in rows that are packed, (1, N), or padded, (B, L)."""
    offsets = micro_batch["input_ids"].offsets()
    if shape[0] == 1:
        return before
    row = torch.searchsorted(offsets[1:], before, right=True)
    slots: Tensor = before - offsets[:-1][row] + row * shape[1]
    return slots


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


def _replace_slow_logprobs(device: str) -> None:
    """Replace verl's log-probabilities where flash-attn's kernel is missing: they take the tokens
    one by one, which with the tiny model is two thirds of a training step."""
    if device == "cpu":
        # Memory is not short there, and all tokens together are fastest.
        verl_fsdp.logprobs_from_logits = partial(label_logprobs, at_a_time=sys.maxsize)
    elif not verl_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        verl_fsdp.logprobs_from_logits = label_logprobs


def register_engines() -> None:
    """Make verl build these engines, on CPU, for which it has none, and before its own on CUDA, and
    transformers know their attention."""
    ALL_ATTENTION_FUNCTIONS.register(TREE_ATTENTION, _attend)
    # For a batch whose rows are not packed.
    ALL_MASK_ATTENTION_FUNCTIONS.register(TREE_ATTENTION, sdpa_mask)
    _replace_slow_logprobs(get_device_name())
    kinds = (("language_model", LanguageEngine), ("value_model", ValueEngine))
    for model_type, engine in kinds:
        EngineRegistry.register(model_type, ["fsdp2"], device="cpu")(engine)
        EngineRegistry.register(model_type, ["fsdp2"], device="cuda", vendor=["nvidia", "amd"])(
            engine
        )
