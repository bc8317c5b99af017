"""Checks of everything a chain will read, before it does any work."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flows.evaluate_inputs import check_evaluation
from flows.raw_sources import TINY, is_demo
from tasks.config import (
    STAGES,
    ModelConfig,
    PipelineConfig,
    RuntimeConfig,
    SourceConfig,
    Stage,
)
from tasks.data.chunk_sources import check_file
from tasks.data.hub import resolve_revision
from tasks.data.inputs import check_same_columns, find_files, source_configs
from tasks.errors import ClusterError, ConfigError, MissingInputError
from tasks.workspace import Workspace

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
        for source in source_configs(cfg.ingest):
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
    from tasks.backends.cluster import check_room

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
