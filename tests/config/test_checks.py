"""Fields that contradict each other are refused before any work, naming both."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.inputs import check_reward_function
from tasks.artifacts import Draft, PolicyCheckpoint, build_artifact, newest_artifact
from tasks.config.loading import merge
from tasks.errors import ConfigError
from tasks.offline_ppo.config import OfflinePPOConfig, PolicyLossConfig
from tasks.reward_model.config import RewardModelConfig
from tasks.runtime.session import _own_signal_handler
from tasks.sft.config import SftConfig


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (PolicyLossConfig, {"dual_clip": 1.1}, r"dual_clip 1.1 is below 1 \+ clip_high"),
        (OfflinePPOConfig, {"reward": {"kl_target": 0.1}}, "kl_coef, which is 0"),
        (
            OfflinePPOConfig,
            {"reward": {"kl_target": 0.1, "kl_coef": 0.1, "kl_horizon": 4}},
            "kl_horizon 4 is too short",
        ),
        (
            OfflinePPOConfig,
            {"behavior": {"policy": "logged"}, "importance": {"level": "token"}},
            "'logged' knows one log-probability per response",
        ),
        (
            OfflinePPOConfig,
            {"behavior": {"policy": "logged"}, "rendering": {"truncate_response": True}},
            "'logged' knows whole responses",
        ),
        (
            OfflinePPOConfig,
            {"reward": {"components": {"labels": 1.0, "reward_model": 1.0}, "search": {}}},
            "judges weights by the labels",
        ),
        (OfflinePPOConfig, {"reward": {"search": {}}}, "name a second one"),
        (
            OfflinePPOConfig,
            {
                "reward": {
                    "components": {f"reward_model.c{k}": 1.0 for k in range(6)},
                    "search": {"resolution": 10},
                }
            },
            # C(15, 5) = 3003
            "over 6 components makes 3003",
        ),
        (SftConfig, {"epochs": float("inf")}, "finite number"),
        # True is 1 in Python: seed 1, one epoch, a weight of 1.
        (SftConfig, {"seed": True}, r"seed\n.*a number, not true or false"),
        (SftConfig, {"epochs": False}, "a number, not true or false"),
        (SftConfig, {"optimizer": {"betas": [True, 0.9]}}, "a number, not true or false"),
        (
            OfflinePPOConfig,
            {"reward": {"components": {"labels": True}}},
            "a number, not true or false",
        ),
        (SftConfig, {"optimizer": {"betas": [2.0, -1.0]}}, "betas"),
        (
            SftConfig,
            {"batch_pairs": 32, "runtime": {"ranks": 3}},
            "not a multiple of runtime.ranks",
        ),
        (SftConfig, {"model": {"tiny": {"n_heads": 3}}}, "n_heads 3"),
        (
            SftConfig,
            {"model": {"tiny": {"max_position_embeddings": 16}}},
            "less than the 768 tokens",
        ),
        # Two rows of 512 + 256 tokens: 1,536.
        (RewardModelConfig, {"runtime": {"tokens_per_micro_batch": 1535}}, "the 1536 tokens"),
    ],
)
def test_contradiction_is_refused(section: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


def test_a_budget_that_just_fits_is_taken() -> None:
    RewardModelConfig.model_validate({"runtime": {"tokens_per_micro_batch": 1536}})


def test_reward_function_with_other_parameters_is_refused_unrun(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward_fn(prompt, response):\n    raise SystemExit\n")
    with pytest.raises(ConfigError, match="data_source"):
        check_reward_function(file, "reward_fn")
    file.write_text("def reward_fn(data_source, **rest):\n    raise SystemExit\n")
    check_reward_function(file, "reward_fn")


def test_content_hash_follows_the_payload_and_not_the_config(tmp_path: Path) -> None:
    hashes = []
    for payload in ("a", "a", "b"):
        draft = Draft(PolicyCheckpoint.KIND, "sft", "f" * 64, config={})
        with build_artifact(tmp_path, draft) as directory:
            (directory / "weights").write_text(payload)
        made = newest_artifact(tmp_path, PolicyCheckpoint, "f" * 64)
        assert made is not None
        hashes.append(made.content_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_sigterm_keeps_its_handler_around_a_library_that_replaces_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _own_signal_handler():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("name", "idle", "used"),
    [
        (
            "critic.warmup_steps",
            {"critic": {"warmup_steps": 3}},
            {"advantage": {"estimator": "gae"}},
        ),
        ("reward.center", {"reward": {"center": "prompt"}}, {"advantage": {"estimator": "gae"}}),
        (
            "advantage.control_variate.kind",
            {"advantage": {"control_variate": {"kind": "leave_one_out"}}},
            {"advantage": {"normalize_std": False}},
        ),
        ("loss.dpo_beta", {"loss": {"dpo_beta": 1.0}}, {"policy_loss": "dpo"}),
        (
            "sampler.epoch_share",
            {"sampler": {"epoch_share": 0.9}},
            {"sampler": {"priority": "margin"}},
        ),
        (
            "optimizer.min_lr_share",
            {"optimizer": {"schedule": "constant", "min_lr_share": 0.1}},
            {"optimizer": {"schedule": "cosine"}},
        ),
    ],
)
def test_settings_without_effect_are_known(
    name: str, idle: dict[str, Any], used: dict[str, Any]
) -> None:
    assert list(OfflinePPOConfig.model_validate(idle).settings_without_effect()) == [name]
    changed = OfflinePPOConfig.model_validate(merge(idle, used))
    assert name not in changed.settings_without_effect()
    assert OfflinePPOConfig().settings_without_effect() == {}
