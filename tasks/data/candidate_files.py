"""Sampled responses on disk: one Parquet file per chunk of prompts, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from tasks.data.keyed_parquet import read_keyed, write_keyed

_STATE_FIELD = b"rlhf.state"


@dataclass(frozen=True)
class CandidateChunk:
    """Candidate responses of some prompts.

    Args:
        prompts: K indices of prompts.
        response_ids: K lists of token ids, as generated.
        texts: K texts, decoded.
        logprobs: K fp32 tensors of shape (T_i,), of the distribution that was sampled from.
        counts: what was generated and what was dropped, by reason.
        temperature: that the chunk was sampled at.
        kl: per token, of that distribution from the model's own.
    """

    prompts: Sequence[int]
    response_ids: Sequence[Sequence[int]]
    texts: Sequence[str]
    logprobs: Sequence[Tensor]
    counts: Mapping[str, int]
    temperature: float
    kl: float


def write_chunk(path: Path, chunk: CandidateChunk, key: str) -> None:
    """Write a chunk; the file appears only when complete.

    Args:
        path: final path.
        chunk: what to write.
        key: identity of everything that the responses depend on; compared when they are read.
    """
    state = {"counts": dict(chunk.counts), "temperature": chunk.temperature, "kl": chunk.kl}
    table = pa.table(
        {
            "prompt": pa.array(chunk.prompts, pa.int32()),
            "response_ids": pa.array(
                [list(ids) for ids in chunk.response_ids], pa.list_(pa.int32())
            ),
            "text": pa.array(chunk.texts, pa.string()),
            "logprobs": pa.array(
                [values.tolist() for values in chunk.logprobs], pa.list_(pa.float32())
            ),
        }
    )
    write_keyed(path, table, key, {_STATE_FIELD: json.dumps(state).encode()})


def read_chunk(path: Path, key: str) -> CandidateChunk:
    """Read a chunk that `write_chunk` wrote.

    Raises:
        ArtifactError: the file is torn, or was made with another policy, dataset or setting.
    """
    table, metadata = read_keyed(path, key)
    return CandidateChunk(
        table["prompt"].to_pylist(),
        table["response_ids"].to_pylist(),
        table["text"].to_pylist(),
        [torch.tensor(values) for values in table["logprobs"].to_pylist()],
        **json.loads(metadata[_STATE_FIELD]),
    )
