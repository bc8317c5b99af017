"""Stage offline_ppo on real components: each way to get rewards, advantages and weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import response_logprobs
from policy_runs import tags_of

from flows.ingest import ingest
from flows.offline_ppo import train_offline_ppo
from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    load_artifact,
)
from tasks.config.loading import load_config, merge
from tasks.config.shared import TrackingConfig
from tasks.data.columns import TokenColumns, read_token_columns
from tasks.data.hh import SPLITS, Pair
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer
from tasks.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    RendererMismatchError,
    RewardError,
    TrainingError,
)
from tasks.models.loading import load_causal_lm
from tasks.offline_ppo.config import GUARD_METRICS, OfflinePPOConfig
from tasks.tracking.mlflow import connect
from tasks.workspace import Workspace

pytestmark = pytest.mark.slow

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
REUSE = RunOptions(reuse=True)
# Reward components are a free table: merged, new ones would come on top of the default one.
_PLAIN = CHAIN.offline_ppo.model_dump(exclude={"reward": {"components"}})


@pytest.fixture(scope="module")
def reward_model(preferences: str, base: str) -> str:
    return train_reward_model(CHAIN.reward_model, preferences, base, REUSE)


@pytest.fixture(scope="module")
def train(preferences: str, reward_model: str, base: str) -> Any:
    """A function that runs the stage with some changes and returns the policy."""

    def run(options: RunOptions = RunOptions(), **changes: Any) -> PolicyCheckpoint:  # noqa: B008
        cfg = _config(**changes)
        path = train_offline_ppo(cfg, preferences, reward_model, base, options)
        return load_artifact(Path(path), PolicyCheckpoint)

    return run


@pytest.fixture(scope="module")
def policy(train: Any) -> PolicyCheckpoint:
    """The policy of the unchanged config."""
    found: PolicyCheckpoint = train(REUSE)
    return found


def _config(**changes: Any) -> OfflinePPOConfig:
    return OfflinePPOConfig.model_validate(merge(_PLAIN, changes))


def _columns(policy: PolicyCheckpoint) -> TokenColumns:
    return read_token_columns(policy.path / "trajectories.parquet", policy.fingerprint)


def _rewards(columns: TokenColumns) -> torch.Tensor:
    """Return the reward of each response; it is the same at all its tokens."""
    for row in columns.floats["reward"]:
        assert bool((row == row[0]).all())
    return torch.stack([row[0] for row in columns.floats["reward"]])


def _history(policy: PolicyCheckpoint, metric: str) -> list[float]:
    from mlflow import MlflowClient

    run_id = policy.manifest.mlflow_run_id
    assert run_id is not None
    uri = connect(TrackingConfig(), Workspace.from_environment()).tracking_uri
    points = MlflowClient(uri).get_metric_history(run_id, metric)
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def _is_finite(policy: PolicyCheckpoint) -> bool:
    model = load_causal_lm(policy.model_dir)
    return all(map(math.isfinite, policy.manifest.metrics.values())) and all(
        bool(torch.isfinite(parameter).all()) for parameter in model.parameters()
    )


def test_policy_moved_and_says_how_far(policy: PolicyCheckpoint, base: str) -> None:
    columns = _columns(policy)
    before, after = (
        load_causal_lm(Path(path)) for path in (Path(base) / "model", policy.model_dir)
    )
    drift: dict[str, list[float]] = {"chosen": [], "rejected": []}
    rows = zip(columns.prompt_ids, columns.response_ids, strict=True)
    for index, (prompt, response) in enumerate(rows):
        old, new = (response_logprobs(model, prompt, response) for model in (before, after))
        torch.testing.assert_close(columns.floats["ref_logprobs"][index], old, atol=1e-4, rtol=0)
        drift["rejected" if index % 2 else "chosen"].append(float((new - old).sum()))
    for side, moved in drift.items():
        reported = policy.manifest.metrics[f"{side}_logprob_drift"]
        assert reported == pytest.approx(sum(moved) / len(moved), abs=1e-3)
        assert reported != 0.0
    assert _is_finite(policy)


def test_rewards_are_standardised_scores(
    policy: PolicyCheckpoint, preferences: str, reward_model: str
) -> None:
    rewards = _rewards(_columns(policy))
    # The statistics are those of the same responses, so only the clip can move mean and deviation.
    assert float(rewards.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(rewards.std()) == pytest.approx(1.0, abs=0.05)
    assert float(rewards.abs().max()) <= 5.0
    agrees = float((rewards[0::2] > rewards[1::2]).float().mean())
    assert policy.manifest.metrics["train_reward_agrees_with_label"] == pytest.approx(agrees)
    pairs = read_pairs(load_artifact(Path(preferences), PreferenceDataset), "train")
    assert len(rewards) == 2 * policy.manifest.counts["train_pairs"] <= 2 * len(pairs)


def test_reference_behaviour_is_the_base_itself(policy: PolicyCheckpoint) -> None:
    columns = _columns(policy)
    for mu, ref in zip(
        columns.floats["behavior_logprobs"], columns.floats["ref_logprobs"], strict=True
    ):
        assert torch.equal(mu, ref)
    # The first window's proximal policy is the base, so its weights are 1, or as rounding has it.
    assert _history(policy, "ess_share")[0] == pytest.approx(1.0, abs=1e-4)
    assert len(_history(policy, "loss")) == 4


def test_same_config_gives_the_same_bytes(policy: PolicyCheckpoint, train: Any) -> None:
    again = train()
    assert again.path != policy.path
    for name in ("model/model.safetensors", "trajectories.parquet"):
        assert (again.path / name).read_bytes() == (policy.path / name).read_bytes()


def test_cloned_behaviour_with_leave_one_out_advantages(
    train: Any, policy: PolicyCheckpoint
) -> None:
    cloned = train(
        behavior={
            "policy": "cloned",
            "clone_epochs": 2.0,
            "clone_optimizer": {"learning_rate": 5e-3},
        },
        advantage={"estimator": "rloo", "whiten": True},
        importance={"level": "token"},
    )
    mine, other = _columns(cloned), _columns(policy)
    pairs = list(zip(mine.floats["behavior_logprobs"], mine.floats["ref_logprobs"], strict=True))
    assert all(not torch.equal(mu, ref) for mu, ref in pairs)
    # What each fold's clone says of responses it never saw is still better than a guess.
    mean = float(torch.cat([mu for mu, _ in pairs]).mean())
    assert -math.log(400) < mean < 0.0
    assert torch.equal(
        torch.cat(mine.floats["ref_logprobs"]), torch.cat(other.floats["ref_logprobs"])
    )
    assert 0.0 < _history(cloned, "ess_share")[0] < 1.0
    assert _is_finite(cloned)


def _transcript(pair: Pair, response: str) -> str:
    names = {"user": "Human", "assistant": "Assistant"}
    turns = [f"\n\n{names[turn.role]}: {turn.content}" for turn in pair.prompt]
    return "".join(turns) + f"\n\nAssistant: {response}"


def test_logged_behaviour_is_what_the_source_says(
    preferences: str, reward_model: str, base: str, train: Any, tmp_path: Path
) -> None:
    """A source that logs what the base says of its responses trains the policy that
    ``reference`` does."""
    model = load_causal_lm(Path(base) / "model")
    renderer = Renderer.load(Path(base) / "model", CHAIN.offline_ppo.rendering)
    dataset = load_artifact(Path(preferences), PreferenceDataset)
    pairs = [pair for split in SPLITS for pair in read_pairs(dataset, split)]
    source = tmp_path / "logged.jsonl"
    with source.open("w") as file:
        for pair in pairs:
            prompt = renderer.prompt_ids(pair.prompt)[0]
            row: dict[str, Any] = {}
            for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                logprobs = response_logprobs(model, prompt, renderer.response_ids(text)[0])
                row[side] = _transcript(pair, text)
                row[f"{side}_logprob"] = float(logprobs.sum())
            file.write(json.dumps(row) + "\n")
    logged = ingest(CHAIN.ingest.model_copy(update={"source": str(source)}))

    def run(policy: str) -> PolicyCheckpoint:
        cfg = _config(behavior={"policy": policy})
        path = train_offline_ppo(cfg, logged, reward_model, base)
        return load_artifact(Path(path), PolicyCheckpoint)

    by_log, by_reference = run("logged"), run("reference")
    for mine, ref in zip(
        _columns(by_log).floats["behavior_logprobs"],
        _columns(by_reference).floats["behavior_logprobs"],
        strict=True,
    ):
        assert float(mine.sum()) == pytest.approx(float(ref.sum()), abs=1e-3)
        assert len(set(mine.tolist())) == 1
    for metric in ("loss", "weight_mean", "ess_share"):
        assert _history(by_log, metric) == pytest.approx(_history(by_reference, metric), abs=1e-4)
    # Without logged numbers the same setting is refused, with the line of the first pair.
    with pytest.raises(DataError, match=r"no logged log-probabilities.*line \d+"):
        train(behavior={"policy": "logged"})


def test_weights_are_searched_on_the_validation_split(
    train: Any, preferences: str, tmp_path: Path
) -> None:
    file = tmp_path / "noise.py"
    file.write_text(
        "import hashlib\n"
        "def reward_fn(data_source, solution_str, ground_truth, extra_info):\n"
        "    return hashlib.sha256(solution_str.encode()).digest()[0] / 64.0\n"
    )
    policy = train(
        reward={
            "components": {"reward_model": 1.0, "function": 1.0},
            "function_path": str(file),
            "search": {"resolution": 4},
        }
    )
    metrics = policy.manifest.metrics
    weights = {name: metrics[f"weight_{name}"] for name in ("reward_model", "function")}
    assert sum(weights.values()) == pytest.approx(1.0)
    columns = _columns(policy).floats
    total = sum(
        weight * torch.stack([row[0] for row in columns[f"component.{name}"]])
        for name, weight in weights.items()
    )
    torch.testing.assert_close(_rewards(_columns(policy)), total)
    trials = _trials(policy)
    assert len(trials) == 5
    assert {trial["reward_model"] for trial in trials} == {"0", "0.25", "0.5", "0.75", "1"}
    best = min(trials, key=lambda trial: trial["validation_log_loss"])
    assert float(best["reward_model"]) == weights["reward_model"]
    assert best["validation_log_loss"] == metrics["search_validation_log_loss"]
    assert best["validation_accuracy"] == metrics["search_validation_accuracy"]


def _trials(policy: PolicyCheckpoint) -> list[dict[str, Any]]:
    """Return parameters and metrics of the runs nested under a policy's run."""
    from mlflow import MlflowClient

    tracker = connect(TrackingConfig(), Workspace.from_environment())
    parent = f"tags.`mlflow.parentRunId` = '{policy.manifest.mlflow_run_id}'"
    runs = MlflowClient(tracker.tracking_uri).search_runs([tracker.experiment_id], parent)
    assert all(run.info.status == "FINISHED" for run in runs)
    return [run.data.params | run.data.metrics for run in runs]


def test_component_that_the_reward_model_lacks_is_named(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward_model\.kindness.*has \['preference'\]"):
        train(reward={"components": {"reward_model.kindness": 1.0}})


def test_critic_that_explains_nothing_is_refused_unless_forced(train: Any) -> None:
    # This learning rate throws the values far off.
    wild = {"warmup_steps": 2, "optimizer": {"learning_rate": 1.0, "schedule": "constant"}}
    advantage = {"estimator": "gae", "gae_lambda": "adaptive"}
    with pytest.raises(TrainingError, match="critic explains -"):
        train(advantage=advantage, critic=wild)
    forced = train(advantage=advantage, critic={**wild, "force": True})
    assert _history(forced, "critic_explained_variance")[0] <= 0.0
    assert len(_history(forced, "critic_warmup/value_loss")) == 2
    assert _is_finite(forced)


def test_labels_as_rewards(train: Any) -> None:
    policy = train(
        reward={"components": {"labels": 1.0}, "kl_coef": 0.05, "kl_target": 0.01},
        advantage={"estimator": "reinforce_pp"},
        loss={"aggregation": "seq-mean-token-mean"},
    )
    rewards = _rewards(_columns(policy))
    assert rewards.tolist() == [1.0, -1.0] * (len(rewards) // 2)
    assert policy.manifest.metrics["train_reward_agrees_with_label"] == 1.0
    # The controller adapts the coefficient from step to step.
    assert len(set(_history(policy, "kl_coef"))) > 1
    assert _is_finite(policy)


def test_function_as_reward(train: Any, preferences: str, tmp_path: Path) -> None:
    file = tmp_path / "brevity.py"
    file.write_text(
        "def brevity(data_source, solution_str, ground_truth, extra_info):\n"
        "    return -float(len(solution_str))\n"
    )
    policy = train(
        reward={
            "components": {"function": 0.5},
            "function_path": str(file),
            "function_name": "brevity",
        },
        loss={"entropy_coef": 0.01},
    )
    assert policy.manifest.counts["train_pairs"] == len(_rewards(_columns(policy))) // 2
    pairs = read_pairs(load_artifact(Path(preferences), PreferenceDataset), "train")
    expected = [-0.5 * len(text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    assert _rewards(_columns(policy)).tolist() == expected
    assert min(_history(policy, "entropy")) > 0.0


def test_snapshots_move_as_often_as_asked(train: Any) -> None:
    fast = {"optimizer": {"learning_rate": 5e-3, "schedule": "constant"}}
    every_step = _history(train(reanchor_steps=1, **fast), "ratio")
    never = _history(train(reanchor_steps=0, **fast), "ratio")
    assert every_step == pytest.approx([1.0] * 4, abs=1e-4)
    assert never[0] == pytest.approx(1.0, abs=1e-4)
    assert all(abs(ratio - 1.0) > 1e-3 for ratio in never[1:])


def test_unusable_function_is_told_before_training(train: Any, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def reward_fn(answer):\n    return 1.0\n")
    # Other tests leave checkpoints of runs that they end.
    before = set((home / "checkpoints" / "offline_ppo").glob("*/step-*"))
    for path, error in ((file, RewardError), (tmp_path / "none.py", MissingInputError)):
        with pytest.raises(error, match=path.name):
            train(reward={"components": {"function": 1.0}, "function_path": str(path)})
    assert set((home / "checkpoints" / "offline_ppo").glob("*/step-*")) == before


def test_reward_model_of_another_renderer_is_refused(
    train: Any, preferences: str, base: str, home: Path
) -> None:
    before = sorted((home / "models" / "offline_ppo").glob("*"))
    with pytest.raises(RendererMismatchError, match="was made with renderer"):
        train(rendering={"max_response_tokens": 63})
    assert sorted((home / "models" / "offline_ppo").glob("*")) == before


def test_equal_rewards_are_refused(train: Any, reward_model: str, tmp_path: Path) -> None:
    components = load_artifact(Path(reward_model), RewardModelCheckpoint).components
    assert all(component.std > 0 for component in components.values())
    file = tmp_path / "flat.py"
    file.write_text(
        "def reward_fn(data_source, solution_str, ground_truth, extra_info):\n    return 3\n"
    )
    with pytest.raises(RewardError, match="rewards are equal"):
        train(reward={"components": {"function": 1.0}, "function_path": str(file)})


def test_other_policy_losses_train_too(train: Any, policy: PolicyCheckpoint) -> None:
    seen = {(policy.model_dir / "model.safetensors").read_bytes()}
    for name in ("topr", "a_lol", "positives_only", "dpo"):
        found = train(policy_loss=name, loss={"kl_coef": 0.01 if name == "topr" else 0.0})
        assert _is_finite(found)
        seen.add((found.model_dir / "model.safetensors").read_bytes())
        # None of them has a snapshot, so none reports how far it is from one.
        assert _history(found, "ess_share") == []
        assert len(_history(found, "loss")) == 4
    assert len(seen) == 5


def test_candidates_filters_and_strata_together(train: Any, home: Path) -> None:
    changes: dict[str, Any] = {
        "sampler": {"stratify": True, "priority": "margin"},
        "filters": {
            "min_margin_quantile": 0.25,
            "sequence": {"mode": "adaptive", "target_keep_share": 0.9},
        },
        "candidates": {"per_prompt": 2, "max_new_tokens": 12, "temperature": 1.2, "top_p": 0.9},
        "reward": {"missing_end_penalty": 0.5, "center": "prompt"},
        "advantage": {"control_variate": {"kind": "leave_one_out"}},
        "guards": {"enabled": False},
    }
    policy = train(**changes)
    counts = policy.manifest.counts
    columns = _columns(policy)
    n_stored = 2 * (counts["train_pairs"] - counts["filtered_margin"])
    assert counts["filtered_margin"] == pytest.approx(counts["train_pairs"] / 4, abs=1)
    assert len(columns.prompt_ids) == n_stored + counts["candidates_kept"]
    assert counts["candidates_kept"] > 0
    # Of the sampling distribution, whose temperature and nucleus are not the base's.
    mu, ref = columns.floats["behavior_logprobs"], columns.floats["ref_logprobs"]
    assert all(torch.equal(a, b) for a, b in zip(mu[:n_stored], ref[:n_stored], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(mu[n_stored:], ref[n_stored:], strict=True))
    assert 0.0 <= _history(policy, "vetoed_share")[0] <= 0.1
    assert len(_history(policy, "variance_removed")) == 4
    again = train(**changes)
    for name in ("model/model.safetensors", "trajectories.parquet"):
        assert (again.path / name).read_bytes() == (policy.path / name).read_bytes()


def test_report_compares_with_the_base(policy: PolicyCheckpoint) -> None:
    report = json.loads((policy.path / "report" / "report.json").read_text())
    metrics = policy.manifest.metrics
    assert report["win_rate"]["value"] == metrics["held_out_win_rate"]
    low, high = metrics["held_out_win_rate_low"], metrics["held_out_win_rate_high"]
    assert low <= metrics["held_out_win_rate"] <= high
    assert metrics["held_out_win_rate_length_controlled"] >= 0.0
    assert metrics["held_out_kl_probe"] == report["kl_probe"]["k1"]["value"] != 0.0
    shares = [value for name, value in metrics.items() if name.startswith("time_share_")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    for name in ("overview.png", "samples.md", "held_out_pairs.parquet", "history.jsonl"):
        assert (policy.path / "report" / name).stat().st_size > 0


def test_without_held_out_prompts_nothing_is_probed(train: Any, policy: PolicyCheckpoint) -> None:
    silent = train(report={"prompts": 0}, guards={"enabled": False})
    assert "held_out_win_rate" not in silent.manifest.metrics
    assert not (silent.path / "report").exists()
    # Probes and reports look on; they change nothing.
    weights = [(p.model_dir / "model.safetensors").read_bytes() for p in (silent, policy)]
    assert weights[0] == weights[1]


def test_every_metric_that_rules_may_name_is_reported(train: Any) -> None:
    """A rule on a renamed metric would sleep."""
    policy = train(
        steps=8,
        advantage={"estimator": "gae"},
        critic={"force": True},
        loss={"entropy_coef": 0.01},
        guards={
            "rules": [
                {"name": f"r{place}", "when": f"{metric} > 1e9", "warn": True}
                for place, metric in enumerate(GUARD_METRICS)
            ]
        },
    )
    assert "event.guards_asleep" not in tags_of(policy)
    silent = train(policy_loss="topr")
    assert tags_of(silent)["event.guards_asleep"].startswith("effective_samples watches ess_share")
