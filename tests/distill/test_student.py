"""A student before training: its adapter's targets, its vocabulary, its tokens; and the program
that reads it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.config.shared import TinyModelConfig
from tasks.distill.student import check_targets, check_vocabulary, n_parameters, refuse_other_tokens
from tasks.distill.student_check import compare
from tasks.errors import ConfigError, ModelError, RendererMismatchError
from tasks.models.loading import load_causal_lm, load_student, merge_adapter
from tasks.models.tiny import build_tiny_model


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinyModelConfig(hidden_size=16, n_layers=2, n_heads=2, vocab_size=270)
    return build_tiny_model(tmp_path_factory.mktemp("student") / "tied", ["some text"], spec)


@pytest.fixture(scope="module")
def untied(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student") / "untied"
    model = load_causal_lm(tied)
    config = model.config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    AutoTokenizer.from_pretrained(tied).save_pretrained(directory)
    return directory


def test_targets_are_counted(tied: Path) -> None:
    # Seven linear layers in each of two decoder layers; the head is not one of them.
    assert check_targets(tied, "all-linear") == 14
    assert check_targets(tied, ("q_proj", "v_proj")) == 4
    assert check_targets(tied, r".*layers\.1\..*(up|down)_proj") == 2


@pytest.mark.parametrize("targets", [("query",), ("q_proj", "query"), "query"])
def test_targets_that_match_nothing_are_refused(tied: Path, targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"names 'query', which no layer .*down_proj.*q_proj"):
        check_targets(tied, targets)
    with pytest.raises(ConfigError, match="names ''"):
        check_targets(tied, ())


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tied_embeddings_are_not_adapted(tied: Path, untied: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"adapts .*{name}.*are tied"):
        check_targets(tied, (name, "q_proj"))
    assert check_targets(untied, (name, "q_proj")) == 3


def test_too_few_embeddings_are_refused(tied: Path) -> None:
    check_vocabulary(tied, 262, "The student")
    with pytest.raises(ModelError, match=r"The student .* for a tokenizer of 1000 ids"):
        check_vocabulary(tied, 1000, "The student")
    assert n_parameters(tied) == sum(p.numel() for p in load_causal_lm(tied).parameters())


def _with_tokenizer(source: Path, directory: Path, change: Any) -> Path:
    shutil.copytree(source, directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return directory


def test_other_tokens_are_named_with_both_ids(tied: Path, tmp_path: Path) -> None:
    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    other = _with_tokenizer(tied, tmp_path / "swapped", swap)
    a = AutoTokenizer.from_pretrained(tied).convert_tokens_to_ids("a")
    with pytest.raises(
        RendererMismatchError,
        match=rf"2 tokens have other ids \('a' is id {a} of the teacher and id {a + 1} of the st",
    ):
        refuse_other_tokens(tied, other)


def test_other_chat_template_is_named(tied: Path, tmp_path: Path) -> None:
    other = tmp_path / "template"
    shutil.copytree(tied, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template += "\n"
    tokenizer.save_pretrained(other)
    with pytest.raises(RendererMismatchError, match="their chat templates differ"):
        refuse_other_tokens(tied, other)


ROWS = [([4, 5, 60], [70, 71, 3]), ([4, 61, 62, 5], [72, 3])]


def _job(base: Path, directory: Path, model: Any) -> dict[str, Any]:
    """Return the job of comparing what lies in a directory with a model."""
    with torch.no_grad():
        logits = [model(torch.tensor([[*p, *r]])).logits[0, len(p) - 1 : -1] for p, r in ROWS]
    save_file({str(i): rows.contiguous() for i, rows in enumerate(logits)}, directory / "logits.st")
    return {
        "base": str(base),
        "adapter": str(directory / "adapter"),
        "merged": str(directory / "merged"),
        "rows": ROWS,
        "logits": str(directory / "logits.st"),
        "device": "cpu",
    }


def _adapt(base: Path, directory: Path, **options: Any) -> Any:
    """Write an adapter that does something, and the merged model; return the adapted model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", **options)
    model = get_peft_model(load_causal_lm(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory / "adapter")
    merge_adapter(base, directory / "adapter", directory / "merged")
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("is_tied", [True, False])
def test_export_is_read_back_by_plain_libraries(
    tied: Path, untied: Path, is_tied: bool, options: Any, tmp_path: Path
) -> None:
    base = tied if is_tied else untied
    found = compare(_job(base, tmp_path, _adapt(base, tmp_path, **options)))
    assert found["adapter"] <= 1e-4 and found["merged"] <= 1e-3
    assert (found["is_tied"], found["is_tied_in_base"]) == (is_tied, is_tied)
    assert found["same_embeddings"]
    # The base by itself is another model.
    base_found = compare(_job(base, tmp_path, load_causal_lm(base)))
    assert base_found["adapter"] > 0.01 and base_found["merged"] > 0.01


def test_changed_embeddings_are_seen(tied: Path, tmp_path: Path) -> None:
    job = _job(tied, tmp_path, _adapt(tied, tmp_path))
    merged = load_causal_lm(tmp_path / "merged")
    with torch.no_grad():
        merged.get_input_embeddings().weight[7] += 1e-3
    merged.save_pretrained(tmp_path / "merged")
    assert not compare(job)["same_embeddings"]


def test_a_directory_that_is_no_adapter_is_refused(tied: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json.*adapter in PEFT format"):
        load_student(tied, tied)
