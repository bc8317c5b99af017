"""A teacher's soft labels on disk: parts of rows, each a Parquet file that is whole or not there.

Numbers are fp16 and ids as narrow as the vocabulary allows. Each part says in plain words what it
was computed from, so that labels of another teacher, dataset, renderer or temperature are told
apart by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tasks.data.columns import hash_responses, write_keyed
from tasks.errors import ArtifactError, ConfigError

ROWS_PER_PART: Final = 1024
# Rows of a whole vocabulary are large: numbers of a part, 256 MiB of them in fp32.
NUMBERS_PER_PART: Final = 2**26
GIB: Final = 2**30
_IDENTITY_FIELD: Final = b"rlhf.teacher_labels"
_LOGPROB_BYTES: Final = 2
_NARROW_IDS: Final = 2**16
_LOGPROBS, _IDS, _RESPONSE = "logprobs", "ids", "response_ids"
# The most negative number that fp16 holds is -65504.
_FLOOR: Final = -60000.0


@dataclass(frozen=True)
class LabelLayout:
    """What is kept of each token.

    Args:
        kind: ``top_k`` (k log-probabilities, that of all others together, k ids), ``sampled`` (k
            log-probabilities and ids) or ``full`` (all log-probabilities).
        k: labels per token; of kind full the vocabulary's size.
        vocab_size: ids of the tokenizer.
    """

    kind: str
    k: int
    vocab_size: int

    @property
    def logprob_width(self) -> int:
        """Log-probabilities per token."""
        return self.k + (self.has_tail)

    @property
    def has_tail(self) -> bool:
        """Whether the mass of the tokens that are not kept is kept."""
        return self.kind == "top_k"

    @property
    def id_width(self) -> int:
        """Ids per token."""
        return 0 if self.kind == "full" else self.k

    @property
    def id_type(self) -> pa.DataType:
        """The narrowest type that holds every id."""
        return pa.uint16() if self.vocab_size <= _NARROW_IDS else pa.int32()

    def bytes_on_disk(self, n_tokens: int) -> int:
        """Return what the labels of so many response tokens take before compression."""
        ids = 2 if self.vocab_size <= _NARROW_IDS else 4
        per_token = _LOGPROB_BYTES * self.logprob_width + ids * self.id_width + ids
        return n_tokens * per_token

    def check_size(self, n_tokens: int, limit_gib: float) -> int:
        """Return the bytes that the labels of so many tokens take.

        Raises:
            ConfigError: more than the limit.
        """
        size = self.bytes_on_disk(n_tokens)
        if size > limit_gib * GIB:
            raise ConfigError(
                f"The teacher's labels of {n_tokens:,} tokens ({self.kind}, {self.k} a token) take "
                f"{size / GIB:.3g} GiB on the disk",
                f"at most distill.soft_labels.max_cache_gib = {limit_gib:g}",
                "lower soft_labels.top_k or samples, take fewer prompts, or raise max_cache_gib",
            )
        return size


@dataclass(frozen=True)
class TeacherLabels:
    """Labels of N responses.

    Args:
        logprobs: N fp32 tensors (T_i, K) at the temperature of the labels; of kind top_k the mass
            that is missing to 1 is the tail's.
        ids: N int64 tensors (T_i, K); none of kind full.
    """

    logprobs: list[Tensor]
    ids: list[Tensor] = field(default_factory=list)


Compute = Callable[[int, int], tuple[list[Tensor], list[Tensor]]]


@dataclass(frozen=True)
class LabelStore:
    """Labels of fixed rows in one directory.

    Args:
        directory: of the parts.
        layout: of the labels.
        identity: what they depend on, by name: teacher, dataset, renderer, tau, ...
        responses: N responses as token ids.
    """

    directory: Path
    layout: LabelLayout
    identity: Mapping[str, str]
    responses: Sequence[Sequence[int]]

    @classmethod
    def at(
        cls,
        cache_dir: Path,
        layout: LabelLayout,
        identity: Mapping[str, str],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> LabelStore:
        """Return the store of these rows, in a directory named by all that decides the labels."""
        known = {
            **identity,
            "kind": layout.kind,
            "k": str(layout.k),
            "vocab_size": str(layout.vocab_size),
            "rows": hash_responses(prompts, responses)[:16],
        }
        text = json.dumps(known, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(cache_dir / name, layout, known, responses)

    @cached_property
    def rows_per_part(self) -> int:
        """Rows of each part, whatever their lengths."""
        longest = max(map(len, self.responses), default=1)
        fitting = NUMBERS_PER_PART // max(1, longest * self.layout.logprob_width)
        return max(1, min(ROWS_PER_PART, fitting))

    @property
    def starts(self) -> range:
        """First row of each part."""
        return range(0, len(self.responses), self.rows_per_part)

    def fill(self, compute: Compute) -> int:
        """Compute the parts that are not there; one at a time, so that a killed run goes on.

        Args:
            compute: of first row and end, returns log-probabilities (T_i, `logprob_width`) and ids
                (T_i, `id_width`) of each row.

        Returns:
            How many parts were computed.
        """
        n_new = 0
        for start in self.starts:
            file = self._file(start)
            if not file.exists():
                end = min(start + self.rows_per_part, len(self.responses))
                self._write(file, start, end, *compute(start, end))
                n_new += 1
        return n_new

    def read(self) -> TeacherLabels:
        """Return all labels.

        Raises:
            ArtifactError: a part is torn, missing, or was made from something else.
        """
        labels = TeacherLabels([])
        for start in self.starts:
            table = self._table(self._file(start), start)
            lengths = [len(row) for row in table[_RESPONSE].to_pylist()]
            logprobs = _rows(table[_LOGPROBS], lengths, self.layout.logprob_width)
            labels.logprobs.extend(self._restored(row) for row in logprobs)
            if self.layout.id_width:
                found = _rows(table[_IDS], lengths, self.layout.id_width)
                labels.ids.extend(row.long() for row in found)
        return labels

    def bytes_on_disk(self) -> int:
        """Return what the parts take."""
        return sum(self._file(start).stat().st_size for start in self.starts)

    def _file(self, start: int) -> Path:
        return self.directory / f"{start // self.rows_per_part:06d}.parquet"

    def _restored(self, logprobs: Tensor) -> Tensor:
        """Return fp32 values that are a distribution again, which rounding had them miss."""
        values = logprobs.float()
        if self.layout.kind == "sampled":
            return values
        values = values - values.logsumexp(-1, keepdim=True)
        return values[:, :-1].contiguous() if self.layout.has_tail else values

    def _write(
        self, file: Path, start: int, end: int, logprobs: Sequence[Tensor], ids: Sequence[Tensor]
    ) -> None:
        rows = self.responses[start:end]
        columns = {
            _RESPONSE: pa.array([list(row) for row in rows], pa.list_(self.layout.id_type)),
            _LOGPROBS: _lists([v.clamp(min=_FLOOR).half() for v in logprobs], pa.float16()),
        }
        if self.layout.id_width:
            columns[_IDS] = _lists(ids, self.layout.id_type)
        metadata = {_IDENTITY_FIELD: json.dumps(self.identity, sort_keys=True).encode()}
        write_keyed(file, pa.table(columns), self.directory.name, metadata)

    def _table(self, file: Path, start: int) -> pa.Table:
        try:
            metadata = pq.read_schema(file).metadata or {}
            self._check_identity(file, metadata)
            table = pq.read_table(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise ArtifactError(
                f"The teacher's labels in {file} are torn: {error}",
                "a complete Parquet file",
                f"remove {file}; it is computed again",
            ) from error
        expected = [list(row) for row in self.responses[start : start + self.rows_per_part]]
        if table[_RESPONSE].to_pylist() != expected:
            raise ArtifactError(
                f"The teacher's labels in {file} belong to other responses",
                f"the responses from row {start} on",
                f"remove {file}; it is computed again",
            )
        return table

    def _check_identity(self, file: Path, metadata: Mapping[bytes, bytes]) -> None:
        found = json.loads(metadata.get(_IDENTITY_FIELD, b"{}"))
        wanted = dict(self.identity)
        differing = [n for n in sorted({*found, *wanted}) if found.get(n) != wanted.get(n)]
        if differing:
            raise ArtifactError(
                f"The teacher's labels in {file} were made with {_named(found, differing)}",
                _named(wanted, differing),
                f"remove {file}; it is computed again",
            )


def _named(identity: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {identity.get(name, 'not said')}" for name in names)


def _lists(rows: Sequence[Tensor], kind: pa.DataType) -> pa.Array:
    """Return tensors as lists of their numbers, without a Python object for each."""
    flat = torch.cat([row.flatten() for row in rows]).numpy()
    ends = np.cumsum([0, *(row.numel() for row in rows)], dtype=np.int64)
    values = pa.array(flat.astype(_numpy_type(kind), copy=False), kind)
    # Refuses offsets that int32 does not hold.
    return pa.ListArray.from_arrays(pa.array(ends, pa.int64()).cast(pa.int32()), values)


def _numpy_type(kind: pa.DataType) -> npt.DTypeLike:
    found: npt.DTypeLike = np.dtype(kind.to_pandas_dtype())
    return found


def _rows(column: pa.ChunkedArray, lengths: Sequence[int], width: int) -> list[Tensor]:
    """Return lists as tensors (T_i, width), cut out of one that holds them all."""
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if flat.dtype == np.uint16:
        flat = flat.astype(np.int32)
    whole = torch.from_numpy(np.array(flat)).view(-1, width)
    return list(torch.split(whole, list(lengths)))
