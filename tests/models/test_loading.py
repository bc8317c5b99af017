"""Loading: what transformers and peft would only warn about is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.data.rendering import load_tokenizer
from tasks.errors import ModelError
from tasks.models.loading import load_causal_lm, load_student

_IDS = torch.tensor([[1, 4, 70, 71, 72, 2]])


def _edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_language_model_loads_in_evaluation_mode(tiny_dir: Path) -> None:
    model = load_causal_lm(tiny_dir)
    assert not model.training and model.dtype == torch.float32
    assert load_tokenizer(tiny_dir).chat_template


def test_a_missing_tensor_is_an_error(tiny_copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_tensors(tiny_copy / "model.safetensors", lambda t: t.pop(name))
    with pytest.raises(ModelError, match="1 missing") as caught:
        load_causal_lm(tiny_copy)
    assert name in str(caught.value) and str(tiny_copy) in str(caught.value)


def test_a_surplus_tensor_is_an_error(tiny_copy: Path) -> None:
    _edit_tensors(tiny_copy / "model.safetensors", lambda t: t.update(extra=torch.ones(2)))
    with pytest.raises(ModelError, match=r"1 surplus \(extra\)"):
        load_causal_lm(tiny_copy)


def test_a_tensor_of_another_shape_is_an_error(tiny_copy: Path) -> None:
    _edit_tensors(
        tiny_copy / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(3)})
    )
    with pytest.raises(ModelError, match="does not load"):
        load_causal_lm(tiny_copy)


def test_a_reward_model_is_no_language_model(reward_model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"2 surplus \(score\.bias, score\.weight\)"):
        load_causal_lm(reward_model_dir)


def test_a_student_is_base_plus_adapter(
    tiny_dir: Path, make_adapter: Callable[[str], Path]
) -> None:
    student = load_student(tiny_dir, make_adapter("adapter"))
    assert not student.training
    with torch.no_grad():
        base_logits = load_causal_lm(tiny_dir)(_IDS).logits
        student_logits = student(_IDS).logits
        with student.disable_adapter():
            assert torch.equal(student(_IDS).logits, base_logits)
        merged_logits = student.merge_and_unload()(_IDS).logits
    assert (student_logits - base_logits).abs().max() > 1e-3
    torch.testing.assert_close(merged_logits, student_logits, rtol=1e-4, atol=1e-5)


def test_an_adapter_without_one_matrix_is_an_error(
    tiny_dir: Path, make_adapter: Callable[[str], Path]
) -> None:
    adapter = make_adapter("adapter")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    _edit_tensors(adapter / "adapter_model.safetensors", lambda t: t.pop(name))
    with pytest.raises(ModelError, match=r"1 missing .*q_proj\.lora_B"):
        load_student(tiny_dir, adapter)


def test_an_adapter_with_a_surplus_matrix_is_an_error(
    tiny_dir: Path, make_adapter: Callable[[str], Path]
) -> None:
    adapter = make_adapter("adapter")
    name = "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight"
    _edit_tensors(
        adapter / "adapter_model.safetensors", lambda t: t.update({name: torch.ones(32, 4)})
    )
    with pytest.raises(ModelError, match=r"1 surplus .*layers\.9"):
        load_student(tiny_dir, adapter)


def test_an_adapter_of_another_rank_is_an_error(
    tiny_dir: Path, make_adapter: Callable[[str], Path]
) -> None:
    adapter = make_adapter("adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 2}))
    with pytest.raises(ModelError, match="does not fit"):
        load_student(tiny_dir, adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_adapter_file_is_named(
    tiny_dir: Path, make_adapter: Callable[[str], Path], name: str
) -> None:
    adapter = make_adapter("adapter")
    (adapter / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}"):
        load_student(tiny_dir, adapter)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match="is not a directory"):
            load(tmp_path / "absent")
