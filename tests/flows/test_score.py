"""`rlhf score` on a small real reward model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from model_helpers import load_reward_model
from rich.console import Console

from flows.cli.score import Scored, overridden, print_scored, score_file
from flows.stages import RunOptions
from tasks.artifacts import PreferenceDataset, RewardModelCheckpoint, load_artifact
from tasks.config.loading import load_config
from tasks.config.shared import RuntimeConfig, TrackingConfig
from tasks.data.hh import Message
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer
from tasks.errors import ArtifactError, ConfigError, DataError, MissingInputError

ROOT = Path(__file__).resolve().parents[2]
CHAIN = load_config(ROOT / "tests" / "small_chain.yaml")

Score = Callable[..., Scored]


@pytest.fixture(scope="module")
def reward_model(preferences: str, base: str) -> RewardModelCheckpoint:
    from flows.reward_model import train_reward_model

    path = train_reward_model(CHAIN.reward_model, preferences, base, RunOptions(reuse=True))
    return load_artifact(Path(path), RewardModelCheckpoint)


@pytest.fixture
def score(reward_model: RewardModelCheckpoint) -> Score:
    """A function that scores a file with the small reward model."""

    def scored(path: Path, **changes: Any) -> Scored:
        ours = {"reward_model": str(reward_model.path), "output": None, "overrides": ()}
        return score_file(path, tracking=TrackingConfig(), **(ours | changes))

    return scored


@pytest.fixture(scope="module")
def pair_rows(preferences: str) -> list[dict[str, Any]]:
    """The demo's test pairs as rows with a prompt, in two subsets."""
    pairs = read_pairs(load_artifact(Path(preferences), PreferenceDataset), "test")
    return [
        {
            "id": index,
            "subset": ("odd" if index % 2 else "even"),
            "prompt": [{"role": turn.role, "content": turn.content} for turn in pair.prompt],
            "chosen": pair.chosen,
            "rejected": pair.rejected,
        }
        for index, pair in enumerate(pairs)
    ]


def _write(path: Path, rows: Sequence[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _plain_scores(model: RewardModelCheckpoint, row: dict[str, Any], names: Sequence[str]) -> Any:
    """Score the responses of a row with transformers, one by one."""
    renderer = Renderer.load(model.model_dir, CHAIN.reward_model.rendering)
    network = load_reward_model(model.model_dir)
    prompt = [Message(turn["role"], turn["content"]) for turn in row["prompt"]]
    found = []
    for name in names:
        response_ids, _ = renderer.response_ids(row[name])
        ids = torch.tensor([[*renderer.prompt_ids(prompt)[0], *response_ids]])
        with torch.no_grad():
            found.append(float(network(ids).logits[0, -1, 0]))
    return found


@pytest.mark.slow
def test_scores_of_pairs_are_the_models(
    score: Score,
    pair_rows: list[dict[str, Any]],
    reward_model: RewardModelCheckpoint,
    tmp_path: Path,
) -> None:
    broken = {**pair_rows[0], "rejected": ""}
    long = {**pair_rows[1], "chosen": "word " * 500}
    rows: list[Any] = [*pair_rows[:5], "not json", broken, long, *pair_rows[5:]]
    scored = score(_write(tmp_path / "pairs.jsonl", rows))
    assert scored.output == tmp_path / "pairs.scored.jsonl"
    found = _read(scored.output)
    assert len(found) == len(rows)
    for row, result in zip(rows, found, strict=True):
        if isinstance(row, dict):
            assert {name: result[name] for name in row} == row
    assert found[5]["score_error"].startswith("invalid_json")
    assert found[6]["score_error"] == "empty_response: the response of rejected is empty"
    assert found[7]["score_error"].startswith("too_long: A response has ")
    assert all(found[place]["margin"] is None for place in (5, 6, 7))

    for place in (0, 8, len(rows) - 1):
        result = found[place]
        raw = [result["chosen_score_raw"], result["rejected_score_raw"]]
        plain = _plain_scores(reward_model, rows[place], ("chosen", "rejected"))
        assert raw == pytest.approx(plain, abs=1e-4)
        assert result["margin"] == result["chosen_score"] - result["rejected_score"]
        assert result["score_error"] is None
    # Standardised with two numbers: the raw scores of all rows lie on one line.
    good = [row for row in found if row["score_error"] is None]
    first, second = good[0], good[1]
    slope = (first["chosen_score"] - second["chosen_score"]) / (
        first["chosen_score_raw"] - second["chosen_score_raw"]
    )
    for row in good:
        expected = first["chosen_score"] + slope * (
            row["rejected_score_raw"] - first["chosen_score_raw"]
        )
        assert row["rejected_score"] == pytest.approx(expected, abs=1e-3)

    tally = scored.tally
    assert (tally.rows, tally.scored) == (len(rows), len(pair_rows))
    assert tally.errors == {"invalid_json": 1, "empty_response": 1, "too_long": 1}
    overall = tally.accuracy()
    assert overall is not None
    assert overall.value == sum(row["margin"] > 0 for row in good) / len(good)
    # All of the test split fits, so this is the accuracy that training reported.
    assert overall.value == pytest.approx(reward_model.manifest.metrics["test_accuracy"])
    assert list(tally.subsets()) == ["even", "odd"]


@pytest.mark.slow
def test_parquet_of_responses(
    score: Score,
    pair_rows: list[dict[str, Any]],
    reward_model: RewardModelCheckpoint,
    tmp_path: Path,
) -> None:
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in pair_rows[:4]]
    first = score(_write(tmp_path / "in.jsonl", rows), output=tmp_path / "one.parquet")
    table = pq.read_table(first.output)
    plain = [_plain_scores(reward_model, row, ("response",))[0] for row in rows]
    assert table["score_raw"].to_pylist() == pytest.approx(plain, abs=1e-4)
    assert table["score_error"].to_pylist() == [None] * 4
    assert first.kind == "responses"

    again = table.select(["prompt", "response"])
    pq.write_table(again, tmp_path / "two.parquet")
    second = score(tmp_path / "two.parquet", output=tmp_path / "three.parquet")
    assert pq.read_table(second.output).equals(table)


@pytest.mark.slow
def test_real_file_is_scored_whole(score: Score, shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    scored = score(source, output=tmp_path / "out.jsonl")
    rows = _read(tmp_path / "out.jsonl")
    assert len(rows) == scored.tally.rows == 2312
    assert scored.tally.errors["prompt_mismatch"] == 5
    # Line 87 has an empty chosen response.
    assert rows[86]["score_error"].startswith("empty_response")
    assert scored.tally.scored + sum(scored.tally.errors.values()) == 2312
    assert scored.tally.shortened > 0
    for row in rows:
        assert (row["margin"] is None) == (row["score_error"] is not None)


@pytest.mark.slow
def test_what_is_printed(score: Score, pair_rows: list[dict[str, Any]], tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    rows = [*pair_rows[:3], {**pair_rows[0], "rejected": ""}]
    print_scored(console, score(_write(tmp_path / "pairs.jsonl", rows)))
    text = console.export_text()
    for part in ("4 rows, 3 scored", "empty_response 1", "even", "odd", "95 %", "all"):
        assert part in text


@pytest.mark.slow
def test_what_cannot_be_used_is_refused_before_scoring(
    score: Score,
    preferences: str,
    reward_model: RewardModelCheckpoint,
    pair_rows: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    pairs = _write(tmp_path / "pairs.jsonl", pair_rows[:2])
    with pytest.raises(ArtifactError, match="holds a preference_dataset"):
        score(pairs, reward_model=preferences)
    with pytest.raises(MissingInputError, match="leads to /nowhere"):
        score(pairs, reward_model="/nowhere")
    with pytest.raises(MissingInputError, match="No MLflow run"):
        score(pairs, reward_model="runs:/0123456789abcdef0123456789abcdef")
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1 has the fields \['text'\]"):
        score(_write(tmp_path / "bad.jsonl", [{"text": "x"}]))
    with pytest.raises(ConfigError, match=r"tokens_per_micro_batch 10 is less than"):
        score(pairs, overrides=["runtime.tokens_per_micro_batch=10"])
    with pytest.raises(ConfigError, match=r"rendering\.max_prompt_tokens=9 does not change"):
        score(pairs, overrides=["rendering.max_prompt_tokens=9"])
    torn = Path(shutil.copytree(reward_model.path, tmp_path / "torn"))
    (torn / "reward.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"reward\.json"):
        score(pairs, reward_model=str(torn))
    assert not (tmp_path / "pairs.scored.jsonl").exists()


@pytest.mark.slow
def test_command(
    home: Path,
    reward_model: RewardModelCheckpoint,
    pair_rows: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    pairs = _write(tmp_path / "pairs.jsonl", pair_rows)

    def rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
        return subprocess.run(
            [sys.executable, "-m", "flows.cli.main", "score", *arguments],
            env=clean | {"RLHF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    reference = ("--reward-model", f"runs:/{reward_model.manifest.mlflow_run_id}")
    done = rlhf(pairs.name, *reference, "--json", "-o", "runtime.cpu_threads=1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["scored"] == len(pair_rows) == len(_read(tmp_path / "pairs.scored.jsonl"))
    assert record["accuracy"]["value"] == pytest.approx(
        reward_model.manifest.metrics["test_accuracy"]
    )
    refused = rlhf(str(tmp_path / "none.jsonl"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: ") and "none.jsonl does not exist" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_overrides_of_the_runtime() -> None:
    recorded = RuntimeConfig(ranks=4, device="cuda", dtype="bf16")
    found = overridden(recorded, ["runtime.device=cpu", "runtime.ranks=1", "runtime.dtype=fp32"])
    assert found == RuntimeConfig(ranks=1, device="cpu", dtype="fp32")
    assert overridden(recorded, ()) == recorded
    for bad in ("device=cpu", "runtime.device", "runtime=cpu", "sft.epochs=1"):
        with pytest.raises(ConfigError, match="does not change the runtime"):
            overridden(recorded, [bad])
    with pytest.raises(ConfigError, match=r"rank=1 cannot be used: .*one of ranks, device"):
        overridden(recorded, ["runtime.rank=1"])
    with pytest.raises(ConfigError, match="it is not YAML"):
        overridden(recorded, ["runtime.ranks=[1"])
