"""Weight files in safetensors format, read by their headers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tasks.errors import ModelError

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


def tensor_names(directory: Path) -> set[str]:
    """Return the names of all tensors of a model directory."""
    return {name for file in list_weight_files(directory) for name in read_header(file)}


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
