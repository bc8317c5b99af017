"""Stage sft on real components: the cloned base model, or a model taken as it is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from flows.sft import sft
from flows.stages import RunOptions
from tasks.artifacts import PolicyCheckpoint, load_artifact
from tasks.config.loading import load_config
from tasks.config.shared import ModelConfig
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer
from tasks.errors import ModelError
from tasks.models.loading import load_causal_lm
from tasks.sft.config import SftConfig
from tasks.sft.stage import cloned_rows

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
REUSE = RunOptions(reuse=True)


@pytest.fixture(scope="module")
def base(preferences: str) -> PolicyCheckpoint:
    return load_artifact(Path(sft(CHAIN.sft, preferences, REUSE)), PolicyCheckpoint)


def test_rows_that_are_imitated() -> None:
    pair = RenderedPair("a", "p", (1, 2), (3, 4), (5,), "all")
    both = [(row.prompt_ids, row.response_ids) for row in cloned_rows(pair, "both")]
    assert both == [((1, 2), (3, 4)), ((1, 2), (5,))]
    assert [row.response_ids for row in cloned_rows(pair, "chosen")] == [(3, 4)]


@pytest.mark.slow
def test_base_is_a_plain_model_that_learned(base: PolicyCheckpoint) -> None:
    manifest = base.manifest
    model = load_causal_lm(base.model_dir)
    config = json.loads((base.model_dir / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 1)
    assert manifest.counts["steps"] == 60
    # Guessing costs log(V), nearly 6 nats a token.
    assert manifest.metrics["validation_nll"] < math.log(config["vocab_size"]) - 2
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    renderer = Renderer.load(base.model_dir, CHAIN.sft.rendering)
    assert manifest.renderer_fingerprint == renderer.fingerprint


@pytest.mark.slow
def test_every_training_pair_is_counted(base: PolicyCheckpoint, preferences: str) -> None:
    from tasks.artifacts import PreferenceDataset

    pairs = read_pairs(load_artifact(Path(preferences), PreferenceDataset), "train")
    left_out = [
        n for name, n in base.manifest.counts.items() if name not in ("train_pairs", "steps")
    ]
    assert base.manifest.counts["train_pairs"] + sum(left_out) == len(pairs)


@pytest.mark.slow
def test_same_config_gives_the_same_bytes(base: PolicyCheckpoint, preferences: str) -> None:
    again = load_artifact(Path(sft(CHAIN.sft, preferences)), PolicyCheckpoint)
    assert again.path != base.path
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again.model_dir / name).read_bytes() == (base.model_dir / name).read_bytes()


@pytest.mark.slow
def test_disabled_stage_publishes_the_model_unchanged(
    base: PolicyCheckpoint, preferences: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(base.model_dir, tmp_path / "instruct"))
    (source / "optimizer.pt").write_bytes(b"not wanted")
    cfg = SftConfig(
        enabled=False, model=ModelConfig(source=str(source)), rendering=CHAIN.sft.rendering
    )
    taken = load_artifact(Path(sft(cfg, preferences)), PolicyCheckpoint)
    names = {path.name for path in taken.model_dir.iterdir()}
    assert names == {path.name for path in base.model_dir.iterdir()}
    weights = "model.safetensors"
    assert (taken.model_dir / weights).read_bytes() == (source / weights).read_bytes()
    assert taken.manifest.renderer_fingerprint == base.manifest.renderer_fingerprint


@pytest.mark.slow
def test_model_without_a_chat_template_is_refused(
    base: PolicyCheckpoint, preferences: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(base.model_dir, tmp_path / "plain"))
    (source / "chat_template.jinja").unlink()
    cfg = CHAIN.sft.model_copy(update={"model": ModelConfig(source=str(source))})
    with pytest.raises(ModelError, match="chat template"):
        sft(cfg, preferences)
