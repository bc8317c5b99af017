"""Parquet files that say what they were computed from, and are whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tasks.artifacts import appearing
from tasks.data.schemas import make_schema, write_rows
from tasks.errors import ArtifactError

_KEY_FIELD: Final = b"rlhf.key"


def keyed_file(directory: Path, identity: Sequence[str]) -> tuple[Path, str]:
    """Return where the file is of which these fingerprints decide the content, and its key."""
    key = hashlib.sha256("|".join(identity).encode()).hexdigest()
    return directory / f"{key[:16]}.parquet", key


def hash_responses(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> str:
    """Return a hash of N prompts and their responses, both as token ids, in their order."""
    digest = hashlib.sha256()
    for prompt, response in zip(prompts, responses, strict=True):
        row = [len(prompt), len(response), *prompt, *response]
        digest.update(np.array(row, dtype=np.int64).tobytes())
    return digest.hexdigest()


def write_keyed(path: Path, table: pa.Table, key: str, metadata: Mapping[bytes, bytes]) -> None:
    """Write a table; the file gets its name only when it is complete and on the disk.

    Args:
        path: the file; its directory is made.
        key: identity of everything that the content depends on.
        metadata: further fields of the schema.
    """
    keyed = table.replace_schema_metadata({_KEY_FIELD: key.encode(), **metadata})
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as temporary:
        pq.write_table(keyed, temporary, compression="zstd")


def read_keyed(path: Path, key: str) -> tuple[pa.Table, Mapping[bytes, bytes]]:
    """Read what `write_keyed` wrote, and the fields of its schema.

    Raises:
        ArtifactError: the file is torn, or has another key.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(
            f"{path} is torn: {error}", "a complete Parquet file", f"remove {path}"
        ) from error
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    found = metadata.get(_KEY_FIELD, b"").decode()
    if found != key:
        raise ArtifactError(f"{path} belongs to {found or 'nothing known'}", key, f"remove {path}")
    return table, metadata


# Sampled responses on disk: one Parquet file per chunk of prompts, whole or not there.

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


# What a reward model says of each pair that it was given, as a Parquet table.

_ROWS_PER_GROUP: Final = 50_000

PAIR_SCORE_SCHEMA: Final = make_schema(
    "pair_scores",
    [
        ("pair_id", pa.string(), False),
        ("split", pa.string(), False),
        ("component", pa.string(), False),
        ("chosen_score", pa.float64(), False),
        ("rejected_score", pa.float64(), False),
        ("disagreement", pa.float64(), True),
        ("held_out_margin", pa.float64(), True),
        ("trust", pa.float64(), True),
    ],
)


@dataclass(frozen=True, slots=True)
class PairScore:
    """One pair and one component.

    Args:
        chosen_score, rejected_score: in standard deviations of the component's training scores.
        disagreement: standard deviation of the members' margins, raw; None for one member.
        held_out_margin: calibrated margin, in nats, of the member that did not see the pair; None
            where labels were taken as they are.
        trust: probability that the label is right; None likewise.
    """

    pair_id: str
    split: str
    component: str
    chosen_score: float
    rejected_score: float
    disagreement: float | None = None
    held_out_margin: float | None = None
    trust: float | None = None


def write_pair_scores(path: Path, scores: Iterable[PairScore]) -> None:
    """Write the table; it appears only when complete."""
    write_rows(path, map(asdict, scores), PAIR_SCORE_SCHEMA, _ROWS_PER_GROUP)


# Scores of responses, computed once and kept as Parquet columns.


def cached_scores(
    directory: Path, identity: Sequence[str], compute: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the scores of N responses from their Parquet columns, computing them once.

    Args:
        directory: of such files.
        identity: fingerprints of everything that the numbers depend on.
        compute: called when the file is not there; name to (K, N) fp32 scores by the K members of
            a component.

    Raises:
        ArtifactError: the file is torn.
    """
    file, key = keyed_file(directory, identity)
    if not file.exists():
        columns = {
            f"{name}.{member}": pa.array(scores.numpy(), pa.float32())
            for name, members in compute().items()
            for member, scores in enumerate(members.to(torch.float32))
        }
        write_keyed(file, pa.table(columns), key, {})
    table, _ = read_keyed(file, key)
    found: dict[str, list[Tensor]] = {}
    for column in table.column_names:
        values = torch.from_numpy(table[column].to_numpy().copy())
        found.setdefault(column.rpartition(".")[0], []).append(values)
    return {name: torch.stack(members) for name, members in found.items()}


# Numbers per response token, computed once and kept as Parquet columns.

# No column is a matrix, which the files have always said.
_NO_MATRICES: Final = {b"rlhf.matrices": b""}


@dataclass(frozen=True)
class TokenColumns:
    """Ragged columns of N responses.

    Args:
        prompt_ids: N lists of token ids.
        response_ids: N lists of token ids, T_i each.
        floats: name to N fp32 tensors of shape (T_i,).
    """

    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    floats: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def write_token_columns(path: Path, columns: TokenColumns, key: str) -> None:
    """Write the columns; the file appears only when complete.

    Args:
        path: final path.
        columns: what to write.
        key: identity of everything the numbers depend on; compared when they are read.
    """
    ids, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    table = pa.table(
        {
            "prompt_ids": pa.array([list(row) for row in columns.prompt_ids], ids),
            "response_ids": pa.array([list(row) for row in columns.response_ids], ids),
            **{
                n: pa.array([t.tolist() for t in rows], floats)
                for n, rows in columns.floats.items()
            },
        }
    )
    write_keyed(path, table, key, _NO_MATRICES)


def read_token_columns(path: Path, key: str) -> TokenColumns:
    """Read columns that `write_token_columns` wrote.

    Raises:
        ArtifactError: the file is torn, or was made from another model, dataset or setting.
    """
    table, _ = read_keyed(path, key)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    prompt_ids, response_ids = columns.pop("prompt_ids"), columns.pop("response_ids")
    floats = {name: [torch.tensor(row) for row in rows] for name, rows in columns.items()}
    return TokenColumns(prompt_ids, response_ids, floats)
