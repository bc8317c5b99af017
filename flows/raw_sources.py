"""Raw upstreams of a stage: data files, base models, reward functions, with their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.artifacts import ParentRef, file_sha256
from tasks.config import (
    DistillConfig,
    EvaluateConfig,
    IngestConfig,
    ModelConfig,
    OfflinePPOConfig,
    SftConfig,
    StageConfig,
    identity_fields,
)
from tasks.errors import MissingInputError
from tasks.workspace import Workspace

DEMO = "demo"
TINY = "tiny"


def raw_sources(cfg: StageConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return what a stage reads besides the artefacts of other stages; hub models are downloaded.

    Raises:
        MissingInputError: a file or model that is not there.
        ModelError: a model that cannot be used.
    """
    match cfg:
        case IngestConfig():
            return {"source": file_source(preference_file(cfg, workspace), "ingest.source")}
        case SftConfig() if cfg.model.source != TINY:
            return {"model": _model_source(cfg.model, workspace)}
        case OfflinePPOConfig() if cfg.reward.function_path is not None:
            path = Path(cfg.reward.function_path)
            return {"reward_function": file_source(path, "offline_ppo.reward.function_path")}
        case DistillConfig() if cfg.model is not None and cfg.model.source != TINY:
            return {"model": _model_source(cfg.model, workspace)}
        case EvaluateConfig() if cfg.questions != DEMO:
            return {"questions": file_source(Path(cfg.questions), "evaluate.questions")}
    return {}


def result_fields(cfg: StageConfig) -> dict[str, Any]:
    """Return the fields for the fingerprint; a raw file counts by its hash, not by its path."""
    fields = identity_fields(cfg)
    match cfg:
        case IngestConfig() if cfg.source != DEMO:
            return {**fields, "source": subset_name(cfg), "demo": None}
        case EvaluateConfig() if cfg.questions != DEMO:
            return {**fields, "questions": "file"}
        case OfflinePPOConfig() if cfg.reward.function_path is not None:
            return {**fields, "reward": {**fields["reward"], "function_path": "file"}}
    return fields


def subset_name(cfg: IngestConfig) -> str:
    """Return the name of the pairs' subset: the folder of the file, as HH-RLHF is laid out."""
    return DEMO if cfg.source == DEMO else Path(cfg.source).expanduser().absolute().parent.name


def preference_file(cfg: IngestConfig, workspace: Workspace) -> Path:
    """Return the raw file of pairs; the demo world's is written, the same bytes every time."""
    if cfg.source != DEMO:
        return Path(cfg.source).expanduser().absolute()
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
