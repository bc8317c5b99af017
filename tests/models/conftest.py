"""A tiny model, a reward model and an adapter, each built once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tasks.config.shared import TinyModelConfig
from tasks.demo.oracle import parse_transcript
from tasks.demo.world import generate_pairs
from tasks.models.loading import load_causal_lm
from tasks.models.tiny import build_tiny_model

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Turns of 300 dialogues of the demo world."""
    rows = generate_pairs(300, seed=0)
    return [turn["content"] for row in rows for turn in parse_transcript(row["chosen"])]


@pytest.fixture(scope="session")
def spec() -> TinyModelConfig:
    return TinyModelConfig(hidden_size=32, n_layers=2, n_heads=2, vocab_size=400)


@pytest.fixture(scope="session")
def tiny_dir(
    texts: list[str], spec: TinyModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A read-only tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", texts, spec, seed=1)


@pytest.fixture
def tiny_copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """A tiny model that the test may damage."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "copy"))


@pytest.fixture
def reward_model_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A reward model whose head is not the default initialisation."""
    model = AutoModelForTokenClassification.from_pretrained(tiny_dir, num_labels=1)
    with torch.no_grad():
        model.score.weight.fill_(0.25)
        model.score.bias.fill_(-1.0)
    model.save_pretrained(tmp_path / "reward_model")
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(tmp_path / "reward_model")
    return tmp_path / "reward_model"


@pytest.fixture
def make_adapter(tiny_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Write a LoRA adapter on the tiny model with non-zero B matrices."""

    def make(name: str) -> Path:
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(load_causal_lm(tiny_dir), config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.fill_(0.05)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make
