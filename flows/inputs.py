"""Raw upstreams of a stage: data files, base models, reward functions, with their hashes."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from tasks.artifacts import ParentRef, file_sha256
from tasks.config.shared import (
    STAGES,
    UNNAMED,
    ModelConfig,
    RuntimeConfig,
    SourceConfig,
    Stage,
    StageConfig,
    identity_fields,
)
from tasks.data.source import (
    InputFile,
    at_revision,
    check_same_columns,
    digest_of,
    find_files,
    is_hub_id,
    resolve_revision,
)
from tasks.distill.config import DistillConfig
from tasks.errors import ClusterError, ConfigError, MissingInputError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import read_key
from tasks.evaluate.prompts import OWN, load_judge_prompts
from tasks.evaluate.questions import answers_to, download_questions, read_questions, read_references
from tasks.evaluate.vllm import check_program
from tasks.ingest.config import IngestConfig, TokenColumnsConfig
from tasks.ingest.sources import check_file
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.sft.config import SftConfig
from tasks.workspace import Workspace

# What an evaluation reads besides the chain's models: files, hub data sets, keys.

DEMO: Final = "demo"


def evaluate_files(cfg: EvaluateConfig, workspace: Workspace) -> dict[str, tuple[Path, str]]:
    """Return the files by name, each with the field that names it; hub questions are downloaded.

    Raises:
        MissingInputError: the hub does not have the questions.
    """
    judging = cfg.judging
    found = {
        f"answers.{name}": (Path(path), f"evaluate.answers.files.{name}")
        for name, path in cfg.answers.files.items()
    }
    if cfg.questions != DEMO:
        path = Path(cfg.questions)
        if is_hub_id(cfg.questions):
            path = download_questions(cfg.questions, workspace.cache_dir)
        found["questions"] = (path, "evaluate.questions")
    if judging.references is not None:
        found["references"] = (Path(judging.references), "evaluate.judging.references")
    if judging.prompts != OWN:
        found["judge_prompts"] = (Path(judging.prompts), "evaluate.judging.prompts")
    return found


def evaluate_fields(cfg: EvaluateConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for the fingerprint; files and models count by their hash."""
    judging, answers = dict(fields["judging"]), dict(fields["answers"])
    for name in ("references", "model"):
        judging[name] = None if judging[name] is None else "file"
    judging["prompts"] = OWN if judging["prompts"] == OWN else "file"
    answers["files"] = dict.fromkeys(sorted(answers["files"]), "file")
    if cfg.answers.backend != "vllm":
        del answers["vllm"]
    questions = DEMO if cfg.questions == DEMO else "file"
    return {**fields, "questions": questions, "judging": judging, "answers": answers}


def check_evaluation(cfg: EvaluateConfig, workspace: Workspace) -> None:
    """Check files and keys before anything is trained.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file in another format, or answers to other questions.
        ConfigError: no key in the environment, or no vLLM.
    """
    files = {}
    for name, (path, field) in evaluate_files(cfg, workspace).items():
        files[name] = _existing(path, field)
    if "questions" in files or cfg.answers.files:
        path = files["questions"] if "questions" in files else demo_questions(workspace)
        questions = read_questions(path)[: cfg.max_questions]
        for name in cfg.answers.files:
            answers_to(files[f"answers.{name}"], questions)
    if "references" in files:
        read_references(files["references"])
    if "judge_prompts" in files:
        load_judge_prompts(str(files["judge_prompts"]))
    if cfg.judge == "openai":
        read_key(cfg.judging.endpoint.api_key_env)
    if cfg.answers.backend == "openai":
        read_key(cfg.answers.endpoint.api_key_env)
    if cfg.answers.backend == "vllm":
        check_program(cfg.answers.vllm)


def demo_questions(workspace: Workspace) -> Path:
    """Write the demo world's questions, the same bytes every time, and return their file."""
    from tasks.demo.world import write_questions

    return Path(write_questions(workspace.cache_dir / "demo-questions.jsonl"))


def _existing(path: Path, field: str) -> Path:
    full = path.expanduser()
    if not full.is_file():
        hint = "give a question.jsonl in FastChat's format, a hub data set, or 'demo'"
        raise MissingInputError(
            f"{field}: no file {full.absolute()}",
            "a file in FastChat's format",
            hint if field == "evaluate.questions" else f"correct {field}",
        )
    return full


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
    for source in cfg.all_sources:
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
    from tasks.ingest.parser import load_renderer

    directory = Path(tokens.model_dir).expanduser().absolute()
    renderer = load_renderer(str(directory), tokens.rendering.model_dump())
    return ParentRef(kind="model", fingerprint=renderer.fingerprint, path=str(directory))


def _ingest_fields(cfg: IngestConfig, fields: dict[str, Any]) -> dict[str, Any]:
    if is_demo(cfg):
        return fields
    fields = {**fields, "source": subset_name(cfg), "demo": None}
    if cfg.splits.assign == "file":
        # A lone file counts by its content alone, but then its name says which split it is.
        splits = [file.split for source in cfg.all_sources for file in find_files(source)]
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
    for source in cfg.all_sources:
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


# Checks of everything a chain will read, before it does any work.

_CONNECT_SECONDS = 5
REWARD_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def check_inputs(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> None:
    """Check files, models and Ray clusters of these stages.

    Raises:
        RlhfError: as `check_sources`.
        ClusterError: nothing answers at a Ray address, or there are too few CPUs or GPUs for
            separate placement groups.
    """
    check_sources(cfg, stages)
    for address in sorted(ray_addresses(cfg, stages)):
        check_ray_address(address)
    for stage, runtime in runtimes_of(cfg, stages).items():
        check_groups(runtime, getattr(cfg, stage).worker_groups)


def check_sources(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> None:
    """Check files and models of these stages.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file is in another format.
        ModelError: a model lacks weights, tokenizer or chat template, or the hub does not have it.
        ConfigError: a reward file without the function named.
    """
    if "ingest" in stages and not is_demo(cfg.ingest):
        for source in cfg.ingest.all_sources:
            check_preferences(source)
    if "evaluate" in stages:
        check_evaluation(cfg.evaluate, Workspace.from_environment())
    reward = cfg.offline_ppo.reward
    if "offline_ppo" in stages and reward.function_path is not None:
        check_reward_function(Path(reward.function_path).expanduser(), reward.function_name)
    for model in models_of(cfg, stages):
        check_model(model)


def models_of(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> list[ModelConfig]:
    """Return the models that are not built from scratch, each once."""
    found: list[ModelConfig] = []
    if "sft" in stages:
        found.append(cfg.sft.model)
    if "distill" in stages and cfg.distill.model is not None:
        found.append(cfg.distill.model)
    judge = cfg.evaluate.judging.model
    if "evaluate" in stages and cfg.evaluate.judge == "transformers" and judge is not None:
        found.append(ModelConfig(source=judge))
    wanted = {(model.source, model.revision): model for model in found if model.source != TINY}
    return list(wanted.values())


def runtimes_of(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> dict[str, RuntimeConfig]:
    """Return the runtime of each stage that has one."""
    sections = {stage: getattr(cfg, stage) for stage in stages}
    return {
        stage: section.runtime for stage, section in sections.items() if hasattr(section, "runtime")
    }


def ray_addresses(cfg: PipelineConfig, stages: Sequence[Stage] = STAGES) -> set[str]:
    """Return the Ray addresses that these stages join."""
    found = {runtime.ray_address for runtime in runtimes_of(cfg, stages).values()}
    return {address for address in found if address is not None}


def check_preferences(source: SourceConfig) -> None:
    """Check that the files of a source are there and of known formats, or that the hub has it.

    Rows are judged by ingestion.
    """
    files = find_files(source)
    for file in files:
        if file.hub is not None:
            resolve_revision(source.path, source.revision)
        else:
            check_file(file)
    check_same_columns(files)


def check_reward_function(path: Path, name: str) -> None:
    """Check that a Python file defines the reward function, without running it."""
    field = "offline_ppo.reward.function_path"
    if not path.is_file():
        raise MissingInputError(
            f"{field}: no file {path.absolute()}", "a Python file", "correct the path"
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {path} is not Python: {error}", "", "correct it") from error
    _check_parameters(path, name, tree)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in defined:
        raise ConfigError(
            f"{field}: {path} defines {defined or 'no function'}",
            f"a function {name}(data_source, solution_str, ground_truth, extra_info)",
            "define it, or set offline_ppo.reward.function_name",
        )


def _check_parameters(path: Path, name: str, tree: ast.Module) -> None:
    """Refuse a reward function that cannot be called with verl's four names."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name != name:
            continue
        names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        missing = [] if node.args.kwarg else sorted(set(REWARD_PARAMETERS) - set(names))
        if missing or node.args.posonlyargs:
            raise ConfigError(
                f"offline_ppo.reward.function_path: {name} in {path} takes {names}",
                f"the parameters {', '.join(REWARD_PARAMETERS)}",
                "rename them",
            )


def check_model(model: ModelConfig) -> None:
    """Check a model directory, or find a hub model and download it."""
    # transformers takes seconds to import, which a chain on the tiny model does not need here.
    from tasks.models.sources import resolve_model

    cache_dir = Workspace.from_environment().cache_dir
    resolve_model(model.source, revision=model.revision, cache_dir=cache_dir)


def check_ray_address(address: str) -> None:
    """Check that something listens at a Ray address; ``auto`` is what `ray start` left here."""
    target = address
    if address == "auto":
        target = os.environ.get("RAY_ADDRESS", "")
        if not target and _CURRENT_CLUSTER.is_file():
            target = _CURRENT_CLUSTER.read_text().strip()
    host, _, port = target.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        found = "no cluster runs on this machine" if address == "auto" else "it is no address"
        raise _no_cluster(address, found)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def check_groups(runtime: RuntimeConfig, groups: int) -> None:
    """Check that several groups of ranks fit into the cluster, or into this machine's GPUs; one
    that is started here has as many CPUs as ranks.

    Raises:
        ClusterError: tells what is needed and what there is.
    """
    if groups == 1:
        return
    if runtime.ray_address is not None:
        _check_cluster(runtime, groups)
    elif runtime.device != "cpu":
        check_gpus(runtime, groups, count_gpus())


@cache
def _check_cluster(runtime: RuntimeConfig, groups: int) -> None:
    """Join the cluster and look; once for all methods of an ablation."""
    from tasks.runtime.session import check_room

    check_room(runtime, groups)


def count_gpus() -> int:
    """Return the GPUs of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpus(runtime: RuntimeConfig, groups: int, n_gpus: int) -> None:
    """Check that this machine has a GPU for each rank, where the ranks will run on GPUs.

    Raises:
        ClusterError: it has fewer.
    """
    if n_gpus >= runtime.ranks * groups or not uses_gpus(runtime, n_gpus):
        return
    ranks = f"runtime.ranks={runtime.ranks}"
    fix = "lower runtime.ranks, set runtime.ray_address, or runtime.device=cpu"
    if groups > 1:
        ranks = f"{groups} groups of {ranks} (runtime.placement=separate)"
        if runtime.ranks <= n_gpus:
            fix = f"set runtime.placement=colocated, {fix}"
    raise ClusterError(
        f"{n_gpus} GPUs on this machine", f"{runtime.ranks * groups} for {ranks}", fix
    )


def uses_gpus(runtime: RuntimeConfig, n_gpus: int) -> bool:
    """Tell whether ranks run on GPUs: told to, or for lack of another word where there are enough
    for a group."""
    return runtime.device == "cuda" or (runtime.device == "auto" and n_gpus >= runtime.ranks)


def _no_cluster(address: str, found: str) -> ClusterError:
    return ClusterError(
        f"runtime.ray_address {address!r} does not answer: {found}",
        "host:port of a running head node",
        "run `ray start --head`, correct the address, or set it to null to start Ray here",
    )
