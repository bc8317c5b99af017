"""Writes the student as adapter and merged model, and has both read back by a process of its own
before anybody gets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tasks.data.rendering import load_tokenizer, tokenizer_content
from tasks.errors import ConfigError, ModelError, RendererMismatchError
from tasks.models.loading import count_parameters, list_weight_files, merge_adapter
from tasks.runtime.logits_hooks import LogitsReader
from tasks.runtime.rows import RoleSpec, Row
from tasks.runtime.session import Session, resolve_device

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
            [sys.executable, "-m", "tasks.distill.student_check"],
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


# Checks of a student before it is trained: does its adapter fit, and does its vocabulary.

_SHOWN: Final = 3
_ADAPTABLE: Final = (torch.nn.Linear, torch.nn.Embedding, Conv1D)


def check_targets(model_dir: Path, targets: str | Sequence[str]) -> int:
    """Refuse adapter targets that a model has not, and ones that tied embeddings forbid.

    An adapter on one side of tied embeddings would change the other side, or part them, when it is
    merged.

    Args:
        model_dir: the student.
        targets: ``all-linear``, a regular expression, or names of layers, each of which must match.

    Returns:
        How many layers are adapted.

    Raises:
        ConfigError: names the target and what the model has, or a pattern that is none.
    """
    config = AutoConfig.from_pretrained(str(model_dir))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _ADAPTABLE)}
    inner = sorted({n.rpartition(".")[2] for n, m in layers.items() if m not in embeddings})
    if targets == "all-linear":
        return sum(module not in embeddings for module in layers.values())
    adapted: set[str] = set()
    for target in [targets] if isinstance(targets, str) else [*targets] or [""]:
        found = [n for n in layers if _matches(n, target, is_pattern=isinstance(targets, str))]
        if not found:
            raise ConfigError(
                f"distill.lora.target_modules names {target!r}, which no layer of {model_dir} is "
                "called",
                f"all-linear, or some of {', '.join(inner)}",
                "correct the name",
            )
        adapted.update(found)
    tied = sorted(name for name in adapted if layers[name] in embeddings)
    if tied and config.tie_word_embeddings:
        raise ConfigError(
            f"distill.lora.target_modules adapts {', '.join(tied)} of {model_dir}, whose input and "
            "output embeddings are tied",
            f"layers other than these, such as {', '.join(inner[:_SHOWN])}",
            "leave the embeddings out of target_modules, or use all-linear",
        )
    return len(adapted)


def _matches(name: str, target: str, *, is_pattern: bool) -> bool:
    """Return whether peft adapts a layer: a list names layers or ends of their paths, a string by
    itself is a regular expression of whole paths."""
    if is_pattern:
        return re.fullmatch(target, name) is not None
    return name == target or name.endswith(f".{target}")


def check_vocabulary(model_dir: Path, vocab_size: int, what: str) -> None:
    """Refuse a model with fewer embeddings than its tokenizer has ids.

    Raises:
        ModelError: names both sizes.
    """
    rows = int(AutoConfig.from_pretrained(str(model_dir)).vocab_size)
    if rows < vocab_size:
        raise ModelError(
            f"{what} {model_dir} has {rows} embeddings for a tokenizer of {vocab_size} ids",
            "at least as many embeddings as ids",
            "resize the embeddings, or use the tokenizer that the model was trained with",
        )


def n_parameters(model_dir: Path) -> int:
    """Count the weights of a model directory; tied ones count once."""
    return count_parameters(list_weight_files(model_dir))


def refuse_other_tokens(teacher_dir: Path, student_dir: Path) -> None:
    """Say in what the tokenizers of teacher and student differ.

    Raises:
        RendererMismatchError: always; names both sides and the first differences.
    """
    teacher, student = load_tokenizer(teacher_dir), load_tokenizer(student_dir)
    raise RendererMismatchError(
        f"The student {student_dir} and the teacher {teacher_dir} tokenize differently: "
        f"{_difference(teacher, student)}",
        "the same tokenizer, special tokens and chat template",
        "choose a student of the teacher's family",
    )


def _difference(teacher: Any, student: Any) -> str:
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(
        (t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)),
        key=lambda token: (min(ours.get(token, 2**31), theirs.get(token, 2**31)), token),
    )
    if differing:
        shown = "; ".join(
            f"{token!r} is {_id(theirs, token)} of the teacher and {_id(ours, token)} of the "
            "student"
            for token in differing[:_SHOWN]
        )
        return f"{len(differing)} tokens have other ids ({shown})"
    if teacher.special_tokens_map != student.special_tokens_map:
        return (
            f"special tokens {json.dumps(teacher.special_tokens_map)} of the teacher, "
            f"{json.dumps(student.special_tokens_map)} of the student"
        )
    if teacher.chat_template != student.chat_template:
        return "their chat templates differ"
    one, two = tokenizer_content(teacher), tokenizer_content(student)
    parts = [key for key in one if isinstance(two, dict) and one[key] != two.get(key)]
    return f"they differ in {', '.join(parts) or 'their padding tokens'}"


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no token"
