"""The tiny model: plain transformers format, the same bytes, a template that can be trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tasks.config.shared import TinyModelConfig
from tasks.models.tiny import build_tiny_model, count_tiny_parameters

_DIALOGUE = [
    {"role": "user", "content": "My name is Ben."},
    {"role": "assistant", "content": "Hello there, Ben."},
    {"role": "user", "content": "Say my name."},
]


def _bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_it_loads_with_the_auto_classes(tiny_dir: Path, spec: TinyModelConfig) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(tiny_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.num_parameters() == count_tiny_parameters(spec)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    config = json.loads((tiny_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert GenerationConfig.from_pretrained(tiny_dir).eos_token_id == 2


def test_parameter_count_by_hand() -> None:
    # Embedding 512*128 = 65,536. A block: attention 4*128*128 = 65,536, feed-forward
    # 3*128*384 = 147,456, two norms 256: 213,248. Two blocks 426,496, last norm 128.
    assert count_tiny_parameters(TinyModelConfig()) == 65_536 + 426_496 + 128


def test_the_template_renders_roles_and_no_system_turn(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    text = tokenizer.apply_chat_template(_DIALOGUE, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|im_user|>My name is Ben.<|im_end|><|im_assistant|>Hello there, Ben.<|im_end|>"
        "<|im_user|>Say my name.<|im_end|><|im_assistant|>"
    )
    with pytest.raises(TemplateError, match="Unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_rendered_ids_hold_one_bos_and_whole_markers(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    ids = tokenizer.apply_chat_template(_DIALOGUE, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_assistant|>")) == 2
    assert tokenizer("x", add_special_tokens=True).input_ids == tokenizer.encode("x")


def test_special_tokens_are_distinct(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert ids == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", ["Hello there, Ben.", " two  spaces\n\tand a tab ", "é 字 🙂 123"])
def test_any_text_survives_the_tokenizer(tiny_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_same_input_same_bytes_in_another_process(
    tiny_dir: Path, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from pathlib import Path;"
        "from tasks.config.shared import TinyModelConfig;"
        "from tasks.models.tiny import build_tiny_model;"
        "spec = TinyModelConfig(hidden_size=32, n_layers=2, n_heads=2, vocab_size=400);"
        "texts = json.load(open(sys.argv[1] + '/texts.json'));"
        "build_tiny_model(Path(sys.argv[1]) / 'm', texts, spec, 1)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, stderr=subprocess.PIPE)
    assert _bytes_of(tmp_path / "m") == _bytes_of(tiny_dir)


def test_the_seed_changes_weights_only(
    texts: list[str], spec: TinyModelConfig, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = _bytes_of(build_tiny_model(tmp_path / "a", texts, spec, seed=1))
    second = _bytes_of(build_tiny_model(tmp_path / "b", texts, spec, seed=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_a_directory_with_content_stays_as_it_is(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        build_tiny_model(tmp_path / "m", texts[:1], TinyModelConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"


def test_few_texts_give_a_smaller_vocabulary(tmp_path: Path) -> None:
    directory = build_tiny_model(tmp_path / "m", ["ab ab"], TinyModelConfig(hidden_size=16))
    # 256 bytes, 6 special tokens, and the merges "ab" and " ab"
    assert len(AutoTokenizer.from_pretrained(directory)) == 264
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size == 264


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "one"
        raise OSError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        build_tiny_model(tmp_path / "m", texts(), TinyModelConfig())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 200}, "vocab_size"),
        ({"hidden_size": 100, "n_heads": 3}, "n_heads"),
        ({"hidden_size": 4, "n_heads": 4}, "n_heads"),
        ({"n_layers": 0}, "n_layers"),
        ({"hidden_size": 512, "n_heads": 8}, "at most 2000000"),
    ],
)
def test_sizes_that_cannot_work_are_refused(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny_model(tmp_path / "m", [], TinyModelConfig(**sizes))
