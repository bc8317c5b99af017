"""Raw upstreams of a stage: data files, base models, reward functions, with their hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.evaluate_inputs import DEMO, evaluate_fields, evaluate_files
from tasks.artifacts import ParentRef, file_sha256
from tasks.config import (
    DistillConfig,
    EvaluateConfig,
    IngestConfig,
    ModelConfig,
    OfflinePPOConfig,
    SftConfig,
    SourceConfig,
    StageConfig,
    TokenColumnsConfig,
    identity_fields,
)
from tasks.data.chunk_jobs import InputFile
from tasks.data.hub import resolve_revision
from tasks.data.inputs import UNNAMED, at_revision, digest_of, find_files, source_configs
from tasks.errors import MissingInputError
from tasks.workspace import Workspace

TINY = "tiny"


def raw_sources(cfg: StageConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return what a stage reads besides the artefacts of other stages; hub models are downloaded.

    Raises:
        MissingInputError: a file or model that is not there.
        ModelError: a model that cannot be used.
    """
    match cfg:
        case IngestConfig():
            return _ingest_sources(cfg, workspace)
        case SftConfig() if cfg.model.source != TINY:
            return {"model": _model_source(cfg.model, workspace)}
        case OfflinePPOConfig() if cfg.reward.function_path is not None:
            path = Path(cfg.reward.function_path)
            return {"reward_function": file_source(path, "offline_ppo.reward.function_path")}
        case DistillConfig() if cfg.model is not None and cfg.model.source != TINY:
            return {"model": _model_source(cfg.model, workspace)}
        case EvaluateConfig():
            return _evaluate_sources(cfg, workspace)
    return {}


def result_fields(cfg: StageConfig) -> dict[str, Any]:
    """Return the fields for the fingerprint; a raw file counts by its hash, not by its path."""
    fields = identity_fields(cfg)
    match cfg:
        case IngestConfig():
            return _ingest_fields(cfg, fields)
        case EvaluateConfig():
            return evaluate_fields(cfg, fields)
        case OfflinePPOConfig() if cfg.reward.function_path is not None:
            return {**fields, "reward": {**fields["reward"], "function_path": "file"}}
    return fields


def _evaluate_sources(cfg: EvaluateConfig, workspace: Workspace) -> dict[str, ParentRef]:
    files = evaluate_files(cfg, workspace)
    found = {name: file_source(path, field) for name, (path, field) in files.items()}
    if cfg.judge == "transformers" and cfg.judging.model is not None:
        found["judge_model"] = _model_source(ModelConfig(source=cfg.judging.model), workspace)
    return found


def is_demo(cfg: IngestConfig) -> bool:
    """Tell whether the pairs are the demo world's."""
    return cfg.source == DEMO and not cfg.sources


def _ingest_sources(cfg: IngestConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return a reference for each source, and one for the tokenizer of the token columns."""
    if is_demo(cfg):
        return {"source": file_source(preference_file(cfg, workspace), "ingest.source")}
    found = {}
    for source in source_configs(cfg):
        name = source.name if source.name == UNNAMED else f"{UNNAMED}.{source.name}"
        found[name] = _source_ref(source)
    if cfg.tokens is not None:
        found["tokenizer"] = _tokenizer_ref(cfg.tokens)
    return found


def _source_ref(source: SourceConfig) -> ParentRef:
    files = find_files(source)
    if files[0].hub is not None:
        commit = resolve_revision(source.path, source.revision)
        path = f"{source.path}@{commit}"
        asked = {k: v for k, v in files[0].hub.items() if k != "revision"} | {"commit": commit}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return ParentRef(kind="hub", fingerprint=digest, path=path)
    if len(files) == 1 and Path(source.path).expanduser().is_file():
        return file_source(Path(source.path), f"ingest source {source.name}")
    path = str(Path(source.path).expanduser().absolute())
    return ParentRef(kind="files", fingerprint=digest_of(files), path=path)


def _tokenizer_ref(tokens: TokenColumnsConfig) -> ParentRef:
    from tasks.data.pair_tokens import load_renderer

    directory = Path(tokens.model_dir).expanduser().absolute()
    renderer = load_renderer(str(directory), tokens.rendering.model_dump())
    return ParentRef(kind="model", fingerprint=renderer.fingerprint, path=str(directory))


def _ingest_fields(cfg: IngestConfig, fields: dict[str, Any]) -> dict[str, Any]:
    if is_demo(cfg):
        return fields
    fields = {**fields, "source": subset_name(cfg), "demo": None}
    if cfg.splits.assign == "file":
        # A lone file counts by its content alone, but then its name says which split it is.
        splits = [file.split for source in source_configs(cfg) for file in find_files(source)]
        fields["splits"] = {**fields["splits"], "files": splits}
    if cfg.tokens is not None:
        fields["tokens"] = {**fields["tokens"], "model_dir": "directory"}
    # Where a source lies does not count; what its rows are called does, and is in their subset.
    fields["sources"] = [
        {**source.model_dump(mode="json"), "path": _short(source.path), "revision": None}
        for source in cfg.sources
    ]
    return fields


def _short(path: str) -> str:
    full = Path(path).expanduser().absolute()
    return f"{full.parent.name}/{full.name}"


def subset_name(cfg: IngestConfig) -> str:
    """Return the name of the pairs' subset: the folder of the file, as HH-RLHF is laid out."""
    if is_demo(cfg):
        return DEMO
    path = Path(cfg.source).expanduser().absolute()
    return path.name if path.is_dir() else path.parent.name


def input_files(cfg: IngestConfig, sources: Mapping[str, ParentRef]) -> list[InputFile]:
    """Return the files that ingestion reads, hub data sets at the commit that was resolved."""
    if is_demo(cfg):
        path = sources[UNNAMED].path
        return [InputFile(path, Path(path).name, DEMO, DEMO)]
    files = []
    for source in source_configs(cfg):
        name = source.name if source.name == UNNAMED else f"{UNNAMED}.{source.name}"
        for file in find_files(source):
            commit = sources[name].path.rpartition("@")[2]
            files.append(file if file.hub is None else at_revision(file, commit))
    return files


def preference_file(cfg: IngestConfig, workspace: Workspace) -> Path:
    """Write the demo world's pairs, the same bytes every time, and return their file."""
    from tasks.demo.world import write_pairs

    world = cfg.demo
    name = f"demo-{world.n_pairs}-{world.flip_rate:g}-{cfg.seed}.jsonl"
    workspace.cache_dir.mkdir(parents=True, exist_ok=True)
    path = workspace.cache_dir / name
    write_pairs(path, world.n_pairs, cfg.seed, world.flip_rate)
    return path


def file_source(path: Path, field: str) -> ParentRef:
    """Return the reference of a raw file.

    Raises:
        MissingInputError: no such file; ``field`` says where its name came from.
    """
    full = path.expanduser().absolute()
    if not full.is_file():
        raise MissingInputError(f"{field}: no file {full}", "a readable file", f"correct {field}")
    return ParentRef(kind="file", fingerprint=file_sha256(full), path=str(full))


def _model_source(model: ModelConfig, workspace: Workspace) -> ParentRef:
    from tasks.models.sources import resolve_model

    found = resolve_model(model.source, revision=model.revision, cache_dir=workspace.cache_dir)
    return ParentRef(kind="model", fingerprint=found.fingerprint, path=str(found.path))
