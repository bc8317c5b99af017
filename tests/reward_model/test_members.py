"""Stage reward_model with several members, components and distrusted labels, on real components."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from model_helpers import load_reward_model
from safetensors.torch import load_file, save_file

from flows.reward_model import train_reward_model
from flows.stages import RunOptions
from tasks.algorithms.reward_losses import label_trust
from tasks.artifacts import PreferenceDataset, RewardModelCheckpoint, load_artifact
from tasks.config.loading import load_config, merge
from tasks.data.pairs import fold_of, read_pairs
from tasks.data.rendering import Renderer, render_pairs
from tasks.errors import DataError, ModelError
from tasks.models.loading import load_adapted_reward_model, load_causal_lm
from tasks.reward_model.config import RewardModelConfig
from tasks.runtime.rows import response_rows

pytestmark = pytest.mark.slow

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
_PLAIN = CHAIN.reward_model.model_dump(exclude={"components"})


def _config(**changes: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate(merge(_PLAIN, changes))


@pytest.fixture(scope="module")
def train(preferences: str, base: str) -> Any:
    """A function that runs the stage with some changes and returns the reward model."""

    def run(options: RunOptions = RunOptions(), **changes: Any) -> RewardModelCheckpoint:  # noqa: B008
        path = train_reward_model(_config(**changes), preferences, base, options)
        return load_artifact(Path(path), RewardModelCheckpoint)

    return run


@pytest.fixture(scope="module")
def ensemble(train: Any) -> RewardModelCheckpoint:
    """Two members that were trained on distrusted labels, beside a plain one."""
    noise = {"method": "relabel", "flip_rate": 0.2, "compare": True}
    found: RewardModelCheckpoint = train(RunOptions(reuse=True), members=2, noise=noise)
    return found


def _member_scores(directory: Path, preferences: str, split: str) -> torch.Tensor:
    return _scores(load_reward_model(directory), directory, preferences, split)


def _scores(model: Any, directory: Path, preferences: str, split: str) -> torch.Tensor:
    """Score all responses of a split with transformers, (2P,), chosen first."""
    dataset = load_artifact(Path(preferences), PreferenceDataset)
    renderer = Renderer.load(directory, CHAIN.reward_model.rendering)
    pairs, _ = render_pairs(read_pairs(dataset, split), renderer)
    rows = [torch.tensor([[*row.prompt_ids, *row.response_ids]]) for row in response_rows(pairs)]
    with torch.no_grad():
        return torch.stack([model(row).logits[0, -1, 0] for row in rows])


def _table(reward_model: RewardModelCheckpoint, split: str) -> dict[str, list[Any]]:
    table = pq.read_table(reward_model.path / "pair_scores.parquet")
    columns: dict[str, list[Any]] = table.filter(
        [value == split for value in table["split"].to_pylist()]
    ).to_pydict()
    return columns


def test_score_of_an_ensemble_is_the_mean_of_its_members(
    ensemble: RewardModelCheckpoint, preferences: str
) -> None:
    (component,) = ensemble.components.values()
    assert len(component.member_dirs) == 2
    train, test = (
        torch.stack([_member_scores(d, preferences, split) for d in component.member_dirs])
        for split in ("train", "test")
    )
    assert not torch.allclose(train[0], train[1], atol=1e-3)
    assert component.member_means == pytest.approx(train.mean(dim=1).tolist(), abs=1e-4)
    mean, std = float(train.mean(dim=0).mean()), float(train.mean(dim=0).std())
    assert component.std == pytest.approx(std, rel=1e-4)
    table = _table(ensemble, "test")
    standard = (test.mean(dim=0) - mean) / std
    assert table["chosen_score"] == pytest.approx(standard[0::2].tolist(), abs=1e-3)
    assert table["rejected_score"] == pytest.approx(standard[1::2].tolist(), abs=1e-3)
    margins = test[:, 0::2] - test[:, 1::2]
    assert table["disagreement"] == pytest.approx(margins.std(dim=0).tolist(), abs=1e-3)
    assert table["trust"] == [None] * len(table["trust"])
    right = float((margins.mean(dim=0) > 0).float().mean())
    assert ensemble.manifest.metrics["test_accuracy"] == pytest.approx(right, abs=1e-6)
    alone = float((margins[0] > 0).float().mean())
    metrics = ensemble.manifest.metrics
    assert metrics["preference.first_member_test_accuracy"] == pytest.approx(alone, abs=1e-6)
    assert 0.0 <= metrics["preference.plain_test_accuracy"] <= 1.0


def test_trust_comes_from_members_that_did_not_see_the_pair(
    ensemble: RewardModelCheckpoint, preferences: str, home: Path
) -> None:
    table = _table(ensemble, "train")
    margins = torch.tensor(table["held_out_margin"])
    expected = label_trust(margins, flip_rate=0.2)
    assert table["trust"] == pytest.approx(expected.tolist(), abs=1e-5)
    share = float((margins < 0).float().mean())
    assert ensemble.manifest.metrics["preference.contradicted_share"] == pytest.approx(share)
    # Pairs of a prompt share a fold, so the member that judges a pair saw nothing of its prompt.
    dataset = load_artifact(Path(preferences), PreferenceDataset)
    folds: dict[int, int] = {0: 0, 1: 0}
    for pair in read_pairs(dataset, "train"):
        folds[fold_of(pair.prompt_id, 2)] += 1
    assert min(folds.values()) > 0


@pytest.mark.parametrize("method", ["downweight", "none"])
def test_other_treatments_of_labels(train: Any, method: str) -> None:
    found = train(noise={"method": method}, loss={"margin_scale": 0.5})
    metrics = found.manifest.metrics
    assert ("preference.contradicted_share" in metrics) == (method != "none")
    assert all(map(math.isfinite, metrics.values()))


def test_components_are_models_of_their_own(train: Any, preferences: str) -> None:
    dataset = load_artifact(Path(preferences), PreferenceDataset)
    (subset,) = {pair.subset for pair in read_pairs(dataset, "train")}
    found = train(components={"helpfulness": {}, "harmlessness": {"subsets": [subset]}})
    assert list(found.components) == ["helpfulness", "harmlessness"]
    # Both learn from the same pairs with the same seed here, so they are the same model.
    one, other = found.components.values()
    assert one.member_means == other.member_means
    assert set(pq.read_table(found.path / "pair_scores.parquet")["component"].to_pylist()) == {
        "helpfulness",
        "harmlessness",
    }
    for name in ("report", "report/helpfulness", "report/harmlessness"):
        assert (found.path / name / "report.json").is_file()
    accuracy = found.manifest.metrics["helpfulness.test_accuracy"]
    assert accuracy == found.manifest.metrics["test_accuracy"]


def test_component_without_pairs_is_named(train: Any, home: Path) -> None:
    before = sorted((home / "models" / "reward_model").glob("*"))
    with pytest.raises(DataError, match=r"'kindness' has no pair in the \w+ split.*'kind-base'"):
        train(components={"kindness": {"subsets": ["kind-base"]}})
    assert sorted((home / "models" / "reward_model").glob("*")) == before


def test_training_stops_early_on_the_held_out_loss(train: Any) -> None:
    # This learning rate makes the held-out loss worse from the first look on.
    found = train(
        max_steps=40,
        optimizer={"learning_rate": 0.5, "schedule": "constant"},
        held_out={"evaluate_every_steps": 2, "stop_after": 2},
    )
    selected = found.manifest.metrics["preference.0.selected_step"]
    assert selected % 2 == 0
    events = _events(found)
    stops = [message for name, message in events if name == "stopped_early"]
    assert stops == [f"preference.0 after step {int(selected) + 4} of 40"]


def _events(found: RewardModelCheckpoint) -> list[tuple[str, str]]:
    import json

    from mlflow import MlflowClient

    from tasks.config.shared import TrackingConfig
    from tasks.tracking.mlflow import connect
    from tasks.workspace import Workspace

    uri = connect(TrackingConfig(), Workspace.from_environment()).tracking_uri
    run_id = found.manifest.mlflow_run_id
    assert run_id is not None
    path = MlflowClient(uri).download_artifacts(run_id, "events.jsonl")
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(record["name"], record["message"]) for record in records]


def test_adapter_keeps_its_head_and_equals_the_merged_model(
    train: Any, preferences: str, base: str
) -> None:
    found = train(lora={"rank": 4, "alpha": 8}, max_steps=12)
    adapter = found.path / "adapters" / "preference.0"
    (component,) = found.components.values()
    weights = load_file(adapter / "adapter_model.safetensors")
    heads = [name for name in weights if "score" in name]
    assert sorted(name.rsplit(".", 1)[1] for name in heads) == ["bias", "weight"]
    assert not any("lora" in name for name in heads)
    adapted = load_adapted_reward_model(Path(base) / "model", adapter)
    scores = _member_scores(component.member_dirs[0], preferences, "test")
    again = _scores(adapted, found.model_dir, preferences, "test")
    torch.testing.assert_close(again, scores, atol=1e-4, rtol=0)
    # The backbone under the adapter is the base's own, and what was trained separates the pairs.
    assert float(scores.std()) > 0
    table = _table(found, "test")
    standard = (scores - component.mean) / component.std
    assert table["chosen_score"] == pytest.approx(standard[0::2].tolist(), abs=1e-3)


def test_adapter_without_its_head_is_refused(
    train: Any, preferences: str, base: str, tmp_path: Path
) -> None:
    found = train(RunOptions(reuse=True), lora={"rank": 4, "alpha": 8}, max_steps=12)
    adapter = Path(shutil.copytree(found.path / "adapters" / "preference.0", tmp_path / "headless"))
    file = adapter / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "score" not in k}, file)
    with pytest.raises(ModelError, match=r"does not fit on .*score"):
        load_adapted_reward_model(Path(base) / "model", adapter)


def test_head_on_a_frozen_backbone(train: Any, preferences: str, base: str) -> None:
    found = train(
        freeze_backbone=True,
        max_steps=100,
        optimizer={"learning_rate": 0.05},
        held_out={"select_best": False, "evaluate_every_steps": 50},
    )
    before = load_causal_lm(Path(base) / "model").state_dict()
    after = load_reward_model(found.model_dir).state_dict()
    for name, value in before.items():
        if name != "lm_head.weight":
            assert torch.equal(after[name], value)
    # What was trained on kept states scores whole rows the same way.
    table = _table(found, "train")
    (component,) = found.components.values()
    scores = _member_scores(found.model_dir, preferences, "train")
    standard = (scores - component.mean) / component.std
    assert table["chosen_score"] == pytest.approx(standard[0::2].tolist(), abs=1e-3)
    right = float((scores[0::2] > scores[1::2]).float().mean())
    assert right > 0.6  # of 124 training pairs; a random head would be at 0.5 +- 0.045


def test_states_are_those_that_scores_are_made_of(preferences: str, base: str) -> None:
    from tasks.runtime.rows import RoleSpec
    from tasks.runtime.session import open_session

    dataset = load_artifact(Path(preferences), PreferenceDataset)
    renderer = Renderer.load(Path(base) / "model", CHAIN.reward_model.rendering)
    pairs, _ = render_pairs(read_pairs(dataset, "test"), renderer)
    rows = response_rows(pairs)
    model = load_causal_lm(Path(base) / "model").model
    with torch.no_grad():
        expected = torch.stack(
            [
                model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).last_hidden_state[0, -1]
                for row in rows
            ]
        )
    for changes in ({}, {"share_prompts": False}, {"remove_padding": True}):
        runtime = CHAIN.reward_model.runtime.model_copy(update=changes)
        session = open_session(runtime)
        session.load(RoleSpec("states", "value_model", str(Path(base) / "model")))
        found = session.last_states("states", rows)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        # Values alone are still what is asked for elsewhere.
        assert session.scores("states", rows).shape == (len(rows),)
