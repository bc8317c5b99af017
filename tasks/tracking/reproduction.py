"""Whether a repeat of a stage gave the same bits, and what was different about it if not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from tasks.artifacts import Manifest

FileStatus = Literal["equal", "equal but for times", "different", "missing", "new"]
# When something happened, and how long it took, is no result.
_TIME: Final = re.compile(
    r"\b(tstamp|seconds|(\w+_)?tokens_per_second|time_share_\w+|tokens a second)\b"
)
_JSON: Final = (".json", ".jsonl")
_PAGES: Final = (".md", ".html")
UNKNOWN: Final = "unknown"


class Difference(BaseModel):
    """One thing that was not the same."""

    name: str
    first: str
    repeat: str


class Reproduction(BaseModel):
    """A repeat beside the first run.

    Args:
        repeat_path: where the repeat's artefact lies; None when it was removed.
        files: status of every payload file.
        metrics: figures of the manifest that differ.
        environment: packages, code and device that differ.
        notes: what could not be compared.
    """

    run_id: str
    stage: str
    repeat_run_id: str | None
    repeat_path: str | None
    files: dict[str, FileStatus]
    metrics: list[Difference]
    environment: list[Difference]
    notes: list[str] = []

    @property
    def is_equal(self) -> bool:
        """Whether every file has the same bits, times aside, and every figure is the same."""
        same = ("equal", "equal but for times")
        return all(status in same for status in self.files.values()) and not self.metrics


def compare_files(
    first: Manifest, repeat: Manifest, first_dir: Path, repeat_dir: Path
) -> dict[str, FileStatus]:
    """Return the status of every payload file, by the hashes of both manifests.

    JSON files and pages with other hashes are read, where the first artefact is still there, to see
    whether only their times differ, and the id of the run that a page says it is of.
    """
    statuses: dict[str, FileStatus] = {}
    for name in sorted({*first.files, *repeat.files}):
        ours, theirs = first.files.get(name), repeat.files.get(name)
        if ours is None or theirs is None:
            statuses[name] = "new" if ours is None else "missing"
        elif ours.sha256 == theirs.sha256:
            statuses[name] = "equal"
        elif name.endswith(_JSON + _PAGES) and (first_dir / name).is_file():
            before = _timeless(first_dir / name, first.mlflow_run_id)
            is_same = before == _timeless(repeat_dir / name, repeat.mlflow_run_id)
            statuses[name] = "equal but for times" if is_same else "different"
        else:
            statuses[name] = "different"
    return statuses


def _timeless(path: Path, run_id: str | None) -> list[Any]:
    """Return the content of a JSON file or a page without what says when, how fast or which run."""
    text = path.read_text(encoding="utf-8")
    if run_id:
        text = text.replace(run_id, "this run")
    if path.suffix in _PAGES:
        # Markdown escapes the underscores of a name.
        return [line for line in text.splitlines() if not _TIME.search(line.replace("\\", ""))]
    parts = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [_without_times(json.loads(part)) for part in parts if part.strip()]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not _TIME.fullmatch(k)}
    if isinstance(value, list):
        sentences = [e for e in value if not (isinstance(e, str) and _TIME.search(e))]
        return [_without_times(entry) for entry in sentences]
    return value


def compare_figures(first: Manifest, repeat: Manifest) -> list[Difference]:
    """Return the metrics and counts that differ, times aside."""
    ours = _without_times({**first.metrics, **first.counts})
    theirs = _without_times({**repeat.metrics, **repeat.counts})
    return differences(
        {name: repr(value) for name, value in ours.items()},
        {name: repr(value) for name, value in theirs.items()},
    )


def differences(first: Mapping[str, str], repeat: Mapping[str, str]) -> list[Difference]:
    """Return the entries that are not the same on both sides."""
    names = sorted({*first, *repeat})
    pairs = [(name, first.get(name, UNKNOWN), repeat.get(name, UNKNOWN)) for name in names]
    return [Difference(name=n, first=a, repeat=b) for n, a, b in pairs if a != b]
