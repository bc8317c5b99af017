"""Data sets of the Hugging Face hub: which revision, and their rows one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tasks.errors import MissingInputError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILE_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_FIX: Final = "check the id, the network and HF_TOKEN, or download it and give the directory"


def is_hub_id(source: str) -> bool:
    """Tell whether a source names a data set of the hub: owner/name, and no such file here."""
    if _HUB_ID.fullmatch(source) is None or source.endswith(_FILE_SUFFIXES):
        return False
    return not Path(source).expanduser().exists()


def resolve_revision(name: str, revision: str | None) -> str:
    """Return the commit of a data set, so that a run can be repeated.

    Raises:
        MissingInputError: no such data set or revision, or the hub does not answer.
    """
    from huggingface_hub import HfApi

    try:
        found: str | None = HfApi().dataset_info(name, revision=revision, timeout=20).sha
    except Exception as error:  # the hub's client raises whatever its HTTP library does
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingInputError(
            f"Hub data set {name} (revision {revision or 'main'}) cannot be read: {reason}",
            "a data set of the Hugging Face hub, or a file",
            _FIX,
        ) from error
    assert found is not None, "the hub names the commit of every data set"
    return found


def stream_rows(hub: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set without storing it; ``hub`` goes to ``load_dataset``.

    Raises:
        MissingInputError: it cannot be read, or not to its end.
    """
    from datasets import load_dataset

    try:
        yield from load_dataset(**hub, streaming=True)
    except Exception as error:  # builders raise whatever their formats do
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingInputError(
            f"Hub data set {hub['path']} cannot be read: {reason}", "a readable data set", _FIX
        ) from error
