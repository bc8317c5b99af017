"""Every setting changes something in a small run, or the run says that nothing reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.artifacts import Artifact, PolicyCheckpoint, RewardModelCheckpoint, load_artifact
from tasks.config.loading import load_config, merge
from tasks.config.shared import StageConfig
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.reward_model.config import RewardModelConfig

pytestmark = pytest.mark.endurance

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
REUSE = RunOptions(reuse=True)
# What a clock says, and where a run was.
_OTHERWISE = ("seconds", "per_second", "time_share", "memory")

GAE = {"advantage": {"estimator": "gae"}, "critic": {"force": True}}
FITTED = {"advantage": {"control_variate": {"kind": "fitted"}}}
CANDIDATES = {"candidates": {"per_prompt": 2, "max_new_tokens": 16}}
BOUNDED = {"candidates": {**CANDIDATES["candidates"], "temperature": 1.5, "kl_bound": 0.01}}
CLONED = {"behavior": {"policy": "cloned"}}
PRIORITY = {"sampler": {"priority": "margin"}}
ADAPTIVE = {"filters": {"sequence": {"mode": "adaptive", "target_keep_share": 0.7}}}
FUNCTION = {
    "reward": {
        "components": {"function": 1.0},
        "function_path": str(Path(__file__).parents[2] / "configs/reward_functions/bleu.py"),
    }
}
CONSTANT = {"optimizer": {"schedule": "constant"}}
A_LOL, TOPR, DPO = ({"policy_loss": name} for name in ("a_lol", "topr", "dpo"))
KL = {"reward": {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 40}}
RULE = {"name": "mine", "when": "grad_norm > 0", "learning_rate_scale": 0.5}

# Setting, another value, and what else is set in both runs.
PPO_CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    *[("policy_loss", name, {}) for name in ("topr", "a_lol", "positives_only", "dpo")],
    ("steps", 3, {}),
    ("batch_prompts", 4, {}),
    ("reanchor_steps", 1, {}),
    ("behavior.policy", "cloned", {}),
    *[("behavior.clone_epochs", 3.0, also) for also in ({}, CLONED)],
    *[("behavior.clone_batch_pairs", 8, also) for also in ({}, CLONED)],
    *[("behavior.clone_optimizer.learning_rate", 1e-2, also) for also in ({}, CLONED, DPO)],
    ("reward.components", {"labels": 1.0}, {}),
    ("reward.normalize", "raw", {}),
    *[("reward.normalize", "raw", {"reward": {"components": {"labels": 1.0}}})],
    *[("reward.clip", 0.5, also) for also in ({}, {"reward": {"normalize": "binary"}}, FUNCTION)],
    *[("reward.center", "prompt", also) for also in ({}, GAE)],
    ("reward.kl_coef", 0.1, {}),
    ("reward.kl_target", 0.01, {"reward": {"kl_coef": 0.1, "kl_horizon": 40}}),
    *[("reward.kl_horizon", 80, also) for also in ({}, KL)],
    ("reward.function_path", FUNCTION["reward"]["function_path"], {}),
    ("advantage.estimator", "rloo", {}),
    *[("advantage.normalize_std", False, also) for also in ({}, GAE, DPO)],
    *[("advantage.gamma", 0.9, also) for also in ({}, GAE)],
    ("advantage.gamma", 0.9, {"advantage": {"estimator": "reinforce_pp"}}),
    *[("advantage.gae_lambda", 0.5, also) for also in ({}, GAE)],
    *[("advantage.whiten", True, also) for also in ({}, GAE)],
    ("advantage.control_variate.kind", "leave_one_out", {}),
    ("advantage.control_variate.kind", "leave_one_out", {"advantage": {"normalize_std": False}}),
    ("advantage.control_variate.kind", "fitted", {}),
    *[("advantage.control_variate.features", ["length"], also) for also in ({}, FITTED)],
    *[("critic.warmup_steps", 2, also) for also in ({}, GAE)],
    *[("critic.value_clip", 0.01, also) for also in ({}, GAE)],
    *[("critic.optimizer.learning_rate", 1e-2, also) for also in ({}, GAE)],
    *[("importance.level", "token", also) for also in ({}, TOPR, DPO)],
    ("importance.level", "token", {"policy_loss": "positives_only"}),
    *[("importance.cap", 1.0, also) for also in ({}, TOPR)],
    *[("loss.clip_low", 1e-4, also) for also in ({}, A_LOL)],
    *[("loss.clip_high", 1e-4, also) for also in ({}, TOPR)],
    *[("loss.dual_clip", 1.5, also) for also in (A_LOL,)],
    ("loss.aggregation", "seq-mean-token-sum", {}),
    ("loss.entropy_coef", 0.1, {}),
    ("loss.kl_coef", 0.1, {}),
    *[("loss.kl_kind", "k3", also) for also in ({}, {"loss": {"kl_coef": 0.1}})],
    *[("loss.dpo_beta", 1.0, also) for also in ({}, DPO)],
    *[("loss.dpo_label_smoothing", 0.2, also) for also in ({}, DPO)],
    ("optimizer.learning_rate", 1e-2, {}),
    ("optimizer.schedule", "constant", {}),
    *[("optimizer.min_lr_share", 0.5, also) for also in ({}, CONSTANT)],
    ("optimizer.weight_decay", 0.5, {}),
    *[("sampler.priority", name, {}) for name in ("margin", "advantage")],
    *[("sampler.priority_exponent", 9.0, also) for also in ({}, PRIORITY)],
    *[("sampler.uniform_share", 0.9, also) for also in ({}, PRIORITY)],
    *[("sampler.epoch_share", 0.9, also) for also in ({}, PRIORITY)],
    *[("sampler.correct_priority", False, also) for also in ({}, PRIORITY)],
    ("sampler.name", "Mine", {}),
    ("filters.min_margin_quantile", 0.5, {}),
    ("filters.max_length_quantile", 0.5, {}),
    ("filters.sequence.tau", 1.001, {"filters": {"sequence": {"mode": "fixed", "tau": 1e8}}}),
    *[("filters.sequence.tau", 1.2, also) for also in ({}, ADAPTIVE)],
    *[("filters.sequence.smoothing", 0.1, also) for also in ({}, ADAPTIVE)],
    ("candidates.per_prompt", 1, {}),
    *[("candidates.temperature", 0.5, also) for also in ({}, CANDIDATES)],
    *[("candidates.temperature_scale", 0.5, also) for also in ({}, CANDIDATES, BOUNDED)],
    ("guards.enabled", False, {"guards": {"rules": [RULE]}}),
    *[("guards.max_rollbacks", 1, also) for also in ({"guards": {"enabled": False}},)],
    ("guards.rules", [RULE], {}),
    ("guards.rules", [RULE], {"guards": {"enabled": False}}),
    ("guards.probe_prompts", 4, {}),
    ("report.prompts", 3, {}),
    *[("report.max_new_tokens", 8, also) for also in ({}, {"report": {"prompts": 0}})],
]
RM_CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("members", 2, {}),
    ("freeze_backbone", True, {}),
    ("max_steps", 4, {}),
    ("batch_pairs", 8, {}),
    ("loss.label_smoothing", 0.2, {}),
    ("loss.center_coef", 0.1, {}),
    ("noise.method", "downweight", {}),
    *[("noise.folds", 3, also) for also in ({}, {"noise": {"method": "soften"}})],
    *[("noise.flip_rate", 0.3, also) for also in ({}, {"noise": {"method": "soften"}})],
    ("held_out.evaluate_every_steps", 2, {}),
    ("held_out.select_best", False, {}),
    ("optimizer.learning_rate", 1e-3, {}),
    *[("optimizer.min_lr_share", 0.5, also) for also in ({}, CONSTANT)],
]


def _names(changes: list[tuple[str, Any, dict[str, Any]]]) -> list[str]:
    return [f"{name}-{json.dumps(base)[:40]}" for name, _, base in changes]


def _changed(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _config(cls: type[StageConfig], chain: StageConfig, *changes: dict[str, Any]) -> Any:
    plain = chain.model_dump(exclude={"reward": {"components"}})
    for change in changes:
        plain = merge(plain, change)
    return cls.model_validate(plain)


def _content(made: Artifact) -> str:
    """Return a hash of all that a run made, but for what a clock says."""
    digest = hashlib.sha256()
    for file in sorted(made.path.rglob("*")):
        if file.suffix in (".safetensors", ".parquet"):
            # The columns of stored responses are keyed by the fingerprint, which is another one.
            digest.update(b"" if file.name == "trajectories.parquet" else file.read_bytes())
        if file.name == "history.jsonl":
            for line in file.read_text().splitlines():
                digest.update(json.dumps(_steady(json.loads(line))).encode())
    digest.update(json.dumps(_steady(dict(made.manifest.metrics))).encode())
    return digest.hexdigest()


def _steady(values: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _steady(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {k: v for k, v in sorted(kept.items()) if not any(word in k for word in _OTHERWISE)}


def _check(cfg: StageConfig, name: str, before: str, after: str) -> None:
    idle = cfg.settings_without_effect()
    is_said = any(
        f"{idle_name}.".startswith(f"{name}.") or f"{name}.".startswith(f"{idle_name}.")
        for idle_name in idle
    )
    if is_said:
        assert before == after, f"{name} is said to do nothing: {idle}"
    else:
        assert before != after, f"nothing reads {name}, and nothing says so"


@pytest.fixture(scope="module")
def content_of_policy(preferences: str, base: str) -> Callable[[OfflinePPOConfig], str]:
    reward_model = train_reward_model(CHAIN.reward_model, preferences, base, REUSE)

    def content(cfg: OfflinePPOConfig) -> str:
        path = train_offline_ppo(cfg, preferences, reward_model, base, REUSE)
        return _content(load_artifact(Path(path), PolicyCheckpoint))

    return content


@pytest.fixture(scope="module")
def content_of_reward_model(preferences: str, base: str) -> Callable[[RewardModelConfig], str]:
    def content(cfg: RewardModelConfig) -> str:
        path = train_reward_model(cfg, preferences, base, REUSE)
        return _content(load_artifact(Path(path), RewardModelCheckpoint))

    return content


@pytest.mark.parametrize(("name", "value", "also"), PPO_CHANGES, ids=_names(PPO_CHANGES))
def test_a_setting_of_offline_ppo_does_something_or_is_said(
    name: str, value: Any, also: dict[str, Any], content_of_policy: Callable[..., str]
) -> None:
    before = _config(OfflinePPOConfig, CHAIN.offline_ppo, also)
    after = _config(OfflinePPOConfig, CHAIN.offline_ppo, also, _changed(name, value))
    assert before != after
    _check(after, name, content_of_policy(before), content_of_policy(after))


@pytest.mark.parametrize(("name", "value", "also"), RM_CHANGES, ids=_names(RM_CHANGES))
def test_a_setting_of_the_reward_model_does_something_or_is_said(
    name: str, value: Any, also: dict[str, Any], content_of_reward_model: Callable[..., str]
) -> None:
    before = _config(RewardModelConfig, CHAIN.reward_model, also)
    after = _config(RewardModelConfig, CHAIN.reward_model, also, _changed(name, value))
    assert before != after
    _check(after, name, content_of_reward_model(before), content_of_reward_model(after))
