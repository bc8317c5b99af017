"""Partial parameters are completed from a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import evaluate
from flows.reward_model import train_reward_model
from flows.rlhf_pipeline import STAGE_FLOWS, rlhf_pipeline
from flows.stage_run import _tracking_of
from flows.stages import RunOptions, completed, completed_options, lay_over
from tasks.config.loading import find_config, load_config
from tasks.config.shared import TrackingConfig
from tasks.errors import ConfigError, MissingInputError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.reward_model.config import RewardModelConfig
from tasks.sft.config import SftConfig

DEMO = load_config(find_config("demo"))


def _given(fields: dict[str, Any]) -> Any:
    return fields


def test_fields_that_are_left_out_come_from_the_preset() -> None:
    cfg = completed(RewardModelConfig, _given({"epochs": 2.5}), "demo")
    assert cfg.epochs == 2.5
    assert cfg.rendering == DEMO.reward_model.rendering
    assert cfg == DEMO.reward_model.model_copy(update={"epochs": 2.5})


def test_nested_fields_are_completed_at_every_depth() -> None:
    given = {"sft": {"optimizer": {"learning_rate": 0.5}}, "reuse": False}
    cfg = completed(PipelineConfig, _given(given), "demo")
    assert cfg.sft.optimizer.learning_rate == 0.5
    assert cfg.sft.optimizer.betas == DEMO.sft.optimizer.betas == (0.9, 0.98)
    assert cfg.ingest == DEMO.ingest
    assert cfg.reuse is False


def test_table_of_weights_is_replaced_not_mixed() -> None:
    reward = {"components": {"labels": 1.0}}
    cfg = completed(OfflinePPOConfig, _given({"reward": reward}), "demo")
    assert cfg.reward.components == {"labels": 1.0}
    assert lay_over(DEMO.offline_ppo.reward, {})["components"] == DEMO.offline_ppo.reward.components


def test_without_a_preset_the_defaults_complete() -> None:
    assert completed(SftConfig, _given({"epochs": 3}), None) == SftConfig(epochs=3)
    same = SftConfig(epochs=3)
    assert completed(SftConfig, same, None) is same


def test_config_keeps_what_it_was_made_with() -> None:
    cfg = completed(SftConfig, SftConfig(epochs=3), "demo")
    assert (cfg.epochs, cfg.batch_pairs) == (3, DEMO.sft.batch_pairs)
    assert completed(SftConfig, SftConfig(), "demo") == DEMO.sft


def test_checks_between_fields_see_the_whole(tmp_path: Path) -> None:
    # Alone, a prompt of 40,000 tokens exceeds the default budget of 16,384 tokens.
    given = {"rendering": {"max_prompt_tokens": 40_000}}
    with pytest.raises(ConfigError, match=r"cfg: .*tokens_per_micro_batch 16384 is less"):
        completed(RewardModelConfig, _given(given), None)
    preset = tmp_path / "large.yaml"
    preset.write_text("reward_model:\n  runtime:\n    tokens_per_micro_batch: 200000\n")
    cfg = completed(RewardModelConfig, _given(given), str(preset))
    assert cfg.rendering.max_prompt_tokens == 40_000
    # Prefect's own check of the parameters must not judge the part either.
    kept = train_reward_model.validate_parameters({"cfg": given, "preset": str(preset)})
    assert kept["cfg"] == given


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cfg\.epochs: .*greater than 0"):
        completed(SftConfig, _given({"epochs": -1}), "demo")
    with pytest.raises(ConfigError, match=r"cfg\.optimizer\.speed: Extra inputs"):
        completed(SftConfig, _given({"optimizer": {"speed": 1}}), "demo")
    with pytest.raises(MissingInputError, match="No config file nowhere"):
        completed(SftConfig, _given({}), "nowhere")


def test_runs_are_recorded_where_the_preset_says(tmp_path: Path) -> None:
    preset = tmp_path / "other.yaml"
    preset.write_text("tracking: {experiment: other}\n")
    assert completed_options(RunOptions(reuse=True), str(preset)).tracking.experiment == "other"
    own = RunOptions(tracking=TrackingConfig(experiment="own"))
    assert completed_options(own, str(preset)).tracking.experiment == "own"
    # The hook of a dead process has to look in the same place.
    assert _tracking_of({"preset": str(preset), "cfg": {"epochs": 1}}).experiment == "other"


def test_every_form_explains_its_fields() -> None:
    for flow in [*STAGE_FLOWS.values(), rlhf_pipeline]:
        properties = flow.parameters.properties
        assert [name for name, field in properties.items() if not field.get("description")] == []
        assert "required" not in flow.parameters.model_dump_for_openapi()
    assert "upstream:REF" in evaluate.parameters.properties["student"]["description"]
