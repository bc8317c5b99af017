"""Models that carry code: it is never run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tasks.data.rendering import load_tokenizer
from tasks.errors import ModelError
from tasks.models.loading import load_causal_lm, load_student
from tasks.models.sources import resolve_model


class _Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_bomb_goes_off_where_it_is_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(_Bomb(marker)))
    assert marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickled_weights_are_not_opened(tiny_copy: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (tiny_copy / "model.safetensors").unlink()
    (tiny_copy / name).write_bytes(pickle.dumps(_Bomb(marker)))
    with pytest.raises(ModelError):
        load_causal_lm(tiny_copy)
    with pytest.raises(ModelError):
        resolve_model(str(tiny_copy), cache_dir=tmp_path)
    assert not marker.exists()


def test_pickled_adapter_is_not_opened(tiny_dir: Path, tmp_path: Path) -> None:
    marker, adapter = tmp_path / "marker", tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    with pytest.raises(ModelError, match="pickled adapters are not loaded"):
        load_student(tiny_dir, adapter)
    assert not marker.exists()


def test_code_beside_a_model_is_not_run(tiny_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for name in ("modeling_own", "configuration_own", "tokenization_own"):
        (tiny_copy / f"{name}.py").write_text(code)
    _edit_json(
        tiny_copy / "config.json",
        auto_map={
            "AutoConfig": "configuration_own.Own",
            "AutoModelForCausalLM": "modeling_own.Own",
        },
    )
    _edit_json(
        tiny_copy / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_own.Own", None]},
    )
    # The architecture is one that transformers knows: it is loaded without the code.
    assert type(load_causal_lm(tiny_copy)).__name__ == "LlamaForCausalLM"
    assert load_tokenizer(tiny_copy).chat_template
    assert not marker.exists()


def test_architecture_that_only_its_own_code_knows_is_refused(
    tiny_copy: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    (tiny_copy / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    _edit_json(
        tiny_copy / "config.json",
        model_type="own",
        architectures=["Own"],
        auto_map={"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"},
    )
    with pytest.raises(ModelError):
        load_causal_lm(tiny_copy)
    assert not marker.exists()
