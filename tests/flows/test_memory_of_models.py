"""Memory of a decoder: sizes by hand, and beside what torch really keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from flows.cli.doctor import (
    KNOWN_MODELS,
    ModelShape,
    RoleBytes,
    adapted_bytes,
    frozen_bytes,
    trained_bytes,
)

# h 8, two layers, two heads of width 4, one of keys and values, f 16, ten words.
SMALL = ModelShape(
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=4,
    feed_forward=16,
    vocabulary=10,
    tied=True,
    qkv_bias=True,
)


def test_weights_by_hand() -> None:
    # q 8*8, k and v 8*4 each, o 8*8: 192; biases 8 + 4 + 4 = 16; three of 8*16: 384; norms 16.
    assert SMALL.layer_parameters == 608
    # Two layers, the embedding 10*8 and the last norm 8.
    assert SMALL.n_parameters == 2 * 608 + 80 + 8 == 1304
    # A score for each token instead of the tied head: 8 weights and a bias.
    assert SMALL.n_value_parameters == 1304 + 9


def test_adapter_by_hand() -> None:
    # rank 2: q 16, k 12, v 12, o 16, and three of 24: 128 (in + out), twice 2 * 128.
    assert SMALL.adapter_parameters(2, "all-linear") == 2 * 2 * 128
    assert SMALL.adapter_parameters(2, ("q_proj", "v_proj")) == 2 * 2 * (16 + 12)


def test_activations_by_hand() -> None:
    # bf16: norms 2 * (4 + 4) * 8 = 128, attention 4 * 2 * 8 = 64, feed-forward 4 * 2 * 16 = 128.
    assert SMALL.saved_bytes_per_token("bf16") == 320
    assert SMALL.activation_bytes(10, "bf16", checkpointing=False) == 10 * 2 * 320
    # The input of each of two layers, 2 * 8 bytes, and one layer whole.
    assert SMALL.activation_bytes(10, "bf16", checkpointing=True) == 10 * (2 * 16 + 320)
    # fp32: 2 * (4 + 8) * 8 + 4 * 4 * 8 + 4 * 4 * 16 = 192 + 128 + 256.
    assert SMALL.saved_bytes_per_token("fp32") == 576


def test_logits_by_hand() -> None:
    assert SMALL.logits_bytes(10, "bf16") == 10 * 6 * 10
    assert SMALL.logits_bytes(10, "bf16", soft_labels=True) == 10 * 14 * 10
    assert SMALL.logits_bytes(10, "fp32") == 10 * 12 * 10


def test_gathered_layers_by_hand() -> None:
    # Whole: embedding 80 and two layers 1216 in bf16; gradients of the layers in bf16 and fp32.
    assert SMALL.gathered_bytes("bf16") == 2 * (80 + 1216) + 6 * 1216


def test_generation_by_hand() -> None:
    # Weights 4 * 1304; keys and values 2 * 4 bytes * 2 layers * 1 head * 4 = 64 a token; reading
    # 4 * (3 * 16 + 4 * 8) = 320 a token, more than the logits of one, 2 * 4 * 10, for each prompt.
    assert SMALL.generation_bytes(3, 5, 2) == 5216 + 3 * 7 * 64 + 3 * 5 * 320
    assert SMALL.generation_bytes(0, 5, 2) == 5216


def test_states_by_hand() -> None:
    assert frozen_bytes(1304, 4) == RoleBytes(weights=1304)
    assert trained_bytes(1304, 4) == RoleBytes(1304, 1304, 2608)
    assert trained_bytes(1304, 1).total == 16 * 1304
    assert adapted_bytes(1304, 100, 1) == RoleBytes(4 * 1404, 400, 800)


def test_known_models_have_their_published_sizes() -> None:
    sizes = {name: shape.n_parameters for name, shape in KNOWN_MODELS.items()}
    assert sizes == {
        "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_config_counts_what_transformers_builds(tied: bool, tmp_path: Path) -> None:
    config = _config(tied)
    config.save_pretrained(tmp_path)
    shape = ModelShape.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert shape is not None
    with torch.device("meta"):
        model, scorer = Qwen2ForCausalLM(config), Qwen2ForTokenClassification(config)
    assert shape.n_parameters == sum(p.numel() for p in model.parameters())
    assert shape.n_value_parameters == sum(p.numel() for p in scorer.parameters())


def test_another_kind_of_model_has_no_shape() -> None:
    assert ModelShape.from_config({"model_type": "mamba"}) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_about_what_autograd_keeps(dtype: str) -> None:
    model = Qwen2ForCausalLM(_config(tied=False)).model
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape is not None
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(512).view(2, 256) % model.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    predicted = shape.activation_bytes(ids.numel(), dtype, checkpointing=False)
    assert 0.8 < sum(kept.values()) / predicted < 1.1


def _config(tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        num_labels=1,
        attn_implementation="sdpa",
    )
