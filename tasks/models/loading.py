"""Loading of trained models, which fails where transformers or peft would only warn.

A tensor that the checkpoint lacks would be drawn at random, and one that the model has no place for
would be dropped, both with a log line and a model that scores or speaks nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tasks.data.rendering import load_tokenizer
from tasks.errors import ModelError

# Weight files in safetensors format, read by their headers alone.

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000


def list_weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a model directory, sorted by name.

    Raises:
        ModelError: none are in safetensors format, or a shard that the index names is missing.
    """
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        raise _no_weights(directory)
    files = [
        directory / name for name in sorted(set(_read_weight_map(directory / _INDEX).values()))
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{directory} lacks the weight files {', '.join(missing)}",
            expected=f"all {len(files)} shards that {_INDEX} names",
            fix="download the model again",
        )
    return files


def read_header(path: Path) -> dict[str, Any]:
    """Return a safetensors header: {tensor name: {"dtype", "shape", "data_offsets"}}.

    Raises:
        ModelError: the file is not in safetensors format, or is cut short.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise _broken(path, f"its header would be {header_bytes} of {size_bytes} bytes")
        try:
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _broken(path, f"its header is not readable: {error}") from error
    expected_bytes = _LENGTH_BYTES + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise _broken(path, f"it has {size_bytes} bytes where its header says {expected_bytes}")
    return dict(header)


def count_parameters(files: Iterable[Path]) -> int:
    """Count the elements of all tensors in the files."""
    headers = (read_header(file) for file in files)
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no index of weight files: {error!r}",
            expected='{"weight_map": {tensor: file}}',
            fix="download the model again",
        ) from error


def _no_weights(directory: Path) -> ModelError:
    pickled = sorted(file.name for pattern in _PICKLED for file in directory.glob(pattern))
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    others = ", ".join(pickled + gguf)
    return ModelError(
        f"{directory} holds no weights in safetensors format"
        + (f", only {others}" if others else ""),
        expected=f"{_SINGLE}, or {_INDEX} with its shards; pickled files are not loaded, since "
        "they can run code",
        fix="convert it where you trust it: load it with transformers and call "
        "model.save_pretrained(directory)",
    )


def _broken(path: Path, detail: str) -> ModelError:
    return ModelError(
        f"{path} is no whole safetensors file: {detail}",
        expected="a complete file",
        fix="download or save the model again",
    )


_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_SHOWN: Final = 4


def load_causal_lm(path: Path) -> Any:
    """Load a language model in fp32, in evaluation mode.

    Raises:
        ModelError: no such model, or its tensors are not exactly those of its architecture.
    """
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a directory",
            expected="a model directory in transformers format",
            fix="correct the path, or resolve a hub id first",
        )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    # transformers raises OSError, ValueError, RuntimeError or a safetensors error here.
    except Exception as error:
        raise _unloadable(path, f"does not load: {error}") from error
    _refuse_differences(path, info["missing_keys"], info["unexpected_keys"])
    return model.eval()


def load_student(base_path: Path, adapter_path: Path) -> Any:
    """Load a base model with a LoRA adapter on it in fp32, in evaluation mode.

    Raises:
        ModelError: either is missing, or the adapter's tensors are not exactly those that its
            config puts on this base.
    """
    return _adapt(load_causal_lm(base_path), base_path, adapter_path)


def load_adapted_reward_model(base_path: Path, adapter_path: Path) -> Any:
    """Load a reward model that is an adapter and a value head on a language model, in evaluation
    mode, in fp32; errors as in `load_student`, the head's included."""
    return _adapt(new_reward_model(base_path), base_path, adapter_path)


def new_reward_model(base_path: Path) -> Any:
    """Load a language model as a backbone with a score head that is drawn at random, in fp32."""
    return AutoModelForTokenClassification.from_pretrained(
        str(base_path),
        num_labels=1,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )


def _adapt(base: Any, base_path: Path, adapter_path: Path) -> Any:
    for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (adapter_path / name).is_file():
            raise ModelError(
                f"{adapter_path} has no {name}",
                expected="an adapter in PEFT format with safetensors weights",
                fix="name the directory that the stage wrote; pickled adapters are not loaded",
            )
    try:
        config = PeftConfig.from_pretrained(str(adapter_path))
        config.inference_mode = True
        adapted = get_peft_model(base, config, autocast_adapter_dtype=False)
        weights = load_file(adapter_path / _ADAPTER_WEIGHTS)
        result = set_peft_model_state_dict(adapted, weights)
    # peft raises ValueError, KeyError or RuntimeError, depending on what does not fit.
    except Exception as error:
        raise _unloadable(adapter_path, f"does not fit on {base_path}: {error}") from error
    missing = [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    _refuse_differences(adapter_path, missing, result.unexpected_keys)
    return adapted.eval()


def _refuse_differences(path: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    absent, surplus = sorted(missing), sorted(unexpected)
    if absent or surplus:
        raise ModelError(
            f"The weights in {path} do not fit their config: {_named('missing', absent)}, "
            f"{_named('surplus', surplus)}",
            expected="exactly the tensors of the architecture",
            fix="name a directory of the right kind (language model, reward model or adapter), "
            "or save it again",
        )


def _named(word: str, keys: list[str]) -> str:
    if not keys:
        return f"none {word}"
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} {word} ({', '.join(keys[:_SHOWN])}{more})"


def _unloadable(path: Path, detail: str) -> ModelError:
    return ModelError(
        f"{path} {detail.strip().partition(chr(10))[0][:300]}",
        expected="a model of a built-in architecture, whole and in safetensors format",
        fix="save it again with save_pretrained, or download it again",
    )


# From an adapter to a merged model, and what a reader of either computes.


def merge_adapter(base_dir: Path, adapter_dir: Path, merged_dir: Path) -> None:
    """Write base plus adapter as one model: W + (alpha / r) B A, in fp32, because bf16 would round
    the change away.

    Raises:
        ModelError: base and adapter do not fit.
    """
    _save(load_student(base_dir, adapter_dir).merge_and_unload(), base_dir, merged_dir)


def merge_reward_adapter(base_dir: Path, adapter_dir: Path, merged_dir: Path) -> None:
    """Write base, adapter and value head as one reward model, in fp32.

    Raises:
        ModelError: base and adapter do not fit, or the adapter has no value head.
    """
    adapted = load_adapted_reward_model(base_dir, adapter_dir)
    _save(adapted.merge_and_unload(), base_dir, merged_dir)


@torch.no_grad()
def write_reward_model(base_dir: Path, head: Tensor, directory: Path) -> None:
    """Write a reward model of this backbone and a head without bias.

    Args:
        base_dir: a language model.
        head: (H,) weight.
        directory: final path.
    """
    model = new_reward_model(base_dir)
    model.score.weight.copy_(head[None])
    model.score.bias.zero_()
    _save(model, base_dir, directory)


def _save(model: Any, base_dir: Path, directory: Path) -> None:
    """Write a model with the tokenizer of its base."""
    model.save_pretrained(str(directory))
    load_tokenizer(base_dir).save_pretrained(str(directory))
