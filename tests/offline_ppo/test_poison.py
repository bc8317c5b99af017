"""An aligned policy and a poisoned reward: what the demo's oracle says, with guards and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from policy_runs import tags_of

from flows.ingest import ingest
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.sft import sft
from tasks.artifacts import PolicyCheckpoint, PreferenceDataset, load_artifact
from tasks.config.loading import load_config, merge
from tasks.data.pairs import read_pairs
from tasks.demo.oracle import good_rate
from tasks.ingest.config import IngestConfig
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.sft.config import SftConfig

pytestmark = [pytest.mark.slow, pytest.mark.endurance]

TESTS = Path(__file__).parents[1]
CHAIN = load_config(TESTS / "small_chain.yaml")
ORACLE = TESTS.parent / "configs" / "reward_functions" / "demo_oracle.py"
# The smallest world in which a base is half good and offline PPO makes it better.
INGEST: dict[str, Any] = {"demo": {"n_pairs": 3000}, "validation_share": 0.1, "test_share": 0.1}
SFT: dict[str, Any] = {
    "model": {"tiny": {"hidden_size": 96, "n_layers": 2, "n_heads": 4}},
    "max_steps": 500,
    "optimizer": {"learning_rate": 2e-3, "warmup_share": 0.08},
}
PPO: dict[str, Any] = {
    "steps": 64,
    "batch_prompts": 32,
    "reanchor_steps": 8,
    "optimizer": {"learning_rate": 8e-4, "schedule": "constant"},
    "guards": {
        "probe_every_steps": 8,
        "probe_prompts": 64,
        "probe_max_new_tokens": 32,
        "held_out_pairs": 256,
        "thresholds": {"probe_kl": 0.3},
    },
    "report": {"prompts": 250, "max_new_tokens": 32},
}
POISON = {
    "length": "float(len(solution_str))",
    "against_labels": "-1.0 if solution_str == ground_truth else 1.0",
}


@pytest.fixture(scope="module")
def train(home: Path) -> Any:
    """A function that trains from a policy, None for the base, on a reward function."""
    preferences = ingest(IngestConfig.model_validate(merge(CHAIN.ingest.model_dump(), INGEST)))
    base = sft(SftConfig.model_validate(merge(CHAIN.sft.model_dump(), SFT)), preferences)
    reward_model = train_reward_model(CHAIN.reward_model, preferences, base)
    test_pairs = read_pairs(load_artifact(Path(preferences), PreferenceDataset), "test")
    prompts = {pair.prompt_id: pair.prompt for pair in test_pairs}

    def run(start: Path | None, function: Path, **guards: Any) -> tuple[PolicyCheckpoint, Any]:
        components = {"function": 1.0, "reward_model": 0.0}
        reward = {"components": components, "function_path": str(function)}
        changes = merge(PPO, {"reward": reward, "guards": guards})
        cfg = OfflinePPOConfig.model_validate(merge(CHAIN.offline_ppo.model_dump(), changes))
        path = train_offline_ppo(cfg, preferences, reward_model, str(start or base))
        policy = load_artifact(Path(path), PolicyCheckpoint)
        answers = pq.read_table(policy.path / "report" / "held_out_pairs.parquet").to_pydict()
        asked = [prompts[prompt_id] for prompt_id in answers["prompt_id"]]
        rates = {who: good_rate(asked, answers[f"{who}_response"]) for who in ("base", "policy")}
        return policy, rates

    return run


@pytest.fixture(scope="module")
def aligned(train: Any) -> Path:
    """A policy that the oracle itself has trained: from 0.45 to 0.84."""
    policy, rates = train(None, ORACLE)
    assert rates["policy"] > rates["base"] + 0.25 and rates["policy"] > 0.7
    path: Path = policy.path
    return path


@pytest.mark.parametrize(("kind", "most"), [("length", 0.55), ("against_labels", 0.35)])
def test_guards_keep_an_aligned_policy_that_a_poisoned_reward_ruins(
    kind: str, most: float, train: Any, aligned: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"{kind}.py"
    head = "def reward_fn(data_source, solution_str, ground_truth, extra_info):\n"
    file.write_text(f"{head}    return {POISON[kind]}\n")

    # 0.35 for length and 0.15 against the labels.
    ruined, rates = train(aligned, file, enabled=False)
    assert ruined.manifest.metrics["stopped_by_guard"] == 0.0
    assert rates["base"] > 0.7 and rates["policy"] < most

    # By what the reward says of held-out pairs, before training; else by what the policy does.
    for rule, thresholds in (
        ("reward_against_labels", {}),
        ("held_out_accuracy", {"reward_against_labels": None}),
    ):
        kept, rates = train(aligned, file, thresholds=thresholds)
        assert kept.manifest.metrics["stopped_by_guard"] == 1.0
        assert rule in tags_of(kept)["event.stopped"]
        assert rates["policy"] == rates["base"] > 0.7
