"""Rows that share a prompt give the same numbers and gradients as rows by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)
from verl.utils.dataset.dataset_utils import DatasetPadMode

from tasks.algorithms.packed_rows import RowShape, dense_mask, lay_out
from tasks.runtime.logits_hooks import StudentLoss, TopKReader
from tasks.runtime.micro_batches import FLEX_ATTENTION, MERGEABLE_MODEL_TYPES, TREE_ATTENTION
from tasks.runtime.rows import Batch, Row, to_tensordict
from tasks.runtime.verl_engine import LanguageEngine, ValueEngine, attention_mask, register_engines

VOCABULARY = 40
# The head of a model type with scores per token; the other types exist as language models alone.
SCORED = ("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3")


def _row(seed: int, prompt_tokens: int, response_tokens: int) -> Row:
    """Return a row whose prompt depends on its length alone."""
    prompt = torch.Generator().manual_seed(prompt_tokens)
    response = torch.Generator().manual_seed(1000 + seed)
    return Row(
        tuple(torch.randint(3, VOCABULARY, (prompt_tokens,), generator=prompt).tolist()),
        tuple(torch.randint(3, VOCABULARY, (response_tokens,), generator=response).tolist()),
    )


# Prompts of 2, 5, 9 and 3 tokens with 3, 2, 1 and 2 responses, out of order.
SIZES = [(2, 3), (5, 6), (2, 1), (9, 4), (5, 2), (2, 7), (3, 1), (3, 1)]
MIXED = [_row(i, *sizes) for i, sizes in enumerate(SIZES)]


def _config(model_type: str) -> Any:
    """Return a model of two layers whose keys and values are shared by two heads each."""
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "attn_implementation": "sdpa",
        "num_labels": 1,
        "classifier_dropout": 0.0,
    }
    if model_type == "mistral":
        size["sliding_window"] = None
    return AutoConfig.for_model(model_type, **size)


def _model(model_type: str, scored: bool = False, lora: Any = False) -> Any:
    torch.manual_seed(0)
    build = AutoModelForTokenClassification if scored else AutoModelForCausalLM
    model = build.from_config(_config(model_type)).float()
    if lora:
        import peft

        targets = "all-linear" if lora is True else lora
        adapter = peft.LoraConfig(
            task_type=peft.TaskType.TOKEN_CLS if scored else peft.TaskType.CAUSAL_LM,
            r=4,
            lora_alpha=8,
            target_modules=targets,
            exclude_modules=["score"] if scored else None,
        )
        model = peft.get_peft_model(model, adapter)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def _data(batch: Batch, budget: int, **flags: Any) -> Any:
    return to_tensordict(batch, {"max_token_len_per_gpu": budget, "dp_size": 1} | flags)


@pytest.fixture(autouse=True, scope="module")
def _registered_attention() -> None:
    register_engines()


def _engine(model: Any, attention: str = TREE_ATTENTION) -> Any:
    """Return an engine around a plain model, without processes and sharding."""
    model.config._attn_implementation = attention
    kind = ValueEngine if hasattr(model, "score") else LanguageEngine
    engine = kind.__new__(kind)
    engine.module = model
    if kind is LanguageEngine:
        engine.watch_head()
    engine.share_prompts()
    return engine


def _merged_outputs(
    engine: Any, batch: Batch, budget: int, hook: Any = None, **flags: Any
) -> dict[str, list[Tensor]]:
    """Return each output of each row as the engine computes it, rows of a prompt merged."""
    data = _data(batch, budget, **flags)
    micro_batches, indices = engine._micro_batches(data)
    engine.hook = hook
    found: dict[str, dict[int, Tensor]] = {}
    for micro_batch, index in zip(micro_batches, indices, strict=True):
        inputs, layout = engine.prepare_model_inputs(micro_batch)
        assert inputs["input_ids"].numel() <= budget
        output = engine.module(**inputs, use_cache=False)
        outputs = engine.prepare_model_outputs(output, layout, micro_batch, hook)
        for name, values in outputs.items():
            found.setdefault(name, {}).update(zip(index, values.unbind(), strict=True))
    return {name: [rows[i] for i in range(len(batch.rows))] for name, rows in found.items()}


def _plain_logits(model: Any, row: Row) -> Tensor:
    """Return all logits of one row by itself, shape (L, V) or (L, 1)."""
    logits: Tensor = model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0]
    return logits


def _before_response(values: Tensor, row: Row) -> Tensor:
    return values[len(row.prompt_ids) - 1 : -1]


def _plain_outputs(model: Any, rows: Sequence[Row]) -> dict[str, list[Tensor]]:
    """Return what a language model says at the response tokens, row by row."""
    found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in rows:
        logprobs = _before_response(_plain_logits(model, row), row).log_softmax(-1)
        found["log_probs"].append(logprobs[range(len(row.response_ids)), row.response_ids])
        found["entropy"].append(-(logprobs.exp() * logprobs).sum(-1))
    return found


def _gradient(model: Any, outputs: dict[str, list[Tensor]]) -> Tensor:
    """Return the gradient of a sum of all outputs with fixed random weights."""
    model.zero_grad()
    values = torch.cat([values for name in sorted(outputs) for values in outputs[name]])
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(3))
    (values * weights).sum().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).clone()


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    """Both are equal to 1e-5 of their size, and not all small."""
    assert float(expected.detach().norm()) > 0.1
    assert float(((found - expected).norm() / expected.norm()).detach()) < 1e-5


def _assert_same_outputs(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        _assert_equal(torch.cat(found[name]), torch.cat(values))


def _merged_language(
    model: Any, rows: Sequence[Row], budget: int = 500, attention: str = TREE_ATTENTION
) -> Any:
    engine = _engine(model, attention)
    outputs = _merged_outputs(engine, Batch(rows), budget, calculate_entropy=True)
    for values in outputs.values():
        for value, row in zip(values, rows, strict=True):
            assert not value[: len(row.prompt_ids) - 1].any()
    return {
        name: [_before_response(value, row) for value, row in zip(values, rows, strict=True)]
        for name, values in outputs.items()
    }


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model_type", sorted(MERGEABLE_MODEL_TYPES))
def test_language_model_equals_plain_rows(model_type: str, lora: bool, attention: str) -> None:
    model = _model(model_type, lora=lora)
    expected = _plain_outputs(model, MIXED)
    expected_gradient = _gradient(model, expected)
    # Everything in one micro-batch, and in several.
    for budget in (500, 40):
        found = _merged_language(model, MIXED, budget, attention)
        _assert_same_outputs(found, expected)
        _assert_equal(_gradient(model, found), expected_gradient)


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model_type", SCORED)
def test_value_model_equals_plain_rows(model_type: str, lora: bool, attention: str) -> None:
    model = _model(model_type, scored=True, lora=lora)
    expected = {"values": [_plain_logits(model, row)[:, 0] for row in MIXED]}
    expected_gradient = _gradient(model, expected)
    for budget in (500, 40):
        found = _merged_outputs(_engine(model, attention), Batch(MIXED), budget)
        _assert_same_outputs(found, expected)
        _assert_equal(_gradient(model, found), expected_gradient)


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
def test_recomputed_activations_change_nothing(attention: str) -> None:
    model = _model("llama").train()
    expected = _gradient(model, _merged_language(model, MIXED, 500, attention))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found = _gradient(model, _merged_language(model, MIXED, 500, attention))
    assert len(calls) == 2
    _assert_equal(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_temperature(temperature: float) -> None:
    model = _model("llama")
    found = _merged_outputs(_engine(model), Batch(MIXED), 500, temperature=temperature)
    for values, row in zip(found["log_probs"], MIXED, strict=True):
        logits = _before_response(_plain_logits(model, row), row) / temperature
        expected = logits.log_softmax(-1)[range(len(row.response_ids)), row.response_ids]
        torch.testing.assert_close(_before_response(values, row), expected, atol=1e-5, rtol=0)


def test_top_k_equals_plain_rows() -> None:
    model = _model("qwen2")
    found = _merged_outputs(_engine(model), Batch(MIXED), 60, TopKReader(3, 2.0, VOCABULARY))
    for i, row in enumerate(MIXED):
        top = (_before_response(_plain_logits(model, row), row) / 2.0).log_softmax(-1).topk(3, -1)
        logprobs = found["teacher_logprobs"][i].view(len(row.response_ids), 4)
        torch.testing.assert_close(logprobs[:, :3], top.values, atol=1e-5, rtol=0)
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(logprobs)))
        assert torch.equal(found["teacher_ids"][i].view(-1, 3), top.indices)


def _teacher_columns() -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    teacher = [
        (torch.randn(len(row.response_ids), VOCABULARY, generator=generator))
        .log_softmax(-1)
        .topk(4, -1)
        for row in MIXED
    ]
    return {
        "teacher_logprobs": [top.values for top in teacher],
        "teacher_ids": [top.indices for top in teacher],
        "weights": [torch.full((len(row.response_ids),), 0.5 + i) for i, row in enumerate(MIXED)],
    }


def _plain_student_losses(model: Any, columns: dict[str, list[Tensor]]) -> list[Tensor]:
    """Return w (alpha tau^2 KL + (1 - alpha) NLL) of each token with alpha 0.3 and tau 2."""
    expected = []
    for i, row in enumerate(MIXED):
        logits = _before_response(_plain_logits(model, row), row)
        ids = columns["teacher_ids"][i]
        q = (logits / 2.0).softmax(-1).gather(-1, ids)
        p = columns["teacher_logprobs"][i].exp()
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        kl = (p * (p.log() - q.log())).sum(-1)
        nll = -logits.log_softmax(-1)[range(len(row.response_ids)), row.response_ids]
        expected.append(columns["weights"][i] * (0.3 * 4.0 * kl + 0.7 * nll))
    return expected


# A head that learns is computed again in the backward pass; a frozen one is not.
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
@pytest.mark.parametrize("logits_at_a_time", [2**24, 3 * VOCABULARY])
@pytest.mark.parametrize("shared", [True, False])
def test_soft_labels_equal_plain_rows(
    targets: Any, logits_at_a_time: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.runtime.verl_engine.LOGITS_AT_A_TIME", logits_at_a_time)
    model = _model("llama", lora=targets)
    columns = _teacher_columns()
    expected = _plain_student_losses(model, columns)
    expected_gradient = _gradient(model, {"token_loss": expected})
    engine, flags = _engine(model), {"pad_mode": DatasetPadMode.NO_PADDING}
    if not shared:
        engine.merges = False
        engine.pad_to_length = False
    hook = StudentLoss("top_k", 0.3, 2.0, VOCABULARY)
    outputs = _merged_outputs(
        engine, Batch(MIXED, columns), 60, hook, use_remove_padding=False, **flags
    )
    _assert_equal(torch.cat(outputs["token_loss"]), torch.cat(expected))
    _assert_equal(_gradient(model, {"token_loss": outputs["token_loss"]}), expected_gradient)


def test_logits_of_a_batch_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the logits of three tokens, the head never sees more than three states."""
    monkeypatch.setattr("tasks.runtime.verl_engine.LOGITS_AT_A_TIME", 3 * VOCABULARY)
    model = _model("llama", lora=True)
    seen: list[int] = []
    head = model.get_output_embeddings()
    plain_forward = head.forward

    def forward(states: Tensor) -> Tensor:
        seen.append(states.numel() // states.shape[-1])
        return plain_forward(states)

    monkeypatch.setattr(head, "forward", forward)
    hook = StudentLoss("top_k", 0.5, 2.0, VOCABULARY)
    _merged_outputs(_engine(model), Batch(MIXED, _teacher_columns()), 500, hook)
    with torch.no_grad():
        _merged_outputs(_engine(model), Batch(MIXED), 500)
    n_tokens = sum(len(row.response_ids) for row in MIXED)
    assert max(seen) == 3 and sum(seen) == 2 * n_tokens


def test_kd_08_only_response_tokens_are_in_the_loss(shared_cases: Any) -> None:
    """As the workers see it: a student's loss over rows of prompt and response, padded in the
    micro-batch, counts the response's tokens and no others."""
    case = next(one for one in shared_cases("distill") if one["id"] == "KD-08")
    ids, n_prompt = case["input"]["ids"], case["input"]["prompt_len"]
    response = [token for token in ids[n_prompt:] if token != case["input"]["pad_id"]]
    rows = [Row(tuple(ids[:n_prompt]), tuple(response)), _row(0, 5, 3)]
    engine = _engine(_model("llama"), "sdpa")
    engine.hook = hook = StudentLoss("none", 0.0, 1.0, VOCABULARY)
    (micro_batch,), _ = engine._micro_batches(_data(Batch(rows), 500, batch_num_tokens=5))
    inputs, layout = engine.prepare_model_inputs(micro_batch)
    assert bool((layout.segments == -1).any())
    output = engine.module(**inputs, use_cache=False)
    outputs = engine.prepare_model_outputs(output, layout, micro_batch, hook)
    _, metrics = hook(outputs, micro_batch)
    assert metrics["n_tokens"] == case["expected"]["loss_tokens"] + 3


def test_lora_04_the_head_is_saved_and_not_adapted(shared_cases: Any) -> None:
    case = next(one for one in shared_cases("lora") if one["id"] == "LORA-04")
    engine = ValueEngine.__new__(ValueEngine)
    engine.model_config = SimpleNamespace(
        lora_rank=4, lora_alpha=8, target_modules=case["input"]["target_modules"]
    )
    adapted = engine._build_lora_module(_model("llama", scored=True))
    config = adapted.peft_config["default"]
    assert sorted(config.target_modules) == case["expected"]["target_modules"]
    # peft adds its own names of heads, of which this model has no other.
    heads = {name for name, _ in _model("llama", scored=True).named_children()} - {"model"}
    assert heads & set(config.modules_to_save) == set(case["expected"]["modules_to_save"])
    learns = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert "score" not in config.target_modules
    assert any("score.modules_to_save" in name for name in learns)
    assert not any("score" in name and "lora_" in name for name in learns)


def test_readings_in_parts_equal_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("qwen3")
    with torch.no_grad():
        expected = _merged_language(model, MIXED)
        monkeypatch.setattr("tasks.runtime.verl_engine.LOGITS_AT_A_TIME", 3 * VOCABULARY)
        found = _merged_language(model, MIXED)
    _assert_same_outputs(found, expected)


def test_what_follows_the_head_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Granite divides its logits behind the head, which parts of the head would not see.
    monkeypatch.setattr("tasks.runtime.verl_engine.LOGITS_AT_A_TIME", 3 * VOCABULARY)
    model = _model("granite")
    model.config.logits_scaling = 4.0
    model.logits_scaling = 4.0
    with torch.no_grad():
        _assert_same_outputs(_merged_language(model, MIXED), _plain_outputs(model, MIXED))


def test_order_of_the_rows_changes_nothing() -> None:
    model = _model("llama")
    found = _merged_language(model, MIXED[::-1])
    expected = _merged_language(model, MIXED)
    _assert_same_outputs({name: values[::-1] for name, values in found.items()}, expected)


@pytest.mark.parametrize("scored", [False, True])
def test_a_response_does_not_touch_its_siblings(scored: bool) -> None:
    model = _model("llama", scored)
    changed = [*MIXED]
    # Rows 0, 2 and 5 share a prompt; another response of the same length in the middle.
    changed[2] = Row(MIXED[2].prompt_ids, (4,))
    assert changed[2] != MIXED[2]
    before = _merged_outputs(_engine(model), Batch(MIXED), 500)
    after = _merged_outputs(_engine(model), Batch(changed), 500)
    for name, values in before.items():
        for i, value in enumerate(values):
            assert torch.equal(value, after[name][i]) == (i != 2), (name, i)


def test_what_padding_holds_changes_nothing() -> None:
    model = _model("qwen2")
    engine = _engine(model, "sdpa")
    (micro_batch,), _ = engine._micro_batches(_data(Batch(MIXED), 500))
    found = []
    for token in (0, 7):
        inputs, layout = engine.prepare_model_inputs(micro_batch)
        padding = layout.segments == -1
        assert padding.any()
        ids = inputs["input_ids"].masked_fill(padding, token)
        output = model(**(inputs | {"input_ids": ids}), use_cache=False)
        found.append(engine.prepare_model_outputs(output, layout, micro_batch, None)["log_probs"])
    assert torch.equal(found[0].values(), found[1].values())


def test_positions_end_where_the_longest_row_ends() -> None:
    # The merged row has 2 + 3 * 14 = 44 tokens, the model 16 positions.
    rows = [_row(i, 2, 14) for i in range(3)]
    engine = _engine(_model("llama"))
    (micro_batch,), _ = engine._micro_batches(_data(Batch(rows), 100))
    inputs, _ = engine.prepare_model_inputs(micro_batch)
    assert inputs["input_ids"].shape == (1, 44)
    assert int(inputs["position_ids"].max()) == 15


def test_the_head_sees_only_what_predicts_responses() -> None:
    engine = _engine(_model("llama"))
    (micro_batch,), _ = engine._micro_batches(_data(Batch(MIXED), 500))
    inputs, _ = engine.prepare_model_inputs(micro_batch)
    n_response_tokens = sum(len(row.response_ids) for row in MIXED)
    assert engine.module(**inputs).logits.shape == (1, n_response_tokens, VOCABULARY)


@pytest.fixture
def uncompiled_flex_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers' flex attention without the compiler, which needs a GPU to be of use."""

    def plain(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kw: Any) -> Any:
        return flex_attention(query, key, value, **kw)

    path = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    monkeypatch.setattr(path, plain)
    yield


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_block_sparse_attention_equals_the_dense_mask(
    model_type: str, uncompiled_flex_attention: None
) -> None:
    model = _model(model_type).eval()
    with torch.no_grad():
        expected = _merged_language(model, MIXED, attention="sdpa")
        found = _merged_language(model, MIXED, attention=FLEX_ATTENTION)
    _assert_same_outputs(found, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_block_mask_of_more_than_one_block_hides_siblings() -> None:
    # Blocks of 128: the prompt fills two, each response one, so that one sibling block is skipped.
    shapes = [RowShape("a", 256, 128), RowShape("a", 256, 128)]
    segments = lay_out(shapes, [[0, 1]]).segments
    mask = attention_mask(segments, FLEX_ATTENTION)
    blocks = mask.to_dense()[0, 0].tolist()
    assert blocks == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    query, key, value = torch.randn(
        3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0)
    ).unbind()
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(segments)
    )
    found = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)
