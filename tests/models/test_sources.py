"""Model sources: what is checked before training, and what each failure says."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from transformers import AutoModelForCausalLM

from tasks.config.shared import TinyModelConfig
from tasks.errors import ConfigError, ModelError
from tasks.models.loading import count_parameters, list_weight_files
from tasks.models.sources import resolve_model
from tasks.models.tiny import count_tiny_parameters

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _resolve(directory: Path) -> Any:
    return resolve_model(str(directory), cache_dir=directory.parent / "cache")


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_good_directory(tiny_dir: Path) -> None:
    resolved = _resolve(tiny_dir)
    assert resolved.path == tiny_dir and len(resolved.fingerprint) == 64


def test_the_fingerprint_follows_content_not_place(tiny_dir: Path, tiny_copy: Path) -> None:
    original = _resolve(tiny_dir).fingerprint
    (tiny_copy / "README.md").write_text("a note")
    assert _resolve(tiny_copy).fingerprint == original
    template = tiny_copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert _resolve(tiny_copy).fingerprint != original


def test_the_fingerprint_sees_one_changed_weight(tiny_dir: Path, tiny_copy: Path) -> None:
    weights = tiny_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert _resolve(tiny_copy).fingerprint != _resolve(tiny_dir).fingerprint


def test_tiny_is_pointed_to_its_builder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="build_tiny_model"):
        resolve_model("tiny", cache_dir=tmp_path)


def test_a_directory_has_no_revision(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve_model(str(tiny_dir), revision="main", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("removed", "found"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "holds no tokenizer"),
        ("chat_template.jinja", "no chat template"),
        ("model.safetensors", "no weights in safetensors format"),
    ],
)
def test_each_missing_part_is_named(tiny_copy: Path, removed: str, found: str) -> None:
    (tiny_copy / removed).unlink()
    with pytest.raises(ModelError, match=found) as caught:
        _resolve(tiny_copy)
    assert str(tiny_copy) in str(caught.value)
    assert caught.value.expected and caught.value.fix


def test_pickled_weights_are_refused(tiny_copy: Path) -> None:
    (tiny_copy / "model.safetensors").rename(tiny_copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin.*pickled"):
        _resolve(tiny_copy)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a LoRA adapter.*merge"):
        _resolve(tmp_path / "adapter")


def test_a_template_without_end_of_turn_is_refused(tiny_copy: Path) -> None:
    (tiny_copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"
    )
    with pytest.raises(ModelError, match="no special token after an answer"):
        _resolve(tiny_copy)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda c: c.pop("architectures"), "names no architecture"),
        (lambda c: c.update(architectures=[]), "names no architecture"),
        (lambda c: c.update(architectures=["OwnCodeForCausalLM"]), "OwnCodeForCausalLM"),
        (lambda c: c.update(architectures=["LlamaForTokenClassification"]), "LlamaForTokenCl"),
    ],
)
def test_an_architecture_that_is_no_language_model(
    tiny_copy: Path, edit: Callable[[dict[str, Any]], object], found: str
) -> None:
    _edit_json(tiny_copy / "config.json", edit)
    with pytest.raises(ModelError, match=found):
        _resolve(tiny_copy)


def test_a_broken_config_is_named(tiny_copy: Path) -> None:
    (tiny_copy / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        _resolve(tiny_copy)


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -1])
def test_cut_weights_are_refused(tiny_copy: Path, keep_bytes: int) -> None:
    weights = tiny_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is no whole safetensors file"):
        _resolve(tiny_copy)


def test_shards_are_counted_and_a_missing_one_is_named(
    tiny_copy: Path, spec: TinyModelConfig
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_copy)
    (tiny_copy / "model.safetensors").unlink()
    model.save_pretrained(tiny_copy, max_shard_size="40KB")
    shards = sorted(tiny_copy.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert count_parameters(list_weight_files(_resolve(tiny_copy).path)) == (
        count_tiny_parameters(spec)
    )
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        _resolve(tiny_copy)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for source in (str(tmp_path / "absent"), "./absent", "a/b/c", ""):
        with pytest.raises(ModelError, match="neither a directory here nor a hub id"):
            resolve_model(source, cache_dir=tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_an_unreachable_hub_id_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="org/name") as caught:
        resolve_model("org/name", cache_dir=tmp_path)
    for way_out in ("local directory", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        assert way_out in caught.value.fix


@pytest.mark.usefixtures("offline")
def test_a_hub_id_in_the_cache_is_resolved_to_its_commit(tiny_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "models--org--name"
    shutil.copytree(tiny_dir, store / "snapshots" / _COMMIT)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(_COMMIT)
    resolved = resolve_model("org/name", cache_dir=tmp_path)
    assert resolved.path == store / "snapshots" / _COMMIT
    assert resolved.fingerprint == _resolve(tiny_dir).fingerprint
    with pytest.raises(ModelError, match="org/name at revision v2"):
        resolve_model("org/name", revision="v2", cache_dir=tmp_path)


def test_the_fingerprint_by_hand(tiny_dir: Path) -> None:
    names = sorted(path.name for path in tiny_dir.iterdir())
    lines = [
        f"{name}\0{hashlib.sha256((tiny_dir / name).read_bytes()).hexdigest()}\n" for name in names
    ]
    assert _resolve(tiny_dir).fingerprint == hashlib.sha256("".join(lines).encode()).hexdigest()
