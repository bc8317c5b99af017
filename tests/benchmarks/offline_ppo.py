"""One epoch of offline PPO against one epoch of TRL's DPOTrainer.

Both sides see the same pairs as the same token ids, in batches of the same size, with the same
model, precision and thread count; they take turns, and the median of the repeats counts. As in
`reward_model`, whose rendering, processes and tiny model these are, each side lives in a process of
its own, gradient checkpointing is off, bf16 is compute over fp32 master weights, and neither side
writes checkpoints. Each prompt comes once, so that a batch of prompts is a batch of pairs.

This project's side is its own loop, `PPOLoop`: batches drawn by length, a window of them between
two snapshots, the snapshot's log-probabilities at the start of each window (at most
``reanchor_steps`` batches; an epoch of few batches is one short window), advantages, weights,
update. All that comes from the ``offline_ppo`` section of configs/demo.yaml but for batch size,
rendering limits and learning rate; guards and probes are off. More passes happen once per run,
before the loop: the behaviour policy's log-probabilities, which with ``behavior.policy: reference``
are those of the reference and computed once for both, and a score by each member of the reward
model. They are timed whole, and an epoch is charged its share of them: that config's epochs are
steps x batch_prompts / prompts.

TRL's side is `train`, with random sampling, its default, and with ``group_by_length``, plus its
reference pass (``precompute_ref_log_probs``), which runs before `train`. It is charged whole,
because there is one epoch; the last column charges it like this project's passes. Models are in
memory on both sides before the clock starts.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.epoch_report import (
    DRIVER,
    REFERENCE_PASS,
    REWARD_PASS,
    SNAPSHOT,
    UPDATE,
    EpochCase,
)
from benchmarks.ingest import NoLog
from benchmarks.report import Block, SideResult
from benchmarks.reward_model import (
    LEARNING_RATE,
    OWN,
    RENDERING,
    SEED,
    Dtype,
    Settings,
    choose_pairs,
    count_multiplied,
    count_positions,
    find_model,
    open_peer,
    read_pairs,
    worker_limit,
)
from tasks.artifacts import RewardComponent
from tasks.config.loading import load_config
from tasks.config.shared import RuntimeConfig
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.offline_ppo.rewards import normalize_component, rewards_of
from tasks.pipeline_config import PipelineConfig
from tasks.runtime.rows import (
    REFERENCE,
    Batch,
    RoleSpec,
    Row,
    Trajectories,
    cached_logprobs,
    prompt_groups,
    response_rows,
)
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import Session, cluster_session, open_session
from tasks.runtime.supervised import CheckpointStore

if TYPE_CHECKING:
    from tasks.offline_ppo.loop import PPOLoop

DEFAULTS: Final = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
DPO: Final = "TRL DPO"
DPO_GROUPED: Final = "TRL DPO, by length"
_TRL_REFERENCE: Final = "TRL reference pass"
_COMPONENT: Final = "preference"


@dataclass(frozen=True)
class Defaults:
    """What the default config says.

    Args:
        cfg: its offline_ppo section.
        epochs: how often a run sees each prompt; the passes before the loop are shared by them.
        members: models that score each response.
        meaning: the same for a reader.
    """

    cfg: OfflinePPOConfig
    epochs: float
    members: int
    meaning: str

    @classmethod
    def load(cls, path: Path = DEFAULTS) -> Defaults:
        """Read the config."""
        pipeline: PipelineConfig = load_config(path)
        cfg, ingest = pipeline.offline_ppo, pipeline.ingest
        share = 1.0 - ingest.validation_share - ingest.test_share
        prompts = round(ingest.demo.n_pairs * share)
        epochs = cfg.steps * cfg.batch_prompts / prompts
        members = pipeline.reward_model.members
        meaning = (
            f"{cfg.steps} steps x {cfg.batch_prompts} prompts / {prompts} prompts = "
            f"{epochs:.2f} epochs, {members} reward models, behaviour = {cfg.behavior.policy}"
        )
        return cls(cfg, epochs, members, meaning)


def run_case(settings: Settings, model: str, dtype: Dtype, n_pairs: int) -> EpochCase:
    """Measure all sides on one model and precision.

    Args:
        model: "tiny", "smollm2-135m", a directory or a hub id.
        n_pairs: pairs of an epoch; rounded down to whole batches.
    """
    raw = read_pairs(settings.data)
    model_dir = find_model(settings, model, raw)
    rendered, _ = render_pairs(raw, Renderer.load(model_dir, RENDERING))
    of_prompt = {pair.prompt_id: pair for pair in reversed(rendered)}
    pairs = choose_pairs(list(of_prompt.values()), settings, n_pairs)
    responses = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
    prompts = sum(len(pair.prompt_ids) for pair in pairs)
    defaults = Defaults.load()
    case = EpochCase(
        model,
        dtype,
        len(pairs),
        settings.batch_pairs,
        prompts + responses,
        2 * prompts + responses,
        6.0 * count_multiplied(model_dir),
        defaults.epochs,
        defaults.meaning,
        [SideResult(name) for name in (OWN, DPO, DPO_GROUPED)],
    )
    with _open_sides(settings, defaults, model_dir, dtype, pairs) as jobs:
        for _ in range(settings.repeats):
            _run_repeat(case, jobs, len(case.sides[0].blocks))
    return case


def _run_repeat(case: EpochCase, jobs: dict[str, Callable[[], Block]], repeat: int) -> None:
    """Run every job once, starting with another one each time, and add a block to each side."""
    names = list(jobs)
    first = repeat % len(names)
    done = {name: jobs[name]() for name in names[first:] + names[:first]}
    reference = done[_TRL_REFERENCE].seconds
    own, *peers = case.sides
    own.blocks.append(done[OWN])
    for side in peers:
        block = done[side.name]
        parts = {UPDATE: block.seconds, REFERENCE_PASS: reference}
        values = asdict(block) | {"seconds": block.seconds + reference, "parts": parts}
        side.blocks.append(Block(**values))


@contextmanager
def _open_sides(
    settings: Settings,
    defaults: Defaults,
    model_dir: Path,
    dtype: Dtype,
    pairs: Sequence[RenderedPair],
) -> Iterator[dict[str, Callable[[], Block]]]:
    """Start both processes, let each take one step, and end them."""
    runtime = RuntimeConfig(device="cpu", dtype=dtype, cpu_threads=settings.threads)
    steps = len(pairs) // settings.batch_pairs
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    peer_pairs = [
        {name: list(getattr(pair, name)) for name in columns} | {"length": pair.longest_row_tokens}
        for pair in pairs
    ]
    peer_process = open_peer(settings, "dpo", model_dir, dtype, peer_pairs)
    with cluster_session(), peer_process as peer:
        own = OwnSide(settings, defaults, runtime, model_dir, pairs)
        own.warm_up()
        peer.run("default", 1)

        def reference_pass() -> Block:
            return Block(peer.ask({"reference_pass": True})["seconds"], 0, 0.0, 0, 0)

        yield {
            OWN: partial(own.run, steps),
            _TRL_REFERENCE: reference_pass,
            DPO: partial(peer.run, "default", steps),
            DPO_GROUPED: partial(peer.run, "group_by_length", steps),
        }


@dataclass
class TimedSession(Session):
    """A session that notes how long its steps and its passes take, and the batches of the
    steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Forget what was noted."""
        self.seconds = {UPDATE: 0.0, SNAPSHOT: 0.0}
        self.batches, self.losses = [], []

    def train_step(
        self, role: str, batch: Batch, *, update_schedule: bool = True
    ) -> dict[str, float]:
        begin = time.perf_counter()
        metrics = super().train_step(role, batch, update_schedule=update_schedule)
        self.seconds[UPDATE] += time.perf_counter() - begin
        self.losses.append(metrics["loss"])
        self.batches.append(batch)
        return metrics

    def logprobs(
        self, role: str, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        begin = time.perf_counter()
        found = super().logprobs(role, rows, temperature=temperature)
        self.seconds[SNAPSHOT] += time.perf_counter() - begin
        return found


class _NoCheckpoints(CheckpointStore):
    """Writes nothing, as the other side does."""

    def save(self, *_: Any, **__: Any) -> None: ...


def build_loop(
    session: Session, cfg: OfflinePPOConfig, data: Trajectories, directory: Path
) -> PPOLoop:
    """Make the loop as the stage does; the one place that knows what it takes."""
    from tasks.offline_ppo.loop import PPOLoop

    store = _NoCheckpoints(directory, cfg.checkpoint.keep)
    return PPOLoop(session, cfg, data, store, NoLog())


def _load_roles(session: Session, defaults: Defaults, model_dir: Path, scratch: Path) -> None:
    """Load actor, reference and reward models; these get a head, because a language model has
    none."""
    from tasks.runtime.rows import ACTOR

    optimizer = defaults.cfg.optimizer.model_copy(
        update={"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_share": 0.0}
    )
    with_head = scratch / f"{model_dir.name}-reward"
    if not with_head.exists():
        session.load(RoleSpec("head", "value_model", str(model_dir), SEED))
        session.export("head", with_head)
        session.drop()
    session.load(
        RoleSpec(ACTOR, "language_model", str(model_dir), SEED, 1_000_000, optimizer),
        RoleSpec(REFERENCE, "language_model", str(model_dir)),
    )


class OwnSide:
    """Offline PPO as the stage runs it, from the passes before the loop to its last step."""

    def __init__(
        self,
        settings: Settings,
        defaults: Defaults,
        runtime: RuntimeConfig,
        model_dir: Path,
        pairs: Sequence[RenderedPair],
    ) -> None:
        self.runtime, self.epochs, self.scratch = runtime, defaults.epochs, settings.scratch
        live = open_session(runtime)
        self.session = TimedSession(live.groups, runtime, live.host)
        _load_roles(self.session, defaults, model_dir, settings.scratch)
        directory = settings.scratch / f"{model_dir.name}-reward"
        members = (directory,) * defaults.members
        component = RewardComponent(_COMPONENT, members, (0.0,) * defaults.members, 1.0)
        self.scorer = RewardScorer.load_components(self.session, {_COMPONENT: component})
        self.rows, self.groups = response_rows(pairs), prompt_groups(pairs)
        self.cfg = OfflinePPOConfig.model_validate(
            defaults.cfg.model_dump()
            | {"rendering": RENDERING.model_dump(), "runtime": runtime.model_dump()}
            | {"batch_prompts": settings.batch_pairs}
            # A guard may change the batch size, and an epoch would no longer be one.
            | {"guards": defaults.cfg.guards.model_dump() | {"enabled": False}}
        )
        self.limit = worker_limit(model_dir, runtime)
        self.seeds = random.Random(SEED)

    def warm_up(self) -> None:
        """Use every model once."""
        self.session.start()
        self._epoch(self._collect({}), 1)

    def run(self, steps: int) -> Block:
        """Run all passes and one epoch of so many steps."""
        parts: dict[str, float] = {}
        data = self._collect(parts)
        self.session.start()
        start = time.perf_counter()
        self._epoch(data, steps)
        seconds = time.perf_counter() - start
        parts |= self.session.seconds
        parts[DRIVER] = seconds - sum(self.session.seconds.values())
        seconds += (parts[REFERENCE_PASS] + parts[REWARD_PASS]) / self.epochs
        computed, padded = count_positions(self.session.batches, self.runtime, self.limit)
        loss = statistics.mean(self.session.losses)
        return Block(seconds, steps, loss, computed, padded, parts)

    def _collect(self, parts: dict[str, float]) -> Trajectories:
        """Compute what the stage computes before its loop, as it does, and note the seconds."""
        start = time.perf_counter()
        identity = [uuid.uuid4().hex]  # otherwise the second run would read the column of the first
        compute = partial(Session.logprobs, self.session, REFERENCE, self.rows)
        ref = cached_logprobs(self.scratch / "logprobs", self.rows, identity, compute)
        parts[REFERENCE_PASS] = time.perf_counter() - start
        start = time.perf_counter()
        scores = self.scorer.score(self.rows).components[_COMPONENT]
        raw = normalize_component(self.cfg.reward, scores.raw, 0.0, 1.0)
        group_ids = torch.arange(len(self.groups)).repeat_interleave(2)
        rewards = rewards_of(self.cfg.reward, {_COMPONENT: raw}, {_COMPONENT: 1.0}, group_ids)
        parts[REWARD_PASS] = time.perf_counter() - start
        return Trajectories(self.rows, self.groups, rewards, ref, ref)

    def _epoch(self, data: Trajectories, steps: int) -> None:
        # A sampler of another seed begins a new epoch in another order.
        changes = {
            "steps": steps,
            "seed": self.seeds.randrange(2**31),
            "checkpoint": self.cfg.checkpoint.model_copy(update={"save_every_steps": steps + 1}),
        }
        directory = self.scratch / "ppo-checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        build_loop(self.session, self.cfg.model_copy(update=changes), data, directory).run()
