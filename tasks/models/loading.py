"""Loading of trained models, which fails where transformers or peft would only warn.

A tensor that the checkpoint lacks would be drawn at random, and one that the model has no place for
would be dropped, both with a log line and a model that scores or speaks nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tasks.data.templates import load_tokenizer
from tasks.errors import ModelError
from tasks.models.weights import tensor_names

__all__ = ["load_causal_lm", "load_reward_model", "load_student", "load_tokenizer"]

_HEAD: Final = "score.weight"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_SHOWN: Final = 4


def load_causal_lm(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a language model, in evaluation mode.

    Raises:
        ModelError: no such model, or its tensors are not exactly those of its architecture.
    """
    return _load(AutoModelForCausalLM, path, dtype)


def load_reward_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a reward model: a backbone with one score per token, in evaluation mode.

    Raises:
        ModelError: no such model, it has no trained score head, or its tensors are not exactly
            those of its architecture.
    """
    if path.is_dir() and _HEAD not in tensor_names(path):
        raise ModelError(
            f"{path} has no score head",
            expected=f"a reward model, with the tensor {_HEAD}; a new head would score at random",
            fix="name the directory that reward model training wrote, not its base model",
        )
    return _load(AutoModelForTokenClassification, path, dtype, num_labels=1)


def load_student(base_path: Path, adapter_path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a base model with a LoRA adapter on it, in evaluation mode.

    Raises:
        ModelError: either is missing, or the adapter's tensors are not exactly those that its
            config puts on this base.
    """
    return _adapt(load_causal_lm(base_path, dtype), base_path, adapter_path)


def load_adapted_reward_model(base_path: Path, adapter_path: Path) -> Any:
    """Load a reward model that is an adapter and a value head on a language model, in evaluation
    mode, in fp32.

    Raises:
        ModelError: either is missing, or the adapter's tensors are not exactly those that its
            config puts on this base, the head included.
    """
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


def _load(auto_class: Any, path: Path, dtype: torch.dtype, **options: Any) -> Any:
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a directory",
            expected="a model directory in transformers format",
            fix="correct the path, or resolve a hub id first",
        )
    try:
        model, info = auto_class.from_pretrained(
            str(path),
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **options,
        )
    # transformers raises OSError, ValueError, RuntimeError or a safetensors error here.
    except Exception as error:
        raise _unloadable(path, f"does not load: {error}") from error
    _refuse_differences(path, info["missing_keys"], info["unexpected_keys"])
    return model.eval()


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
