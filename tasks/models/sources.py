"""Where a base model comes from, and the checks that it passes before anything is trained."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tasks.artifacts import file_sha256
from tasks.data.rendering import find_answer_frame, load_tokenizer
from tasks.errors import ConfigError, ModelError, RlhfError
from tasks.models import packages
from tasks.models.loading import count_parameters, list_weight_files

TINY: Final = "tiny"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Text and safetensors only: nothing that would be unpickled or run.
_DOWNLOADED: Final = (
    "*.json",
    "*.jinja",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.tiktoken",
)
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_FINGERPRINTED: Final = (
    *_TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checked model directory in transformers format.

    Args:
        path: local directory.
        fingerprint: SHA-256 over config, tokenizer files and weight files.
    """

    path: Path
    fingerprint: str


def resolve_model(source: str, *, revision: str | None = None, cache_dir: Path) -> ResolvedModel:
    """Find a model, download it where needed, and check that it can be trained.

    Args:
        source: a local directory in transformers format, a hub id, or ``package:NAME``.
        revision: commit, tag or branch of a hub id.
        cache_dir: where downloads are kept; a package's converted model is kept beside it.

    Raises:
        ConfigError: ``source`` is "tiny" or an unknown package, or a directory or package was given
            a revision.
        ModelError: the model is not reachable, or lacks config, tokenizer, chat template, weights
            in safetensors format or an end-of-turn token.
    """
    if source == TINY:
        raise ConfigError(
            "The model source 'tiny' is built, not resolved",
            expected="a directory or a hub id",
            fix="call tasks.models.tiny.build_tiny_model and resolve the directory it returns",
        )
    if source.startswith(packages.PREFIX):
        return _resolve_package(source, revision, cache_dir)
    directory = Path(source).expanduser()
    if source and directory.is_dir():
        if revision is not None:
            raise ConfigError(
                f"Revision {revision!r} was given for the directory {directory}",
                expected="a revision with hub ids only",
                fix="remove the revision, or name a hub id",
            )
        return _inspect(directory.resolve())
    if not _HUB_ID.fullmatch(source):
        raise ModelError(
            f"The model source {source!r} is neither a directory here nor a hub id",
            expected="a directory in transformers format, a hub id like org/name, "
            f"{packages.PREFIX}NAME, or 'tiny'",
            fix="correct the path; a relative one starts at the working directory",
        )
    return _inspect(_download(source, revision, cache_dir))


def _resolve_package(source: str, revision: str | None, cache_dir: Path) -> ResolvedModel:
    name, package = packages.find_package(source)
    if revision is not None:
        raise ConfigError(
            f"Revision {revision!r} was given for {source}",
            expected=f"no revision: the package is always version {package.version}",
            fix="remove the revision",
        )
    return _inspect(packages.load_package(name, cache_dir))


def _download(hub_id: str, revision: str | None, cache_dir: Path) -> Path:
    """Return the snapshot directory, whose name is the commit."""
    wanted = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        snapshot = snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(_DOWNLOADED),
            ignore_patterns="*/*",  # other formats and original checkpoints live in subfolders
        )
    except GatedRepoError as error:
        raise ModelError(
            f"The hub wants a login for the model {wanted}",
            expected="a model that this account may read",
            fix="accept its licence on the hub and set HF_TOKEN, or name a local directory",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"The hub has no model {wanted}, nor is there such a directory",
            expected="a public hub id, or one that HF_TOKEN may read",
            fix="correct the id or the revision, or name a local directory",
        ) from error
    # The client raises HTTP, socket and cache errors of several libraries; all of them mean this.
    except Exception as error:
        raise ModelError(
            f"The model {wanted} could not be fetched ({type(error).__name__}: {_brief(error)})",
            expected=f"an answer from the hub, or a copy in {cache_dir}",
            fix="name a local directory as source, set HF_ENDPOINT to a mirror that is reachable, "
            "or fill the cache once where there is a network and set HF_HUB_OFFLINE=1 here",
        ) from error
    return Path(snapshot)


def _inspect(directory: Path) -> ResolvedModel:
    _check_architecture(directory)
    weight_files = list_weight_files(directory)
    count_parameters(weight_files)  # which reads their headers: a torn file is refused
    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(
            f"{directory} holds no tokenizer",
            expected="tokenizer.json, or one of " + ", ".join(_TOKENIZER_FILES[1:]),
            fix="save the model's tokenizer there: tokenizer.save_pretrained(directory)",
        )
    find_answer_frame(load_tokenizer(directory), str(directory))
    return ResolvedModel(directory, _fingerprint(directory, weight_files))


def _check_architecture(directory: Path) -> None:
    """Refuse a config.json that names no language model which transformers has built in."""
    path = directory / "config.json"
    if not path.is_file():
        adapter = (directory / "adapter_config.json").is_file()
        raise ModelError(
            f"{directory} has no config.json" + (" but is a LoRA adapter" if adapter else ""),
            expected="a whole model in transformers format",
            fix="merge the adapter into its base model first"
            if adapter
            else "name the directory that model.save_pretrained wrote",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "a JSON object", "restore it") from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(
            f"{path} names no architecture",
            expected='a list such as "architectures": ["LlamaForCausalLM"]',
            fix="save the model again with model.save_pretrained, or add the field",
        )
    architecture = str(architectures[0])
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(
            f"{path} names the architecture {architecture}",
            expected="a language model that transformers has built in, such as LlamaForCausalLM; "
            "a model's own code is not run",
            fix="name another model, or the base model of this one",
        )


def _fingerprint(directory: Path, weight_files: list[Path]) -> str:
    digest = hashlib.sha256()
    present = {directory / file for file in _FINGERPRINTED if (directory / file).is_file()}
    for path in sorted(present.union(weight_files)):
        digest.update(f"{path.name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _brief(error: Exception) -> str:
    text = error.found if isinstance(error, RlhfError) else str(error)
    return text.strip().partition("\n")[0][:200]
