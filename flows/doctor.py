"""What this machine has, and what of a config would fail on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flows.environment import API_URL
from flows.memory import StageMemory, estimate, gpu_stages, shape_of
from flows.preflight import (
    check_gpus,
    check_groups,
    check_ray_address,
    check_sources,
    count_gpus,
    models_of,
    ray_addresses,
    runtimes_of,
)
from flows.raw_sources import TINY
from flows.temporary_server import is_healthy
from tasks.config import STAGES, ModelConfig, PipelineConfig, RuntimeConfig
from tasks.errors import RlhfError, sentence
from tasks.provenance import DISTRIBUTION, package_versions
from tasks.workspace import Workspace

_PROBE_SECONDS = 5
_WANTED_MEMORY_BYTES = 4 * 2**30
_WANTED_SHM_BYTES = 600 * 2**20
_HUB = "https://huggingface.co"
_PACKAGE = "package:"  # as in tasks.models.packages, which takes seconds to import
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


class Finding(BaseModel):
    """One line of the examination; ``fail`` means that the config would not run here."""

    subject: str
    status: Literal["ok", "note", "warn", "fail"]
    detail: str


def examine(cfg: PipelineConfig, workspace: Workspace) -> list[Finding]:
    """Look at packages, accelerators, memory, disk, servers, files and models."""
    return [
        *_packages(),
        *_accelerators(cfg),
        *_memory(),
        _checked("workspace", workspace.prepare, f"{workspace.root}, {_free_gib(workspace)}"),
        *_ray(cfg),
        _prefect(),
        _mlflow(cfg, workspace),
        *_files(cfg),
        *_models(cfg, workspace),
        *gpu_memory(cfg, workspace),
    ]


def _checked(subject: str, check: Callable[[], object], detail: str) -> Finding:
    try:
        check()
    except RlhfError as error:
        return Finding(subject=subject, status="fail", detail=str(error))
    return Finding(subject=subject, status="ok", detail=detail)


def _failed(subject: str, check: Callable[[], object]) -> list[Finding]:
    """Return a line where the check fails."""
    found = _checked(subject, check, "")
    return [found] if found.status == "fail" else []


def _packages() -> Iterable[Finding]:
    versions = package_versions()
    # The project itself may run from its source tree.
    missing = [
        name
        for name, version in versions.items()
        if version == "not installed" and name != DISTRIBUTION
    ]
    text = f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    yield Finding(subject="packages", status="fail" if missing else "ok", detail=text)


def _accelerators(cfg: PipelineConfig) -> Iterable[Finding]:
    import torch

    n_gpus = count_gpus()
    names = [
        f"{torch.cuda.get_device_name(i)}"
        f" ({torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
        for i in range(n_gpus)
    ]
    cpus = f"{os.cpu_count()} CPU cores"
    yield Finding(
        subject="accelerators",
        status="ok",
        detail=", ".join([*names, cpus]) if names else f"no GPU, {cpus}",
    )
    for stage, runtime in runtimes_of(cfg).items():
        if runtime.ray_address is None:
            groups = getattr(cfg, stage).worker_groups
            yield from _failed(f"{stage}.runtime", partial(check_gpus, runtime, groups, n_gpus))
        if runtime.attention == "flash_attention_2" and not importlib.util.find_spec("flash_attn"):
            yield Finding(
                subject=f"{stage}.runtime",
                status="fail",
                detail="attention is flash_attention_2, but flash-attn is not installed. "
                "Fix: install it, or set runtime.attention=sdpa.",
            )


def _memory() -> Iterable[Finding]:
    memory = psutil.virtual_memory()
    limit = _memory_limit_bytes()
    available = min(memory.available, limit) if limit else memory.available
    text = f"{available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f}"
    if limit:
        text += f", limited to {limit / 2**30:.1f}"
    status: Literal["ok", "warn"] = "ok" if available >= _WANTED_MEMORY_BYTES else "warn"
    yield Finding(subject="memory", status=status, detail=text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        yield Finding(
            subject="shared memory",
            status="ok" if free >= _WANTED_SHM_BYTES else "warn",
            detail=f"{free / 2**20:.0f} MiB free in {shared}; Ray's object store wants 512 MiB",
        )


def _memory_limit_bytes() -> int | None:
    """Return the limit of the control group this process is in, as in a container."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _free_gib(workspace: Workspace) -> str:
    root = workspace.root
    while not root.exists():
        root = root.parent
    return f"{shutil.disk_usage(root).free / 2**30:.1f} GiB free"


def _ray(cfg: PipelineConfig) -> Iterable[Finding]:
    addresses = ray_addresses(cfg)
    if not addresses:
        yield Finding(subject="ray", status="ok", detail="started here for each run")
    for address in sorted(addresses):
        yield _checked("ray", partial(check_ray_address, address), f"{address} answers")
    for stage, runtime in runtimes_of(cfg).items():
        groups = getattr(cfg, stage).worker_groups
        if runtime.ray_address is not None and groups > 1:
            text = f"{runtime.ray_address} has room for {groups} groups of {runtime.ranks} ranks"
            yield _checked(f"{stage}.runtime", partial(_check_cluster, runtime, groups), text)


def _check_cluster(runtime: RuntimeConfig, groups: int) -> None:
    assert runtime.ray_address is not None
    # Ray itself waits much longer for a cluster that does not answer.
    check_ray_address(runtime.ray_address)
    check_groups(runtime, groups)


def _prefect() -> Finding:
    url = os.environ.get(API_URL)
    if not url:
        return Finding(subject="prefect", status="ok", detail="a temporary server for each run")
    if is_healthy(url, _PROBE_SECONDS):
        return Finding(subject="prefect", status="ok", detail=f"{url} answers")
    text = f"{API_URL}={url} does not answer. Fix: start it, or unset {API_URL}."
    return Finding(subject="prefect", status="fail", detail=text)


def _mlflow(cfg: PipelineConfig, workspace: Workspace) -> Finding:
    from tasks.tracking import connect

    uri = cfg.tracking.tracking_uri or workspace.tracking_uri
    return _checked(
        "mlflow",
        partial(connect, cfg.tracking, workspace),
        f"{uri}, experiment {cfg.tracking.experiment}",
    )


def _files(cfg: PipelineConfig) -> Iterable[Finding]:
    named = {
        "ingest": ", ".join(s.path for s in cfg.ingest.sources) or cfg.ingest.source,
        "evaluate": cfg.evaluate.questions,
        "offline_ppo": cfg.offline_ppo.reward.function_path,
    }
    for stage in STAGES:
        if stage in named and named[stage] is not None:
            yield _checked(
                f"{stage} file",
                partial(check_sources, cfg, [stage]),
                str(named[stage]),
            )


def _models(cfg: PipelineConfig, workspace: Workspace) -> Iterable[Finding]:
    models = models_of(cfg)
    is_hub_needed = False
    for model in models:
        if model.source.startswith(_PACKAGE):
            yield package_model(model, workspace)
        elif Path(model.source).expanduser().is_dir():
            yield _checked("model", partial(_resolve, model, workspace), model.source)
        elif _cached_dir(model, workspace) is not None:
            yield Finding(subject="model", status="ok", detail=f"{model.source} is downloaded")
        else:
            is_hub_needed = True
            yield _hub_model(model)
    if not models:
        yield Finding(subject="model", status="ok", detail="tiny, built from scratch")
    yield _hub(is_hub_needed)


def _resolve(model: ModelConfig, workspace: Workspace) -> None:
    from tasks.models.sources import resolve_model

    resolve_model(model.source, revision=model.revision, cache_dir=workspace.cache_dir)


def package_model(model: ModelConfig, workspace: Workspace) -> Finding:
    """Verify a converted package, or ask pip whether there is one; nothing is fetched."""
    from tasks.models import packages

    try:
        name, package = packages.find_package(model.source)
    except RlhfError as error:
        return Finding(subject="model", status="fail", detail=str(error))
    directory = packages.converted_dir(name, workspace.cache_dir)
    if directory.exists():
        return _checked(
            "model", partial(_resolve, model, workspace), f"{model.source}, {directory}"
        )
    wanted = f"{package.distribution} {package.version}"
    if packages.wheel_path(name, workspace.cache_dir).is_file():
        text = f"{model.source}: {wanted} is downloaded, and converted at the first run"
        return Finding(subject="model", status="ok", detail=text)
    reason = packages.why_not_on_index(name)
    if reason is None:
        text = f"{model.source}: {wanted} is on the package index, and fetched at the first run"
        return Finding(subject="model", status="ok", detail=text)
    text = sentence(f"{model.source}: pip does not find {wanted}: {reason}")
    fix = "Fix: configure an index that has it, or name a local directory."
    return Finding(subject="model", status="fail", detail=f"{text} {fix}")


def _cached_dir(model: ModelConfig, workspace: Workspace) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model.source,
            revision=model.revision,
            cache_dir=workspace.cache_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def _hub_model(model: ModelConfig) -> Finding:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(model.source, revision=model.revision, timeout=_PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        text = sentence(f"{model.source} cannot be fetched: {reason}")
        detail = f"{text} Fix: name a local directory."
        return Finding(subject="model", status="fail", detail=detail)
    return Finding(subject="model", status="ok", detail=f"{model.source} is on the hub")


def _hub(is_needed: bool) -> Finding:
    url = os.environ.get("HF_ENDPOINT") or _HUB
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_SECONDS):
            return Finding(subject="hub", status="ok", detail=f"{url} answers")
    except (urllib.error.URLError, OSError, ValueError) as error:
        need = "the config needs it" if is_needed else "the config does not need it"
        text = f"{url} does not answer ({error}); {need}"
        return Finding(subject="hub", status="fail" if is_needed else "note", detail=text)


def gpu_memory(cfg: PipelineConfig, workspace: Workspace) -> Iterable[Finding]:
    """Compare what the stages need of each GPU with the smallest one here."""
    import torch

    n_gpus = count_gpus()
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(n_gpus)]
    student = cfg.distill.model or cfg.sft.model
    shapes = [shape_of(model, _model_dir(model, workspace)) for model in (cfg.sft.model, student)]
    if shapes[0] is None or shapes[1] is None:
        return
    for stage in gpu_stages(cfg, estimate(cfg, shapes[0], shapes[1]), n_gpus):
        yield gpu_finding(stage, min(sizes, default=None))


def _model_dir(model: ModelConfig, workspace: Workspace) -> Path | None:
    from tasks.models import packages

    if model.source == TINY:
        return None
    if model.source.startswith(_PACKAGE):
        name = model.source.removeprefix(_PACKAGE)
        is_known = name in packages.PACKAGES
        return packages.converted_dir(name, workspace.cache_dir) if is_known else None
    local = Path(model.source).expanduser()
    return local if local.is_dir() else _cached_dir(model, workspace)


def gpu_finding(stage: StageMemory, gpu_bytes: int | None) -> Finding:
    """Return a line about a stage and GPUs of this size; None = there are none here."""
    subject = " ".join(filter(None, (stage.stage, stage.group, "memory")))
    if gpu_bytes is None:
        detail = f"{stage}; there is no GPU here to compare with"
        return Finding(subject=subject, status="note", detail=detail)
    has = f"{gpu_bytes / 2**30:.1f} GiB of a GPU here"
    if stage.fits(gpu_bytes):
        return Finding(subject=subject, status="ok", detail=f"{stage}, of {has}")
    fix = "lower runtime.tokens_per_micro_batch, set runtime.gradient_checkpointing, or raise ranks"
    if stage.per_rank <= gpu_bytes:
        fix += ", or answer fewer prompts at a time (probe_prompts, report.prompts, batch_size)"
    return Finding(
        subject=subject,
        # What a micro-batch needs is an upper bound, the states are not.
        status="fail" if stage.states.total > gpu_bytes else "warn",
        detail=f"{stage}: does not fit into {has}. Fix: {fix}.",
    )


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print a line per finding and a verdict."""
    table = Table("what", "state", "detail", show_lines=False)
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(finding.subject, f"[{colour}]{finding.status}[/]", finding.detail)
    console.print(table)
    n_failed = sum(finding.status == "fail" for finding in findings)
    verdict = f"{n_failed} would fail." if n_failed else "Nothing would fail."
    console.print(verdict)
