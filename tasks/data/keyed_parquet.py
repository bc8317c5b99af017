"""Parquet files that say what they were computed from, and are whole or not there."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import ArtifactError

_KEY_FIELD: Final = b"rlhf.key"
_ABANDONED_SECONDS: Final = 3600.0


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
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    with temporary.open("wb") as file:
        pq.write_table(keyed, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    for other in path.parent.glob(f".tmp-*-{path.name}"):
        # A run that was killed left it; one that is at work needs seconds.
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > _ABANDONED_SECONDS:
                other.unlink()


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
