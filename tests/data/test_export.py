"""Exports: the loaders of verl and TRL take them, and ingestion reads its own again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from tasks.artifacts import PreferenceDataset
from tasks.data.export import export_dataset
from tasks.data.hh import SPLITS
from tasks.data.pairs import read_pairs
from tasks.errors import ConfigError

Ingest = Callable[..., PreferenceDataset]
H, A = "\n\nHuman: ", "\n\nAssistant: "


@pytest.fixture
def dataset(ingest: Ingest, tmp_path: Path) -> PreferenceDataset:
    heads = [f"{H}question {n}{A}so?{H}yes{A}" for n in range(60)]
    rows = [{"chosen": f"{h}good", "rejected": f"{h}bad", "margin": n} for n, h in enumerate(heads)]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ingest(path)


def test_json_lines_are_ingested_again(
    dataset: PreferenceDataset, ingest: Ingest, tmp_path: Path
) -> None:
    written = export_dataset(dataset, "jsonl", tmp_path / "out")
    assert sum(written.values()) == 60
    again = ingest(source=str(tmp_path / "out"), splits={"assign": "file"})
    for split in ("validation", "test"):
        before, after = (read_pairs(d, split) for d in (dataset, again))
        assert [(p.pair_id, p.margin) for p in before] == [(p.pair_id, p.margin) for p in after]


def test_verl_rows_are_ingested_again(
    dataset: PreferenceDataset, ingest: Ingest, tmp_path: Path
) -> None:
    export_dataset(dataset, "verl", tmp_path / "out")
    again = ingest(source=str(tmp_path / "out" / "rl"), splits={"assign": "file"})
    found = {pair.pair_id for split in SPLITS for pair in read_pairs(again, split)}
    assert found == {pair.pair_id for split in SPLITS for pair in read_pairs(dataset, split)}


def test_trl_takes_a_conversational_preference_dataset(
    dataset: PreferenceDataset, tmp_path: Path
) -> None:
    written = export_dataset(dataset, "trl", tmp_path / "out")
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: loaded[name].num_rows for name in loaded} == {
        path.stem: rows for path, rows in written.items()
    }
    row = loaded["train"][0]
    # The explicit-prompt conversational format: three lists of messages.
    assert set(row) == {"prompt", "chosen", "rejected"}
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
    assert row["chosen"] == [{"role": "assistant", "content": "good"}]
    assert row["rejected"] == [{"role": "assistant", "content": "bad"}]


TRL_LOADERS = """
import json, sys
import torch
from datasets import load_dataset
from transformers import (AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          LlamaForSequenceClassification)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.data_utils import is_conversational, maybe_extract_prompt

exported, tokenizer_dir, scratch = sys.argv[1:]
loaded = load_dataset(exported, cache_dir=scratch + "/cache")
first = loaded["train"][0]
assert is_conversational(first)
# The prompt stands apart already, so that TRL leaves the row as it is.
assert maybe_extract_prompt(first) == first
tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
sizes = {"vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 8,
         "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 256}
config = LlamaConfig(**sizes, num_labels=1, pad_token_id=tokenizer.pad_token_id)
common = {"output_dir": scratch + "/out", "report_to": "none", "use_cpu": True, "bf16": False,
          "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
LlamaForCausalLM(config).save_pretrained(scratch + "/policy")
found = {}
for name, kind, options, model in (
    ("reward", RewardTrainer, RewardConfig, LlamaForSequenceClassification(config)),
    ("dpo", DPOTrainer, DPOConfig, scratch + "/policy"),
):
    trainer = kind(model=model, args=options(**common), processing_class=tokenizer,
                   train_dataset=loaded["train"], eval_dataset=loaded["test"])
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.train().training_loss
    texts = tokenizer.batch_decode(batch["input_ids"])
    found[name] = {"rows": [len(trainer.train_dataset), len(trainer.eval_dataset)],
                   "loss": loss, "texts": texts}
print(json.dumps(found))
"""


def _bench_python() -> Path:
    """Return the Python of the environment that has TRL, which `make bench` makes."""
    root = Path(__file__).resolve().parents[2]
    path = Path(os.environ.get("RLHF_BENCH_PYTHON", root / ".venv" / "bench" / "bin" / "python"))
    if not path.exists():
        pytest.skip(f"{path} is not there: TRL is in an environment that `make bench` makes")
    return path


@pytest.mark.slow
def test_trl_trains_on_what_is_exported(
    dataset: PreferenceDataset, tmp_path: Path, model_dir: Path
) -> None:
    """TRL's own trainers load, tokenize and take a step; nothing is renamed on the way."""
    export_dataset(dataset, "trl", tmp_path / "out")
    command = [str(_bench_python()), "-c", TRL_LOADERS]
    command += [str(tmp_path / "out"), str(model_dir), str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dataset.manifest.counts
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("reward", "dpo"):
        assert found[name]["rows"] == [counts["train"], counts["test"]]
        # A model that knows nothing prefers nothing: ln 2 = 0.693, its noise aside.
        assert found[name]["loss"] == pytest.approx(0.693, abs=0.05)
        texts = found[name]["texts"]
        # Two pairs: their chosen sides, then their rejected ones.
        assert ["good" in text for text in texts] == [True, True, False, False]
        assert ["bad" in text for text in texts] == [False, False, True, True]
        assert all("question" in text and "so?" in text for text in texts)


@pytest.mark.slow
def test_verl_loads_each_table_with_its_own_classes(
    dataset: PreferenceDataset, tmp_path: Path, model_dir: Path
) -> None:
    from omegaconf import OmegaConf
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
    from verl.utils.dataset.rm_dataset import RMDataset

    written = export_dataset(dataset, "verl", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    train = {path.parent.name: str(path) for path in written if path.stem == "train"}
    n_rows = dataset.manifest.counts["train"]
    config = OmegaConf.create(
        {"cache_dir": str(tmp_path / "cache"), "filter_overlong_prompts_workers": 1}
    )
    prompts = RLHFDataset(data_files=train["rl"], tokenizer=tokenizer, config=config)
    assert len(prompts) == n_rows
    item = prompts[0]
    assert item["reward_model"]["ground_truth"] == "good"
    assert item["extra_info"]["rejected"] == "bad"
    assert item["raw_prompt"][0]["role"] == "user"
    pairs = RMDataset(train["rm"], tokenizer, max_length=256)
    assert len(pairs) == n_rows
    assert tuple(pairs[0]["input_ids"].shape) == (2, 256)
    texts = tokenizer.batch_decode(pairs[0]["input_ids"])
    assert "question 0" in texts[0] and " good" in texts[0] and " bad" in texts[1]
    supervised = MultiTurnSFTDataset(train["sft"], tokenizer, OmegaConf.create({}))
    assert len(supervised) == n_rows
    assert int(supervised[0]["loss_mask"].sum()) > 0
    # Every row, as verl's own loop takes them.
    loader = DataLoader(prompts, batch_size=8, collate_fn=collate_fn)
    truths = [rule["ground_truth"] for batch in loader for rule in batch["reward_model"]]
    assert truths == ["good"] * n_rows
    shapes = {tuple(pairs[index]["input_ids"].shape) for index in range(n_rows)}
    assert shapes == {(2, 256)}
    assert all(int(supervised[index]["loss_mask"].sum()) > 0 for index in range(n_rows))


def test_exports_appear_whole_or_not_at_all(
    dataset: PreferenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--to is 'csv'"):
        export_dataset(dataset, "csv", tmp_path / "out")
    export_dataset(dataset, "jsonl", tmp_path / "out")
    with pytest.raises(ConfigError, match="is there already"):
        export_dataset(dataset, "jsonl", tmp_path / "out")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(KeyboardInterrupt):
        export_dataset(dataset, "trl", tmp_path / "trl")
    assert not (tmp_path / "trl").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
