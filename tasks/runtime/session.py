"""The driver's side of the workers: what the stages call."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import torch

from tasks.config.shared import RuntimeConfig
from tasks.context import RunLog, run_logger
from tasks.errors import ClusterError, ConfigError, MemoryLimitError, TrainingError, WorkerLostError
from tasks.models.loading import list_weight_files
from tasks.runtime import placement
from tasks.runtime.logits_hooks import FLAG, LogitsHook
from tasks.runtime.placement import release, reserve
from tasks.runtime.rows import (
    Batch,
    HostSpec,
    RoleSpec,
    Row,
    before_tokens,
    metrics_of,
    plan_calls,
    reduce_metrics,
    to_tensordict,
)

# What Ray workers print, in the log of the run that uses them.

Logger = logging.Logger | logging.LoggerAdapter[Any]

_RAYS_HANDLER = "ray_print_logs"
_HANDLER = "rlhf_run_log"
_WINDOW_SECONDS = 60.0
_LINES_PER_WINDOW = 500
_BAR = re.compile(r"\d%\|.*\[.*\]$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LineForwarder:
    """Hands lines of workers to a logger, progress bars left out. Safe to call from any thread.

    A worker that prints without end would fill the server's database, so that of each minute only
    the first 500 lines are kept, and the others counted.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.logger: Logger | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._window_start = clock()
        self._n_lines = 0

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """Take a batch as Ray hands it out: ``lines`` of one process, ``pid``, ``ip``."""
        # Ray's own processes, such as the autoscaler, have a name where workers have a number.
        if self.logger is None or not str(batch["pid"]).isdigit():
            return
        where = f"worker {batch['pid']}"
        if not batch.get("localhost", True):
            where += f" on {batch['ip']}"
        with self._lock:
            for line in batch["lines"]:
                if not _BAR.search(str(line)):
                    self._forward(self.logger, where, _COLOUR.sub("", str(line)).rstrip())

    def _forward(self, logger: Logger, where: str, line: str) -> None:
        now = self._clock()
        if now - self._window_start >= _WINDOW_SECONDS:
            left_out = self._n_lines - _LINES_PER_WINDOW
            if left_out > 0:
                logger.warning("%d lines of workers were left out", left_out)
            self._window_start, self._n_lines = now, 0
        self._n_lines += 1
        if line and self._n_lines <= _LINES_PER_WINDOW:
            logger.info("%s: %s", where, line)


_FORWARDER = LineForwarder()


def forward_to(logger: Logger) -> None:
    """Send what workers print from now on to this logger."""
    _FORWARDER.logger = logger


def listen() -> None:
    """Take over from Ray, which would print the lines on the terminal; call after ``ray.init``."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    for name in (_RAYS_HANDLER, _HANDLER):
        dispatcher.remove_handler(name)
    dispatcher.add_handler(_HANDLER, _FORWARDER)


# Ray: started once for the whole chain, or joined by address.

_CLUSTER_ID_METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ANSWER_SECONDS: Final = 10.0
# What Ray says when its own processes needed more than 30 s.
_SLOW_START: Final = "timed out during startup"
_OBJECT_STORE_BYTES = 512 * 2**20
PLATFORM_MODULE = "tasks.runtime.verl_platform"


# Of variables that `enter_worker_environment` set: the value before, None = there was none.
_FOUND: dict[str, str | None] = {}


def worker_environment(device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Return the environment that verl processes need, here and on every node."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": "ERROR",
        # Threads that spin while they wait make a busy machine many times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Some microseconds of waiting for the next small matrix, before the thread is put to sleep:
        # a fifth of a step of the tiny model.
        "GOMP_SPINCOUNT": "10000",
    }
    if device == "cpu":
        environment |= {
            "VERL_USE_EXTERNAL_MODULES": PLATFORM_MODULE,
            "VERL_PLATFORM": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Keep freed memory instead of giving it back and faulting it in again at every step:
            # an eighth of the time of a small model's training.
            "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
            "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
        }
    return environment


def enter_worker_environment(device: Literal["cpu", "cuda"]) -> None:
    """Set in this process what verl needs, and remember what was there."""
    for name, value in worker_environment(device).items():
        _FOUND.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def outer_environment() -> dict[str, str]:
    """Return the environment as this process found it, for programs that are no workers."""
    environment = dict(os.environ)
    for name, value in _FOUND.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def resolve_device(runtime: RuntimeConfig) -> Literal["cpu", "cuda"]:
    """Return the device that training runs on.

    Raises:
        ClusterError: ``cuda`` was asked for and neither this machine nor the cluster has a GPU.
    """
    if runtime.device == "cpu":
        return "cpu"
    connect(runtime)
    import ray

    n_gpus = int(ray.cluster_resources().get("GPU", 0))
    if runtime.device == "cuda" and n_gpus < runtime.ranks:
        raise ClusterError(
            f"The Ray cluster has {n_gpus} GPUs",
            f"{runtime.ranks} for runtime.ranks={runtime.ranks}",
            "lower runtime.ranks, set runtime.ray_address, or set runtime.device: cpu",
        )
    return "cuda" if n_gpus >= runtime.ranks else "cpu"


def make_room(runtime: RuntimeConfig, n_ranks: int) -> None:
    """Connect, to a cluster with a CPU for each rank where it is started on this machine.

    One that was started here for an earlier stage, which needed less, is replaced.

    Args:
        runtime: where Ray is.
        n_ranks: of all groups; no worker may be alive.

    Raises:
        ClusterError: as `connect`.
    """
    if runtime.ray_address is None and _started_here().get("cpus", n_ranks) < n_ranks:
        disconnect()
    connect(runtime, n_ranks)


def check_room(runtime: RuntimeConfig, groups: int) -> None:
    """Refuse a cluster that could not hold all ranks even if nothing else ran there; whoever was
    not connected is not afterwards.

    Args:
        runtime: where Ray is, and the ranks of a group.
        groups: of as many ranks.

    Raises:
        ClusterError: tells what is needed and what each node has; or as `connect`.
    """
    import ray

    was_connected = ray.is_initialized()
    try:
        connect(runtime)
        host = HostSpec.from_runtime(runtime, resolve_device(runtime), groups)
        placement.check_room(host)
    finally:
        if not was_connected:
            disconnect()


@cache
def _started_here() -> dict[str, int]:
    """Hold how many CPUs the cluster has that this process started; empty when there is none."""
    return {}


def connect(runtime: RuntimeConfig, n_ranks: int | None = None) -> None:
    """Join the cluster at ``runtime.ray_address``, or start one on this machine; do nothing when
    connected.

    Args:
        runtime: where Ray is.
        n_ranks: for which a cluster is started here; ``runtime.ranks`` unless given.

    Raises:
        ClusterError: nothing answers at the address within ``ray_start_timeout_seconds``.
    """
    address = runtime.ray_address
    if address is not None:
        _use_token(address)
    import ray

    if ray.is_initialized():
        return
    device: Literal["cpu", "cuda"] = (
        "cpu" if runtime.device == "cpu" or not _has_gpu(address) else "cuda"
    )
    options = {
        "include_dashboard": False,
        # The lines go to the run's log: see worker_logs.
        "log_to_driver": True,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": worker_environment(device)},
    }
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    with _own_signal_handler():
        _start_or_join(runtime, n_ranks or runtime.ranks, options)
    listen()


def _start_or_join(runtime: RuntimeConfig, n_ranks: int, options: dict[str, Any]) -> None:
    import ray

    address = runtime.ray_address
    if address is None:
        _start(max(2, n_ranks + 1, os.cpu_count() or 1), options)
        return
    _check_reachable(address, runtime.ray_start_timeout_seconds)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_answer(address, str(error)) from error


def _start(n_cpus: int, options: dict[str, Any]) -> None:
    """Start a cluster on this machine; where it is busy with other work, try once more.

    Raises:
        ClusterError: Ray gave up twice.
    """
    import ray

    for attempts_left in (1, 0):
        try:
            # "local": without it Ray joins a cluster that somebody started on this machine.
            ray.init(
                address="local",
                num_cpus=n_cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        except Exception as error:  # Ray has no class for it
            if _SLOW_START not in str(error):
                raise
            ray.shutdown()
            if not attempts_left:
                raise ClusterError(
                    "Ray did not start on this machine, twice in half a minute each",
                    "a cluster of its own",
                    "run the command again when less else runs here (`uptime` tells the load), or "
                    "name a running cluster by runtime.ray_address",
                ) from error
        else:
            _started_here()["cpus"] = n_cpus
            return


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Keep this process's answer to SIGTERM, which Ray replaces by an abort with a native dump."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _use_token(address: str) -> None:
    """Send this user's token to a cluster that asks for one: Ray 2.60 sends none unasked.

    Where it is sent it is demanded, too: a cluster without tokens, which is not let in to ask about
    the actors of this process, takes it for dead and ends them.
    """
    has_token = (Path.home() / ".ray" / "auth_token").is_file() or any(
        name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    )
    if has_token and asks_for_token(address):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def asks_for_token(address: str) -> bool:
    """Tell whether a cluster refuses who has no token; True where that cannot be found out.

    Asked before Ray is imported, which reads once whether to use tokens.
    """
    if address in ("auto", "local") or "://" in address:
        return True
    import grpc

    with grpc.insecure_channel(address) as channel:
        # A message without fields is empty.
        ask = channel.unary_unary(_CLUSTER_ID_METHOD, bytes, bytes)
        try:
            ask(b"", timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return True
    return False


def _has_gpu(address: str | None) -> bool:
    """Tell whether GPUs may be there: on this machine, or (unknown yet) on a remote cluster."""
    import torch

    return address is not None or torch.cuda.is_available()


def _check_reachable(address: str, timeout_seconds: int) -> None:
    if address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"runtime.ray_address is {address!r}",
            "host:port, ray://host:port or 'auto'",
            "correct it",
        )
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except OSError as error:
        raise _no_answer(address, str(error)) from error


def _no_answer(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"No Ray cluster answers at {address}: {reason}",
        "a running head node",
        "start it with `ray start --head` (its token belongs in ~/.ray/auth_token here too), "
        "or set runtime.ray_address to null to start one here",
    )


def disconnect() -> None:
    """Leave the cluster; a cluster that was started here ends."""
    import ray

    _started_here().clear()
    if ray.is_initialized():
        ray.shutdown()


@contextlib.contextmanager
def cluster_session() -> Iterator[None]:
    """Keep whatever cluster and workers the stages open until the end of the block, then end
    them."""
    try:
        yield
    finally:
        close()
        disconnect()


#
# Tells the loss of a worker process or its node from errors of the code that runs there.
#
# A node that dies is seen three times, in any order: the other ranks find their connection to it
# broken (at once), its own calls fail (seconds later), and Ray declares it dead (ten seconds later
# when its processes were killed, a minute when it just fell silent). `ray.get` of several calls
# returns at the first of these, even while other ranks wait in a collective for ever.

# How long Ray may take to notice what a broken connection already told.
_DEATH_SECONDS = 30.0
# An error of the code itself on one rank, while another waits for it in a collective.
_DOUBT_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_REASON_CHARACTERS: Final = 300

_COLLECTIVES: Final = re.compile(r"gloo/transport|TCPStore|NCCL", re.IGNORECASE)
_BROKEN: Final = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|likely closed)|broken pipe|"
    r"caused pair closure|timed out|remote process exited|network error|recv(Value)? failed",
    re.IGNORECASE,
)
_NODE_MEMORY: Final = re.compile(
    r"Memory on the node \(IP: ([^,]+), ID: \w+\) was (\S+) used / (\S+) limit"
)
_NODE_DEATH: Final = re.compile(r"node has died\.?\s*Node Id: (\w{8})", re.IGNORECASE)


@dataclass(frozen=True)
class Answers:
    """What became of a question to all ranks.

    Args:
        dead: what Ray says of each rank that is gone.
        silent: ranks that neither answered nor are known to be gone.
    """

    dead: dict[int, Exception]
    silent: set[int]


def ask(workers: Sequence[Any], seconds: float) -> Answers:
    """Ask all ranks at once whether they are there, until all have answered, or some are known to
    be gone, or the time is over."""
    import ray

    deadline = time.monotonic() + seconds
    asked = {worker.__ray_ready__.remote(): rank for rank, worker in enumerate(workers)}
    dead: dict[int, Exception] = {}
    while asked and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(asked), timeout=min(left, _RETRY_SECONDS))
        for call in ready:
            rank = asked.pop(call)
            try:
                ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                # Not known to be dead yet.
                time.sleep(_RETRY_SECONDS)
                asked[workers[rank].__ray_ready__.remote()] = rank
            except ray.exceptions.RayError as error:
                dead[rank] = error
        if dead:
            # Ranks that died together are told together.
            deadline = min(deadline, time.monotonic() + _RETRY_SECONDS)
    return Answers(dead, set(asked.values()))


def loss_of(error: Exception, workers: Sequence[Any], whose: str = "") -> WorkerLostError | None:
    """Return what an error of a call to all ranks tells of lost ones; None when the code that runs
    there raised it."""
    is_loss = _is_gone(error) or _is_broken_connection(error)
    dead = ask(workers, _DEATH_SECONDS if is_loss else _DOUBT_SECONDS).dead
    return lost_error(error, dead, len(workers), whose) if dead or is_loss else None


def lost_error(
    error: Exception, dead: Mapping[int, Exception], n_ranks: int, whose: str = ""
) -> WorkerLostError:
    """Return the error that tells the loss in one line.

    Args:
        error: of the call.
        dead: what Ray says of each rank that is gone; empty when none is known.
        n_ranks: in all.
        whose: says which group of ranks it is, where there are several.
    """
    import ray

    told = [*dead.values(), error]
    memory = [found for found in told if isinstance(found, ray.exceptions.OutOfMemoryError)]
    reason = _reason((memory or told)[0])
    found = f"Rank {', '.join(map(str, sorted(dead)))} of {n_ranks}{whose} died: {reason}"
    if not dead:
        found = f"The {n_ranks} ranks{whose} lost a worker or their connection: {reason}"
    fix = "look at the node's log"
    if memory:
        fix = (
            "free memory on that node, give it fewer ranks (runtime.ranks, runtime.nodes), or "
            "lower runtime.tokens_per_micro_batch"
        )
    return WorkerLostError(
        found,
        "workers that live until the stage ends",
        f"{fix}; the stage, started again, continues from its last checkpoint",
    )


def _is_gone(error: Exception) -> bool:
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.NodeDiedError
        | exceptions.LocalRayletDiedError
        | exceptions.WorkerCrashedError
        | exceptions.OutOfMemoryError
        | exceptions.ObjectLostError
        | exceptions.ActorPlacementGroupRemoved
        | exceptions.ActorUnschedulableError,
    )


def _is_broken_connection(error: Exception) -> bool:
    """Tell whether a collective failed because another rank does not answer any more."""
    from torch.distributed import DistError

    text = str(error)
    of_collective = isinstance(error, DistError) or _COLLECTIVES.search(text) is not None
    return of_collective and _BROKEN.search(text) is not None


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if memory := _NODE_MEMORY.search(text):
        address, used, limit = memory.groups()
        return f"its node {address} ran low on memory ({used} of {limit} in use) and Ray ended it"
    if node := _NODE_DEATH.search(text):
        return f"its node {node[1]} died"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(error)]
    process = [line for line in lines if line.startswith("The actor is dead because")]
    return (process or lines[-1:])[0].split(". ")[0][:_REASON_CHARACTERS]


# The worker processes: how they start, and how they end.

_PING_SECONDS = 20.0


def start_groups(host: HostSpec, *, after_loss: bool = False) -> list[Any]:
    """Start one process per rank and return verl's handle of each group of them.

    Args:
        host: ranks, nodes, device, and how many groups.
        after_loss: take another number of nodes, or one group, where not enough is left.

    Raises:
        ClusterError: the nodes cannot hold the ranks.
        WorkerLostError: a node died meanwhile.
    """
    enter_worker_environment(host.device)
    if host.device == "cpu":
        # Registers the platform even where verl was imported before the environment was set.
        importlib.import_module(PLATFORM_MODULE)
    reserved = reserve(host, after_loss=after_loss)
    started: list[Any] = []
    try:
        for placements in reserved:
            started.append(_start_group(host, placements))
    except BaseException:
        for group in started:
            end_group(group)
        for placements in reserved[len(started) :]:
            release(placements)
        raise
    return started


def _start_group(host: HostSpec, placements: list[Any]) -> Any:
    """Start the processes of one group; they load their libraries while the next one is started."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from tasks.runtime.verl_host import RoleHost

    layout = [host.ranks // len(placements)] * len(placements)
    pool = RayResourcePool(layout, use_gpu=host.device == "cuda", max_colocate_count=1)
    pool.pgs = placements
    actor = RayClassWithInitArgs(cls=ray.remote(RoleHost), threads=host.threads_per_rank)
    # On a cluster that was joined, whether there are GPUs is known only now.
    environment = worker_environment(host.device)
    try:
        return RayWorkerGroup(pool, actor, device_name=host.device, worker_env=environment)
    except ray.exceptions.RayError as error:
        raise lost_error(error, {}, host.ranks) from error


def end_group(group: Any) -> None:
    """End the processes, whatever they wait for, and give back what was reserved for them."""
    import ray

    for worker in group.workers:
        ray.kill(worker)
    # Otherwise the CPUs stay reserved, and a group of another size waits for them in vain.
    release(group.resource_pool.pgs)


@contextmanager
def watched(group: Any, whose: str = "") -> Iterator[None]:
    """Tell what an error of the block means for the workers.

    Args:
        group: that the block calls.
        whose: says which group it is, where there are several.

    Raises:
        MemoryLimitError: a rank ran out of the device's memory.
        WorkerLostError: a rank is gone, whatever the others said of the broken connection.
    """
    import ray
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"A worker ran out of memory: {str(error).splitlines()[0]}",
            "micro-batches that fit",
            "lower runtime.tokens_per_micro_batch or set runtime.gradient_checkpointing: true",
        ) from error
    except ray.exceptions.RayError as error:
        lost = loss_of(error, group.workers, whose)
        if lost is None:
            raise
        raise lost from error


def lost_ranks(group: Any) -> list[int]:
    """Return the ranks that do not answer though nothing was asked of them: they died, or they
    wait for a rank that failed."""
    answers = ask(group.workers, _PING_SECONDS)
    return sorted([*answers.dead, *answers.silent])


# Work in several calls to the workers, of one role or of several at the same time.

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A call that the ranks of a group work at.

    Args:
        group: verl's handle of the ranks.
        future: verl's, of what they return.
        whose: says which group it is, where there are several.
    """

    group: Any
    future: Any
    whose: str = ""

    def wait(self) -> Any:
        """Return what the ranks return.

        Raises:
            WorkerLostError, MemoryLimitError: see `watched`.
        """
        with watched(self.group, self.whose):
            return self.future.get()


# Yields calls, is sent what each of them returned, and returns what was wanted of them all.
Job = Generator[Call, Any, T]


def together(jobs: Sequence[Job[T]]) -> list[T]:
    """Return what the jobs return, with one call of each at work at any time.

    The first error ends them all; what ranks still compute then comes before their next call.
    """
    found: dict[int, T] = {}
    at_work: dict[int, Call] = {}

    def go_on(index: int, result: Any) -> None:
        at_work.pop(index, None)
        try:
            at_work[index] = jobs[index].send(result)
        except StopIteration as done:
            found[index] = done.value

    for index in range(len(jobs)):
        go_on(index, None)
    while at_work:
        for index, call in list(at_work.items()):
            go_on(index, call.wait())
    return [found[index] for index in range(len(jobs))]


ROWS_PER_CALL = 1024
# Rows of a model that takes a second for a few of them; what is done between calls can be told.
ROWS_PER_CALL_LARGE = 128
_LARGE_BYTES = 256 * 2**20
_LOG = logging.getLogger(__name__)


@dataclass
class Session:
    """Roles of one stage in the worker processes.

    Args:
        groups: verl's handles of the ranks: one, which all roles share, or two.
        runtime: how roles are built.
        host: what the groups were started with.
        alone: roles that are in the first of two groups; all others are in the second.
        notes: role to why its rows do not share their prompts, which costs time but changes
            nothing; only roles for which `RuntimeConfig` asks for it in vain.
        log: of the stage that uses the session.
    """

    groups: list[Any]
    runtime: RuntimeConfig
    host: HostSpec
    alone: frozenset[str] = frozenset()
    notes: dict[str, str] = field(default_factory=dict)
    log: RunLog | None = None
    specs: dict[str, RoleSpec] = field(default_factory=dict)

    def load(self, *specs: RoleSpec) -> None:
        """Build roles inside the running workers."""
        for spec in specs:
            reason = self._ask(spec.name, "load_role", spec, self.runtime)[0]
            self.specs[spec.name] = spec
            self.notes.pop(spec.name, None)
            if reason is not None:
                self._tell_once(spec.name, reason)
                self.notes[spec.name] = reason

    def _tell_once(self, role: str, reason: str) -> None:
        if reason in self.notes.values():
            return
        message = f"role {role} computes each prompt again for each response: {reason}"
        if self.log is None:
            _LOG.warning(message)
        else:
            self.log.event("plain_rows", message)

    def drop(self) -> None:
        """Free all roles; the processes stay for the next stage."""
        for group in self.groups:
            group.drop_roles()
        self.notes.clear()
        self.specs.clear()

    def rebuild(self, runtime: RuntimeConfig | None = None) -> str:
        """Start the workers anew, where nodes are left for them, with the same roles as loaded from
        their directories: weights, optimizers and losses have to be restored.

        Args:
            runtime: how roles are built from now on; None = as before.

        Returns:
            On how many nodes the ranks run and in how many groups, where these are not as many as
            wanted; else nothing.

        Raises:
            ClusterError: the nodes that are left cannot hold the ranks.
            WorkerLostError: a rank died again while it was started.
        """
        self._end()
        self.runtime = runtime or self.runtime
        self.groups = start_groups(self.host, after_loss=True)
        self.load(*self.specs.values())
        found, wanted = len(self.groups[0].resource_pool.store), self.host.nodes
        where = "" if found == wanted else f" on {found} of {wanted} nodes"
        if len(self.groups) < self.host.groups:
            where += f" in {len(self.groups)} of {self.host.groups} groups"
        return where

    def _end(self) -> None:
        for group in self.groups:
            end_group(group)
        # Where it is not started again, nothing is left to end.
        self.groups = []

    def scale_learning_rate(self, role: str, scale: float) -> None:
        """Train a role at ``scale`` times its configured learning rate from its next step on."""
        self._ask(role, "scale_learning_rate", role, scale)

    def set_loss(self, role: str, loss_fn: Callable[..., Any]) -> None:
        """Set the loss of a role's next steps."""
        self._ask(role, "set_loss", role, loss_fn)

    def train_step(
        self, role: str, batch: Batch, *, update_schedule: bool = True
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch and return its reduced metrics.

        Raises:
            ConfigError: the batch cannot be shared evenly among the ranks, or a group exceeds a
                micro-batch.
            TrainingError: the loss or the gradient is not finite; no step was taken.
            MemoryLimitError: the device's memory does not hold a micro-batch.
            WorkerLostError: a rank or its node died.
        """
        return together([self._step(role, batch, update_schedule)])[0]

    def train_steps(self, batches: Mapping[str, Batch]) -> dict[str, dict[str, float]]:
        """Take a `train_step` of each role, at the same time where they are in different groups."""
        if self._are_apart(batches):
            jobs = [self._step(role, batch) for role, batch in batches.items()]
            return dict(zip(batches, together(jobs), strict=True))
        return {role: self.train_step(role, batch) for role, batch in batches.items()}

    def _step(self, role: str, batch: Batch, update_schedule: bool = True) -> Job[dict[str, float]]:
        self._check_shape(batch)
        data = to_tensordict(batch, {"role": role, "update_lr_scheduler": update_schedule})
        metrics = reduce_metrics(metrics_of((yield self._start(role, "train", data))))
        for name in ("loss", "grad_norm"):
            if not torch.isfinite(torch.tensor(metrics[name])):
                raise TrainingError(
                    f"Role {role}: {name} is {metrics[name]}",
                    "a finite number",
                    "lower the learning rate or look at the batch; the last checkpoint is kept",
                )
        return metrics

    def logprobs(
        self, role: str, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return the log-probability of each response token, one tensor of shape (T_i,) per row."""
        return together([self._logprobs(role, rows, temperature)])[0]

    def values(self, role: str, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the value of the state before each response token and of the one after the last,
        one tensor of shape (T_i + 1,) per row."""
        return together([self._values(role, rows)])[0]

    def logprobs_and_values(
        self, policy: str, critic: str, rows: Sequence[Row]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return `logprobs` and `values` of two roles, computed at the same time where they are in
        different groups."""
        if self._are_apart([policy, critic]):
            jobs = [self._logprobs(policy, rows), self._values(critic, rows)]
            logprobs, values = together(jobs)
            return logprobs, values
        return self.logprobs(policy, rows), self.values(critic, rows)

    def _logprobs(
        self, role: str, rows: Sequence[Row], temperature: float = 1.0
    ) -> Job[list[torch.Tensor]]:
        outputs = yield from self._infer(role, rows, ("log_probs",), {"temperature": temperature})
        return [
            before_tokens(values, row)
            for values, row in zip(outputs["log_probs"], rows, strict=True)
        ]

    def _values(self, role: str, rows: Sequence[Row]) -> Job[list[torch.Tensor]]:
        outputs = yield from self._infer(role, rows, ("values",), {})
        return [
            values[len(row.prompt_ids) - 1 :].clone()
            for values, row in zip(outputs["values"], rows, strict=True)
        ]

    def scores(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the score at the last real token of each row, shape (B,), fp32."""
        outputs = self._read(role, rows, ("values",), {})
        return torch.stack([values[-1].float() for values in outputs["values"]])

    def last_states(self, role: str, rows: Sequence[Row]) -> torch.Tensor:
        """Return the hidden state that a value model's score is made of, at the last real token of
        each row, shape (B, H)."""
        outputs = self._read(role, rows, ("last_states",), {"return_last_states": True})
        return torch.stack(outputs["last_states"])

    def read_tokens(
        self,
        role: str,
        rows: Sequence[Row],
        hook: LogitsHook,
        columns: dict[str, list[torch.Tensor]] | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """Return what a hook reads from the logits before each response token.

        Args:
            role: a language model; the hook takes the place of its loss.
            rows: N rows.
            hook: says what is read.
            columns: what it needs to know of each response token, N tensors of shape (T_i,) or
                (T_i, K) each.

        Returns:
            By the hook's names, N tensors of shape (T_i, K), K = 1 for one number a token.
        """
        self.set_loss(role, hook)
        flags = {FLAG: True, "compute_loss": True}
        outputs = self._read(role, rows, hook.names, flags, columns or {})
        return {
            name: [v.view(len(row.response_ids), -1) for v, row in zip(found, rows, strict=True)]
            for name, found in outputs.items()
        }

    def save(self, role: str, directory: Path) -> None:
        """Write a role's training state."""
        self._ask(role, "save_checkpoint", role, str(directory))

    def restore(self, role: str, directory: Path) -> None:
        """Restore a role's training state."""
        self._ask(role, "load_checkpoint", role, str(directory))

    def export(self, role: str, directory: Path) -> None:
        """Write a role's model for transformers or peft."""
        self._ask(role, "export", role, str(directory))

    def _of(self, role: str) -> Any:
        """Return the group that a role is in."""
        return self.groups[0 if role in self.alone else -1]

    def _are_apart(self, roles: Collection[str]) -> bool:
        return len({id(self._of(role)) for role in roles}) == len(roles) > 1

    def _start(self, role: str, method: str, *args: Any) -> Call:
        """Start a call to all ranks of a role's group, of which a future comes back."""
        group, whose = self._of(role), self._whose(role)
        with watched(group, whose):
            return Call(group, getattr(group, method)(*args), whose)

    def _ask(self, role: str, method: str, *args: Any) -> Any:
        """Call a method of all ranks of a role's group and return what they return."""
        with watched(self._of(role), self._whose(role)):
            return getattr(self._of(role), method)(*args)

    def _whose(self, role: str) -> str:
        """Tell a group by its roles, where there are several."""
        if len(self.groups) == 1:
            return ""
        known = dict.fromkeys([*self.specs, role])
        return f" ({', '.join(name for name in known if self._of(name) is self._of(role))})"

    def _check_shape(self, batch: Batch) -> None:
        n_groups = len(batch.rows) // batch.group_size
        if n_groups % self.host.ranks:
            raise ConfigError(
                f"{n_groups} pairs or prompts cannot be shared by {self.host.ranks} ranks",
                "a multiple of runtime.ranks",
                "change the stage's batch size or runtime.ranks",
            )
        longest = max(map(len, batch.rows)) * batch.group_size
        if longest > self.runtime.tokens_per_micro_batch:
            raise ConfigError(
                f"A group of {batch.group_size} rows may take {longest} tokens",
                f"at most runtime.tokens_per_micro_batch={self.runtime.tokens_per_micro_batch}",
                "raise tokens_per_micro_batch or lower rendering.max_prompt_tokens",
            )

    def _rows_per_call(self, role: str) -> int:
        """Return a number that does not depend on the clock, because cuts change roundings."""
        files = list_weight_files(Path(self.specs[role].model_dir))
        is_large = sum(file.stat().st_size for file in files) > _LARGE_BYTES
        return ROWS_PER_CALL_LARGE if is_large else ROWS_PER_CALL

    def _read(self, *args: Any) -> dict[str, list[torch.Tensor]]:
        return together([self._infer(*args)])[0]

    def _infer(
        self,
        role: str,
        rows: Sequence[Row],
        names: Iterable[str],
        flags: dict[str, Any],
        columns: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> Job[dict[str, list[torch.Tensor]]]:
        outputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        # The order of the rows is restored below.
        calls = plan_calls(rows, self._rows_per_call(role))
        order = [i for call in calls for i in call]
        done = 0
        for call in calls:
            n_real = len(call)
            filled = call + [call[-1]] * (-n_real % self.host.ranks)
            given = {name: [values[i] for i in filled] for name, values in columns.items()}
            batch = Batch([rows[i] for i in filled], given)
            data = to_tensordict(batch, {"role": role, "compute_loss": False} | flags)
            result = yield self._start(role, "infer", data)
            for name, collected in outputs.items():
                collected.extend(result[name].unbind()[:n_real])
            done += n_real
            if self.log is not None and len(calls) > 1:
                self.log.progress(done, len(rows), f"rows read by role {role}")
        place = {index: position for position, index in enumerate(order)}
        return {
            name: [found[place[i]] for i in range(len(rows))] for name, found in outputs.items()
        }


@cache
def _live() -> dict[str, Session]:
    """Hold the one session of this process."""
    return {}


def open_session(
    runtime: RuntimeConfig, log: RunLog | None = None, *, alone: Collection[str] = ()
) -> Session:
    """Return the workers for this runtime, without roles; running ones that fit are used again.

    Args:
        runtime: ranks, device and how roles are built.
        log: where the stage reports.
        alone: roles that get a group of ranks to themselves; with none, one group is all.
    """
    forward_to(run_logger("session"))
    groups = 2 if alone else 1
    host = HostSpec.from_runtime(runtime, resolve_device(runtime), groups)
    current = _live().get("session")
    if current is not None and current.host == host and _is_whole(current):
        current.drop()
        current.runtime, current.log, current.alone = runtime, log, frozenset(alone)
        return current
    close()
    make_room(runtime, host.ranks * groups)
    started = Session(start_groups(host), runtime, host, frozenset(alone), log=log)
    return _live().setdefault("session", started)


def _is_whole(session: Session) -> bool:
    """Tell whether all groups are there, with all their ranks."""
    return len(session.groups) == session.host.groups and not any(map(lost_ranks, session.groups))


def close() -> None:
    """End the worker processes."""
    session = _live().pop("session", None)
    if session is not None:
        session._end()
