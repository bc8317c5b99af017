"""Writes the student as adapter and merged model, and has both read back by a process of its own
before anybody gets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.backends.cluster import resolve_device
from tasks.backends.logits_hooks import LogitsReader
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session
from tasks.errors import ModelError
from tasks.models.export import merge_adapter

# Largest difference of a logit between the trained student and what a reader loads.
ADAPTER_TOLERANCE = 1e-4
MERGED_TOLERANCE = 1e-3
# Up to this size; fp32 rounds to a share of a number, so larger logits are allowed as much more.
ORDINARY_LOGIT = 32.0
CHECKED_PROMPTS = 32
# Logits of 16 tokens of 32 prompts take 96 MiB with a vocabulary of 49,152.
CHECKED_TOKENS = 16
ADAPTER = "adapter"
MERGED = "merged"


@dataclass(frozen=True)
class StudentExport:
    """A trained student.

    Args:
        session: holds it.
        spec: of its role.
        base_dir: the model that it adapts.
        may_change_embeddings: whether the adapter covers the input embeddings.
    """

    session: Session
    spec: RoleSpec
    base_dir: Path
    may_change_embeddings: bool = False

    def write(self, directory: Path, rows: Sequence[Row]) -> dict[str, float]:
        """Write ``adapter`` and ``merged`` below a directory, and compare both with the student.

        Args:
            directory: of the artefact.
            rows: where the student is compared, see `checked_rows`.

        Returns:
            The largest difference of a logit, by what was compared.

        Raises:
            ModelError: what was written is not what was trained.
        """
        self.session.export(self.spec.name, directory / ADAPTER)
        merge_adapter(self.base_dir, directory / ADAPTER, directory / MERGED)
        # Beside the artefact's files, where every node sees it.
        with TemporaryDirectory(prefix=".check-", dir=directory) as scratch:
            logits = Path(scratch) / "logits.safetensors"
            self._write_logits(logits, rows, Path(scratch))
            found = self._read_back(directory, logits, rows)
        return check_findings(found, self.may_change_embeddings)

    def _write_logits(self, file: Path, rows: Sequence[Row], scratch: Path) -> None:
        """Write the trained student's logits in fp32, whatever it was trained in."""
        session, runtime = self.session, self.session.runtime
        if runtime.dtype != "fp32":
            session.save(self.spec.name, scratch / "state")
            session.runtime = runtime.model_copy(update={"dtype": "fp32"})
            session.load(self.spec)
            session.restore(self.spec.name, scratch / "state")
        found = session.read_tokens(self.spec.name, rows, LogitsReader())["logits"]
        save_file({str(i): values.contiguous() for i, values in enumerate(found)}, file)

    def _read_back(self, directory: Path, logits: Path, rows: Sequence[Row]) -> dict[str, Any]:
        job = {
            "base": str(self.base_dir),
            "adapter": str(directory / ADAPTER),
            "merged": str(directory / MERGED),
            "logits": str(logits),
            "rows": [(list(row.prompt_ids), list(row.response_ids)) for row in rows],
            "device": resolve_device(self.session.runtime),
            "threads": self.session.runtime.cpu_threads,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tasks.models.student_check"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=_plain_environment(),
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise ModelError(
                f"The exported student in {directory} does not load in a process of its own: "
                f"{reason[0]}",
                "an adapter and a model that transformers and peft load",
                "nothing was published; report this defect with the base model's name",
            )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def _plain_environment() -> dict[str, str]:
    """Return the environment with this project on the path, and without a hub to ask."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)}


def checked_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the beginnings of the responses to the first prompts, one to each."""
    first: dict[tuple[int, ...], Row] = {}
    for row in rows:
        first.setdefault(tuple(row.prompt_ids), row)
        if len(first) == CHECKED_PROMPTS:
            break
    return [Row(row.prompt_ids, row.response_ids[:CHECKED_TOKENS]) for row in first.values()]


def check_findings(found: dict[str, Any], may_change_embeddings: bool = False) -> dict[str, float]:
    """Return the differences of what `student_check` found.

    Raises:
        ModelError: one is too large, or the embeddings are not what they were.
    """
    size = float(found["largest_logit"])
    for name, tolerance in ((ADAPTER, ADAPTER_TOLERANCE), (MERGED, MERGED_TOLERANCE)):
        # Logits that are no numbers leave the limit as it is.
        limit = tolerance * size / ORDINARY_LOGIT if size > ORDINARY_LOGIT else tolerance
        if not found[name] <= limit:
            raise ModelError(
                f"The exported {name} differs from the trained student by {found[name]:.2e} in a "
                f"logit; the largest logit is {size:.4g}",
                f"at most {limit:.1e}",
                "nothing was published; report this defect with the base model's name",
            )
    if found["is_tied"] != found["is_tied_in_base"]:
        raise ModelError(
            f"Input and output embeddings are {_tied(found['is_tied'])} in the merged model and "
            f"{_tied(found['is_tied_in_base'])} in its base",
            "the same in both",
            "nothing was published; report this defect with the base model's name",
        )
    if not found["same_embeddings"] and not may_change_embeddings:
        raise ModelError(
            "The merged model has other input embeddings than its base",
            "the base's: no adapter covers them",
            "nothing was published; report this defect with the base model's name",
        )
    return {f"{name}_reload_difference": float(found[name]) for name in (ADAPTER, MERGED)}


def _tied(is_tied: bool) -> str:
    return "tied" if is_tied else "apart"


def adapter_parameters(adapter_dir: Path) -> int:
    """Count the adapter's weights."""
    from safetensors import safe_open

    with safe_open(str(adapter_dir / "adapter_model.safetensors"), "pt") as tensors:
        keys: list[str] = list(tensors.keys())
        return sum(int(torch.Size(tensors.get_slice(key).get_shape()).numel()) for key in keys)
