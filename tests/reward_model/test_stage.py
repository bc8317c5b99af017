"""Stage reward_model on real components."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import load_reward_model
from safetensors.torch import load_file, save_file

from flows.reward_model import train_reward_model
from flows.sft import sft
from flows.stages import RunOptions
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    load_artifact,
)
from tasks.config.loading import load_config
from tasks.config.shared import ModelConfig, OptimizerConfig, RenderingConfig
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer, render_pairs
from tasks.errors import RendererMismatchError, RewardError
from tasks.reward_model.config import HeldOutConfig, PairLossConfig
from tasks.runtime.rows import response_rows
from tasks.sft.config import SftConfig

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
REUSE = RunOptions(reuse=True)


def _train(preferences: str, base: str, **changes: Any) -> RewardModelCheckpoint:
    cfg = CHAIN.reward_model.model_copy(update=changes)
    return load_artifact(Path(train_reward_model(cfg, preferences, base)), RewardModelCheckpoint)


@pytest.fixture(scope="module")
def reward_model(preferences: str, base: str) -> RewardModelCheckpoint:
    path = train_reward_model(CHAIN.reward_model, preferences, base, REUSE)
    return load_artifact(Path(path), RewardModelCheckpoint)


def _plain_scores(
    reward_model: RewardModelCheckpoint, preferences: str, split: str
) -> torch.Tensor:
    """Score all responses of a split with transformers: (P, 2), chosen first."""
    dataset = load_artifact(Path(preferences), PreferenceDataset)
    renderer = Renderer.load(reward_model.model_dir, CHAIN.reward_model.rendering)
    pairs, _ = render_pairs(read_pairs(dataset, split), renderer)
    model = load_reward_model(reward_model.model_dir)
    rows = [torch.tensor([[*row.prompt_ids, *row.response_ids]]) for row in response_rows(pairs)]
    with torch.no_grad():
        return torch.stack([model(row).logits[0, -1, 0] for row in rows]).view(-1, 2)


@pytest.mark.slow
def test_statistics_are_those_of_the_exported_model(
    reward_model: RewardModelCheckpoint, preferences: str
) -> None:
    scores = _plain_scores(reward_model, preferences, "train")
    (component,) = reward_model.components.values()
    assert component.name == "preference"
    assert component.member_dirs == (reward_model.model_dir,)
    assert component.mean == pytest.approx(float(scores.mean()), abs=1e-4)
    assert component.std == pytest.approx(float(scores.std()), abs=1e-4)
    assert component.std > 0


@pytest.mark.slow
def test_reported_metrics_are_those_of_the_exported_model(
    reward_model: RewardModelCheckpoint, preferences: str
) -> None:
    metrics = reward_model.manifest.metrics
    for split in ("validation", "test"):
        chosen, rejected = _plain_scores(reward_model, preferences, split).unbind(1)
        right = float((chosen > rejected).float().mean())
        log_loss = float(torch.nn.functional.softplus(rejected - chosen).mean())
        if split == "test":
            assert metrics["test_accuracy"] == pytest.approx(right, abs=1e-6)
            assert metrics["test_log_loss"] == pytest.approx(log_loss, abs=1e-5)
            assert metrics["test_tie_share"] == 0.0
            assert metrics["test_accuracy_low"] < right < metrics["test_accuracy_high"]
        else:
            # The temperature is the best of a fine row of them on the validation margins.
            row = [
                float(torch.nn.functional.softplus((rejected - chosen) / t).mean())
                for t in metrics["temperature"] * torch.linspace(0.5, 2.0, 61)
            ]
            assert min(row) == pytest.approx(row[20], abs=1e-6)


@pytest.mark.slow
def test_best_step_is_one_that_was_looked_at(reward_model: RewardModelCheckpoint) -> None:
    # Every 3 steps, and at the last of 8.
    assert reward_model.manifest.metrics["preference.0.selected_step"] in (3.0, 6.0, 8.0)
    config = json.loads((reward_model.model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.slow
def test_last_step_is_kept_on_request(preferences: str, base: str) -> None:
    last = _train(
        preferences,
        base,
        held_out=HeldOutConfig(select_best=False),
        loss=PairLossConfig(label_smoothing=0.1, center_coef=0.01),
    )
    assert all(math.isfinite(value) for value in last.manifest.metrics.values())


@pytest.mark.slow
def test_training_separates_the_pairs_it_sees(preferences: str, base: str) -> None:
    held_out = HeldOutConfig(select_best=False, evaluate_every_steps=500)
    trained = _train(preferences, base, max_steps=120, held_out=held_out)
    chosen, rejected = _plain_scores(trained, preferences, "train").unbind(1)
    assert float((chosen > rejected).float().mean()) > 0.9


@pytest.mark.slow
def test_other_renderer_is_refused_before_training(home: Path, preferences: str, base: str) -> None:
    cfg = CHAIN.reward_model.model_copy(update={"rendering": RenderingConfig(max_prompt_tokens=99)})
    before = sorted((home / "models" / "reward_model").glob("*"))
    with pytest.raises(RendererMismatchError, match="the base model was made with renderer"):
        train_reward_model(cfg, preferences, base)
    assert sorted((home / "models" / "reward_model").glob("*")) == before
    assert list((home / "checkpoints" / "reward_model").glob("*")) == []


@pytest.mark.slow
def test_model_that_scores_everything_alike_is_refused(
    preferences: str, base: str, tmp_path: Path
) -> None:
    # With a last norm of 0 nothing reaches the head, and this learning rate, which is 0 in fp32,
    # leaves it so.
    source = Path(shutil.copytree(Path(base) / "model", tmp_path / "mute"))
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    cfg = SftConfig(
        enabled=False, model=ModelConfig(source=str(source)), rendering=CHAIN.sft.rendering
    )
    mute = load_artifact(Path(sft(cfg, preferences)), PolicyCheckpoint)
    with pytest.raises(RewardError, match="every training response the score"):
        _train(preferences, str(mute.path), optimizer=OptimizerConfig(learning_rate=1e-50))
