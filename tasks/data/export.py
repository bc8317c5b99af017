"""Writes an ingested dataset in the formats of verl, of TRL, and as JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.artifacts import PreferenceDataset, appearing_directory
from tasks.data.hh import SPLITS
from tasks.data.schemas import PAIR_SCHEMA, open_parquet
from tasks.errors import ConfigError

FORMATS: Final = ("verl", "trl", "jsonl")
_SPEAKERS: Final = {"user": "Human", "assistant": "Assistant", "system": "System"}
_MESSAGES: Final = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_NUMBERS: Final = ("margin", "chosen_logprob", "rejected_logprob")

Row = dict[str, Any]
Make = Callable[[Row], Row]

_TRL: Final = pa.schema([("prompt", _MESSAGES), ("chosen", _MESSAGES), ("rejected", _MESSAGES)])
_VERL_RL: Final = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("split", pa.string()),
                    ("pair_id", pa.string()),
                    ("rejected", pa.string()),
                ]
            ),
        ),
    ]
)
_VERL_RM: Final = pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected")])
_VERL_SFT: Final = pa.schema([("messages", _MESSAGES)])


def _answer(text: str) -> list[Row]:
    return [{"role": "assistant", "content": text}]


def _as_trl(row: Row) -> Row:
    chosen, rejected = _answer(row["chosen"]), _answer(row["rejected"])
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def _as_verl_rl(row: Row) -> Row:
    return {
        "data_source": row["subset"],
        "prompt": row["prompt"],
        "ability": "preference",
        "reward_model": {"style": "preference", "ground_truth": row["chosen"]},
        "extra_info": {
            "index": row["row_number"],
            "split": row["split"],
            "pair_id": row["pair_id"],
            "rejected": row["rejected"],
        },
    }


def _as_verl_rm(row: Row) -> Row:
    turns = [f"\n\n{_SPEAKERS[turn['role']]}: {turn['content']}" for turn in row["prompt"]]
    return {
        "prompt": "".join(turns) + "\n\nAssistant:",
        "chosen": f" {row['chosen']}",
        "rejected": f" {row['rejected']}",
    }


def _as_verl_sft(row: Row) -> Row:
    return {"messages": row["prompt"] + _answer(row["chosen"])}


def _as_json(row: Row) -> Row:
    names = ("prompt", "chosen", "rejected", "subset", "pair_id")
    scores = {f"score_{side}": row[f"{side}_score"] for side in ("chosen", "rejected")}
    numbers = scores | {name: row[name] for name in _NUMBERS}
    kept = {name: value for name, value in numbers.items() if value is not None}
    return {name: row[name] for name in names} | kept


_TABLES: Final[Mapping[str, Mapping[str, tuple[pa.Schema, Make]]]] = {
    "trl": {"": (_TRL, _as_trl)},
    "verl": {
        "rl": (_VERL_RL, _as_verl_rl),
        "rm": (_VERL_RM, _as_verl_rm),
        "sft": (_VERL_SFT, _as_verl_sft),
    },
}


def export_dataset(dataset: PreferenceDataset, to: str, output: Path) -> dict[Path, int]:
    """Write all splits of a dataset; the directory appears whole or not at all.

    - ``trl``: ``{split}.parquet`` with prompt, chosen and rejected as lists of messages.
    - ``verl``: ``rl/`` for ``RLHFDataset``, ``rm/`` for ``RMDataset`` (as HH transcripts) and
      ``sft/`` for ``MultiTurnSFTDataset``.
    - ``jsonl``: ``{split}.jsonl``, which ingestion reads again.

    Returns:
        Rows by file.

    Raises:
        ConfigError: no such format, or the directory is there already.
        ArtifactError: a file of the dataset is torn.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to is {to!r}", f"one of {', '.join(FORMATS)}", "name one of them")
    target = output.expanduser().absolute()
    if target.exists():
        raise ConfigError(
            f"{target} is there already", "a new directory", "remove it, or give another --output"
        )
    with appearing_directory(target) as temporary:
        rows = {
            path: n for split in SPLITS for path, n in _write(dataset, to, split, temporary).items()
        }
    return {target / path.relative_to(temporary): n for path, n in rows.items()}


def _batches(dataset: PreferenceDataset, split: str) -> Iterator[list[Row]]:
    columns = [name for name in PAIR_SCHEMA.names if name not in ("flags", "group_id")]
    with open_parquet(dataset.split_path(split), PAIR_SCHEMA) as file:
        for batch in file.iter_batches(2048, columns=columns):
            yield batch.to_pylist()


def _write(dataset: PreferenceDataset, to: str, split: str, directory: Path) -> dict[Path, int]:
    if to == "jsonl":
        path = directory / f"{split}.jsonl"
        return {path: _write_lines(path, _batches(dataset, split))}
    with ExitStack() as stack:
        writers = []
        for folder, (schema, make) in _TABLES[to].items():
            path = directory / folder / f"{split}.parquet"
            path.parent.mkdir(exist_ok=True)
            writer = stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
            writers.append((path, writer, make))
        n_rows = 0
        for rows in _batches(dataset, split):
            n_rows += len(rows)
            for _, writer, make in writers:
                _write_rows(writer, [make(row) for row in rows])
        return {path: n_rows for path, _, _ in writers}


def _write_rows(writer: pq.ParquetWriter, rows: Sequence[Row]) -> None:
    writer.write_table(pa.Table.from_pylist(list(rows), schema=writer.schema))


def _write_lines(path: Path, batches: Iterator[list[Row]]) -> int:
    n_rows = 0
    with path.open("w", encoding="utf-8", newline="\n") as handle:
        for rows in batches:
            n_rows += len(rows)
            handle.writelines(json.dumps(_as_json(row), ensure_ascii=False) + "\n" for row in rows)
    return n_rows
