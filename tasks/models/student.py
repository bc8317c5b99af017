"""Checks of a student before it is trained: does its adapter fit, and does its vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tasks.data.templates import load_tokenizer, tokenizer_content
from tasks.errors import ConfigError, ModelError, RendererMismatchError
from tasks.models.weights import count_parameters, list_weight_files

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
