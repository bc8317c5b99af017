"""What each stage reads besides the artefacts of others, and the machines that it asks for: their
identity for the fingerprint, and checks before any work."""

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
from tasks.errors import ClusterError, ConfigError, MissingInputError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import read_key
from tasks.evaluate.prompts import OWN, load_judge_prompts
from tasks.evaluate.questions import answers_to, download_questions, read_questions, read_references
from tasks.ingest.config import IngestConfig, TokenColumnsConfig
from tasks.ingest.sources import check_file
from tasks.offline_ppo.config import DEFAULT_RULES, GuardRuleConfig, OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import Workspace

DEMO: Final = "demo"
TINY: Final = "tiny"


def file_source(path: Path, field: str) -> ParentRef:
    """Return the reference of a raw file.

    Raises:
        MissingInputError: no such file; ``field`` says where its name came from.
    """
    full = existing_file(path, field)
    return ParentRef(kind="file", fingerprint=file_sha256(full), path=str(full))


def existing_file(path: Path, field: str) -> Path:
    """Return the absolute path of a file that ``field`` of the config names.

    Raises:
        MissingInputError: no such file.
    """
    full = path.expanduser().absolute()
    if not full.is_file():
        fix = f"correct {field}"
        if field == "evaluate.questions":
            fix = "give a question.jsonl in FastChat's format, a hub data set, or 'demo'"
        raise MissingInputError(f"{field}: no file {full}", "a readable file", fix)
    return full


def model_source(model: ModelConfig, workspace: Workspace) -> ParentRef:
    """Return the reference of a model, which is downloaded where it is on the hub.

    Raises:
        ModelError: it lacks weights, tokenizer or chat template, or the hub does not have it.
    """
    # transformers takes seconds to import, which a chain on the tiny model does not need here.
    from tasks.models.sources import resolve_model

    found = resolve_model(model.source, revision=model.revision, cache_dir=workspace.cache_dir)
    return ParentRef(kind="model", fingerprint=found.fingerprint, path=str(found.path))


# Ingestion: files of pairs, hub data sets, the demo world, the tokenizer of the token columns.


def is_demo(cfg: IngestConfig) -> bool:
    """Tell whether the pairs are the demo world's."""
    return cfg.source == DEMO and not cfg.sources


def ingest_sources(cfg: IngestConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return a reference for each source, and one for the tokenizer of the token columns."""
    if is_demo(cfg):
        return {UNNAMED: file_source(_demo_pairs(cfg, workspace), "ingest.source")}
    found = {_label(source): _source_ref(source) for source in cfg.all_sources}
    if cfg.tokens is not None:
        found["tokenizer"] = _tokenizer_ref(cfg.tokens)
    return found


def _label(source: SourceConfig) -> str:
    return source.name if source.name == UNNAMED else f"{UNNAMED}.{source.name}"


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


def ingest_fields(cfg: IngestConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for the fingerprint: files count by their hash, not by their path."""
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
        commit = sources[_label(source)].path.rpartition("@")[2]
        for file in find_files(source):
            files.append(file if file.hub is None else at_revision(file, commit))
    return files


def _demo_pairs(cfg: IngestConfig, workspace: Workspace) -> Path:
    """Write the demo world's pairs, the same bytes every time, and return their file."""
    from tasks.demo.world import write_pairs

    world = cfg.demo
    name = f"demo-{world.n_pairs}-{world.flip_rate:g}-{cfg.seed}.jsonl"
    workspace.cache_dir.mkdir(parents=True, exist_ok=True)
    path = workspace.cache_dir / name
    write_pairs(path, world.n_pairs, cfg.seed, world.flip_rate)
    return path


def check_pairs(cfg: IngestConfig, workspace: Workspace) -> None:
    """Check that the files are there and of known formats, or that the hub has them; rows are
    judged by ingestion.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file is in another format.
    """
    if is_demo(cfg):
        return
    for source in cfg.all_sources:
        files = find_files(source)
        for file in files:
            if file.hub is not None:
                resolve_revision(source.path, source.revision)
            else:
                check_file(file)
        check_same_columns(files)


# Offline PPO: files with a reward function and a sampler.

REWARD_FUNCTION: Final = "offline_ppo.reward.function_path"
SAMPLER: Final = "offline_ppo.sampler.path"
_RETIRED_RULE: Final = GuardRuleConfig(
    name="reward_variance", when="reward_variance > 0.3", batch_scale=2.0
)
REWARD_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def own_code(cfg: OfflinePPOConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return references of the user's files: a reward function, a sampler."""
    files = {
        "reward_function": (cfg.reward.function_path, REWARD_FUNCTION),
        "sampler": (cfg.sampler.path, SAMPLER),
    }
    return {
        name: file_source(Path(path), field)
        for name, (path, field) in files.items()
        if path is not None
    }


def own_code_fields(cfg: OfflinePPOConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for the fingerprint: the user's files count by their text."""
    if cfg.reward.function_path is not None:
        fields = {**fields, "reward": {**fields["reward"], "function_path": "file"}}
    if cfg.sampler.path is not None:
        fields = {**fields, "sampler": {**fields["sampler"], "path": "file"}}
    if cfg.guards.rules == DEFAULT_RULES:
        # A rule left the defaults, because what it watched says nothing of the policy. What was
        # trained beside it is reused, and what was begun goes on.
        rules = [*fields["guards"]["rules"]]
        rules.insert(5, _RETIRED_RULE.model_dump(mode="json"))
        fields = {**fields, "guards": {**fields["guards"], "rules": rules}}
    return fields


def check_own_code(cfg: OfflinePPOConfig, workspace: Workspace) -> None:
    """Check the user's files, as far as that goes without running them."""
    if cfg.reward.function_path is not None:
        check_reward_function(Path(cfg.reward.function_path), cfg.reward.function_name)
    if cfg.sampler.path is not None:
        existing_file(Path(cfg.sampler.path), SAMPLER)


def check_reward_function(file: Path, name: str) -> None:
    """Check that a Python file defines the reward function, without running it.

    Raises:
        MissingInputError: the file is not there.
        ConfigError: it is not Python, or lacks the function named, with verl's four parameters.
    """
    path = existing_file(file, REWARD_FUNCTION)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{REWARD_FUNCTION}: {path} is not Python: {error}", "", "correct it"
        ) from error
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ConfigError(
            f"{REWARD_FUNCTION}: {path} defines {list(functions) or 'no function'}",
            f"a function {name}({', '.join(REWARD_PARAMETERS)})",
            "define it, or set offline_ppo.reward.function_name",
        )
    taken = functions[name]
    names = [argument.arg for argument in (*taken.args, *taken.kwonlyargs)]
    is_lacking = not taken.kwarg and not set(REWARD_PARAMETERS) <= set(names)
    if is_lacking or taken.posonlyargs:
        raise ConfigError(
            f"{REWARD_FUNCTION}: {name} in {path} takes {names}",
            f"the parameters {', '.join(REWARD_PARAMETERS)}",
            "rename them",
        )


# Evaluation: questions, answers, references, prompts of the judge, its model, keys.


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


def evaluate_sources(cfg: EvaluateConfig, workspace: Workspace) -> dict[str, ParentRef]:
    """Return a reference for each of these files."""
    files = evaluate_files(cfg, workspace)
    return {name: file_source(path, field) for name, (path, field) in files.items()}


def judge_model(cfg: EvaluateConfig) -> dict[str, ModelConfig | None]:
    """Return the language model that judges here, if there is one."""
    is_used = cfg.judge == "transformers" and cfg.judging.model is not None
    return {"judge_model": ModelConfig(source=str(cfg.judging.model)) if is_used else None}


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
    files = {
        name: existing_file(path, field)
        for name, (path, field) in evaluate_files(cfg, workspace).items()
    }
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
        # It imports torch, which nobody else needs here.
        from tasks.evaluate.vllm import check_program

        check_program(cfg.answers.vllm)


def demo_questions(workspace: Workspace) -> Path:
    """Write the demo world's questions, the same bytes every time, and return their file."""
    from tasks.demo.world import write_questions

    return Path(write_questions(workspace.cache_dir / "demo-questions.jsonl"))


# Ray clusters and GPUs, before any work.

_CONNECT_SECONDS = 5
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


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
