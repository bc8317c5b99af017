"""TRL's RewardTrainer or DPOTrainer, as a process that trains one pass for each line it reads.

It runs in the benchmark's own virtual environment and imports nothing of this project.

    in   {"sampling": "default" | "group_by_length", "max_steps": n}
    out  {"seconds", "steps", "loss", "computed_tokens", "padded_tokens"}; before, {"trl": version}
    in   {"reference_pass": true}, DPOTrainer only
    out  {"seconds"}

The clock runs from the trainer's ``on_train_begin`` to ``on_train_end``: its loop with data
loading, collation, optimizer and logging, but without the set-up of `train`. The reference pass is
what ``precompute_ref_log_probs`` does in the trainer's constructor, from the data loader to the
column in the data set; it is left out there, so that it can be timed in turn.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Final, TextIO

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference as DPOCollator
from trl.trainer.reward_trainer import DataCollatorForPreference as RewardCollator

SAMPLINGS: Final = ("default", "group_by_length")
# transformers sorts within 50 batches, but within a quarter of a data set that is shorter than 200.
_WINDOW_BATCHES: Final = 50


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Times the loop."""

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.start


class _Counting:
    """Mixed into a collator: counts positions, and those of them that it fills with padding."""

    computed_tokens = padded_tokens = 0

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)  # type: ignore[misc]
        self.computed_tokens += batch["attention_mask"].numel()
        self.padded_tokens += int((batch["attention_mask"] == 0).sum())
        return batch


class _RewardCollator(_Counting, RewardCollator):  # type: ignore[misc]
    pass


class _DPOCollator(_Counting, DPOCollator):  # type: ignore[misc]
    pass


class _WideWindowSampler(LengthGroupedSampler):  # type: ignore[misc]
    """Sorts within the window that the whole data set would give, however few pairs are used."""

    def __iter__(self) -> Any:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, _WINDOW_BATCHES))


class _WideWindow:
    """Mixed into a trainer: groups by length in that window."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        if isinstance(sampler, LengthGroupedSampler):
            return _WideWindowSampler(sampler.batch_size, lengths=sampler.lengths)
        return sampler


class _RewardTrainer(_WideWindow, RewardTrainer):  # type: ignore[misc]
    pass


class _DPOTrainer(_WideWindow, DPOTrainer):  # type: ignore[misc]
    bare_dataset: Dataset | None = None

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        """The pairs are token ids already."""
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        if self.bare_dataset is not None:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        self.bare_dataset = dataset
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            dataset = dataset.add_column(column, [0.0] * len(dataset))
        return dataset

    def run_reference_pass(self) -> float:
        """Fill the reference columns and return the seconds that it took."""
        # Otherwise the second pass would be read from a file.
        self._precompute_model_hash = uuid.uuid4().hex
        batch_size = self.args.per_device_train_batch_size
        start = time.perf_counter()
        self.train_dataset = self._precompute_ref_logps(self.bare_dataset, "train", batch_size)
        return time.perf_counter() - start


def _settings(job: dict[str, Any], sampling: str, directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": job["dtype"] == "bf16",
        "per_device_train_batch_size": job["batch_pairs"],
        "num_train_epochs": 1,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_length": None,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "random" if sampling == "default" else sampling,
        "length_column_name": "length",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job["seed"],
    }


def _make_trainer(
    job: dict[str, Any], sampling: str, model: Any, pairs: Dataset, directory: str
) -> Any:
    settings = _settings(job, sampling, directory)
    tokenizer = AutoTokenizer.from_pretrained(job["model_dir"])
    arguments = {
        "model": model,
        "train_dataset": pairs,
        "processing_class": tokenizer,
        "callbacks": [_Clock()],
    }
    pad = tokenizer.pad_token_id
    if job["trainer"] == "dpo":
        config = DPOConfig(**settings, precompute_ref_log_probs=True)
        return _DPOTrainer(args=config, data_collator=_DPOCollator(pad), **arguments)
    collator = _RewardCollator(pad_token_id=pad)
    return _RewardTrainer(args=RewardConfig(**settings), data_collator=collator, **arguments)


def _clock_of(trainer: Any) -> _Clock:
    (clock,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, _Clock)]
    return clock


def _train(trainer: Any, max_steps: int) -> dict[str, Any]:
    trainer.args.max_steps = max_steps
    trainer.args.seed += 1  # otherwise every pass would shuffle alike
    collator = trainer.data_collator
    collator.computed_tokens = collator.padded_tokens = 0
    result = trainer.train()
    return {
        "seconds": _clock_of(trainer).seconds,
        "steps": result.global_step,
        "loss": result.training_loss,
        "computed_tokens": collator.computed_tokens,
        "padded_tokens": collator.padded_tokens,
    }


def _load_model(job: dict[str, Any]) -> Any:
    if job["trainer"] == "dpo":
        kind, arguments = transformers.AutoModelForCausalLM, {}
    else:
        kind, arguments = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    return kind.from_pretrained(job["model_dir"], dtype=torch.float32, **arguments)


def _answer(trainers: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    if "reference_pass" in request:
        first, *others = trainers.values()
        seconds = first.run_reference_pass()
        for other in others:
            other.train_dataset = first.train_dataset
        return {"seconds": seconds}
    return _train(trainers[request["sampling"]], request["max_steps"])


def _serve(job: dict[str, Any], answers: TextIO) -> None:
    model, pairs = _load_model(job), Dataset.from_list(job["pairs"])
    with tempfile.TemporaryDirectory() as directory:
        trainers = {name: _make_trainer(job, name, model, pairs, directory) for name in SAMPLINGS}
        print(json.dumps({"trl": trl.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            answer = _answer(trainers, json.loads(line))
            print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve the job in the file that the first argument names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    # The trainer prints its logs, which must not mix with the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(job, answers)


if __name__ == "__main__":
    main()
