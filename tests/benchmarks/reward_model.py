"""Reward-model training: this project against TRL's RewardTrainer.

What is timed is one pass over the same pairs in batches of the same size, with the same token ids,
model, precision and thread count; several passes, alternating, of which the median counts. Both
sides do the same work in a pass whatever the order of the pairs, so seconds compare directly.

Each side has a process of its own, as in real use: this project's worker under Ray (where sampling,
building the batch and sending it to the worker are part of the time), and TRL under its own Python.
Both live through the whole case and take turns; the side that waits sleeps, and which side starts
changes with each repeat. Before timing, each has taken one optimizer step. TRL runs with random
sampling, its default, and with ``group_by_length``, which is not; gradient checkpointing, on by
default in TRL, is off on both sides, because it trades time for memory. bf16 is compute over fp32
master weights on both sides.

Pairs are rendered once, by this project, and no pair is left out: prompts over 384 tokens lose
their first turns, responses are cut at 128 tokens.

Real tokens. "Once" counts prompt + chosen + rejected of each pair, which is all that there is to
compute; "twice" counts the prompt with each response, which is what rows without shared prompts
compute. Both are the same for all sides, and so are comparable. The padded share is of the
positions that a side computes itself. The share of peak is 6 N FLOPs per real token over the best
torch.mm of this machine in fp32, measured before and after each case.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.machine import thread_environment
from benchmarks.report import Block, CaseResult, SideResult
from tasks.algorithms.packed_rows import PADDING, MergeLimit
from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.config.shared import OptimizerConfig, RenderingConfig, RuntimeConfig, TinyModelConfig
from tasks.data.hh import Pair
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.data.source import read_lines
from tasks.ingest.rows import parse_line
from tasks.models.loading import list_weight_files, read_header
from tasks.models.sources import resolve_model
from tasks.models.tiny import build_tiny_model
from tasks.runtime.rows import Batch, RoleSpec, Row, to_tensordict
from tasks.runtime.session import Session, cluster_session, open_session
from tasks.workspace import Workspace

TINY: Final = "tiny"
SMOLLM2: Final = "smollm2-135m"
RENDERING: Final = RenderingConfig(
    max_prompt_tokens=384, max_response_tokens=128, truncate_response=True
)
SEED: Final = 0
LEARNING_RATE: Final = 1e-5
OWN: Final = "rlhf-flows"
_ROLE: Final = "reward"
_PEER: Final = Path(__file__).with_name("peer_trl.py")
# Not multiplied with each token: looked up, or not part of a reward model.
_NOT_IN_N: Final = ("embed_tokens", "lm_head", "wte", "wpe")

Dtype = Literal["fp32", "bf16"]
# Takes this many steps and says how they went.
Pass = Callable[[int], Block]


@dataclass(frozen=True)
class Settings:
    """What all cases share.

    Args:
        data: file of HH-RLHF pairs.
        peer_python: interpreter that has TRL.
        scratch: directory for models and logs.
        batch_pairs: pairs of an optimizer step.
        repeats: timed passes of each side.
    """

    data: Path
    peer_python: Path
    scratch: Path
    threads: int
    batch_pairs: int
    repeats: int


def run_case(settings: Settings, model: str, dtype: Dtype, n_pairs: int) -> CaseResult:
    """Measure all sides on one model and precision.

    Args:
        model: "tiny", "smollm2-135m", a directory or a hub id.
        n_pairs: pairs of a pass; rounded down to whole batches.
    """
    raw = read_pairs(settings.data)
    model_dir = find_model(settings, model, raw)
    renderer = Renderer.load(model_dir, RENDERING)
    rendered, _ = render_pairs(raw, renderer)
    pairs = choose_pairs(rendered, settings, n_pairs)
    responses = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
    prompts = sum(len(pair.prompt_ids) for pair in pairs)
    once, twice = prompts + responses, 2 * prompts + responses
    flops = 6.0 * count_multiplied(model_dir)
    with open_sides(settings, model_dir, dtype, pairs) as passes:
        sides = {name: SideResult(name) for name in passes}
        for run_pass in passes.values():
            run_pass(1)
        names = list(passes)
        for repeat in range(settings.repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                sides[name].blocks.append(passes[name](len(pairs) // settings.batch_pairs))
    return CaseResult(model, dtype, len(pairs), once, twice, flops, list(sides.values()))


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file that ingestion would keep."""
    rows = (parse_line(line.text, "bench", path.name, line.number) for line in read_lines(path))
    return [row for row in rows if isinstance(row, Pair)]


def choose_pairs(
    rendered: Sequence[RenderedPair], settings: Settings, n_pairs: int
) -> list[RenderedPair]:
    """Draw whole batches of pairs, the same ones in every run."""
    whole = min(n_pairs, len(rendered)) // settings.batch_pairs * settings.batch_pairs
    if not whole:
        raise SystemExit(f"{n_pairs} pairs make no batch of {settings.batch_pairs}")
    return random.Random(SEED).sample(list(rendered), whole)


def count_multiplied(model_dir: Path) -> int:
    """Count the weights that each token is multiplied with."""
    headers = (read_header(file) for file in list_weight_files(model_dir))
    return sum(
        math.prod(entry["shape"])
        for header in headers
        for name, entry in header.items()
        if not any(part in name for part in _NOT_IN_N)
    )


def find_model(settings: Settings, model: str, pairs: Sequence[Pair]) -> Path:
    """Return the directory of a model; the tiny one is made, with a vocabulary of these prompts."""
    if model != TINY:
        source = f"package:{model}" if model == SMOLLM2 else model
        cache_dir = Workspace.from_environment().cache_dir
        cache_dir.mkdir(parents=True, exist_ok=True)
        return resolve_model(source, cache_dir=cache_dir).path
    directory = settings.scratch / TINY
    if not directory.exists():
        texts = [turn.content for pair in pairs for turn in pair.prompt]
        spec = TinyModelConfig(vocab_size=2048, max_position_embeddings=1024)
        build_tiny_model(directory, texts, spec, seed=SEED)
    return directory


@contextmanager
def open_sides(
    settings: Settings, model_dir: Path, dtype: Dtype, pairs: Sequence[RenderedPair]
) -> Iterator[dict[str, Pass]]:
    """Start both processes, and end them; yields this project's side first."""
    runtime = RuntimeConfig(device="cpu", dtype=dtype, cpu_threads=settings.threads)
    peer_pairs = [_peer_pair(pair) for pair in pairs]
    peer_process = open_peer(settings, "reward", model_dir, dtype, peer_pairs)
    with cluster_session(), peer_process as peer:
        own = OwnSide(runtime, model_dir, pairs, settings.batch_pairs)
        yield {
            OWN: own.run,
            "TRL": partial(peer.run, "default"),
            "TRL, group_by_length": partial(peer.run, "group_by_length"),
        }


class OwnSide:
    """This project's training step, as the reward-model stage takes it."""

    def __init__(
        self, runtime: RuntimeConfig, model_dir: Path, pairs: Sequence[RenderedPair], batch: int
    ) -> None:
        from tasks.runtime.verl_losses import pairwise_loss

        self.runtime, self.pairs, self.batch_pairs = runtime, pairs, batch
        self.session: Session = open_session(runtime)
        optimizer = OptimizerConfig(
            learning_rate=LEARNING_RATE, schedule="constant", warmup_share=0.0
        )
        spec = RoleSpec(_ROLE, "value_model", str(model_dir), SEED, 1_000_000, optimizer)
        self.session.load(spec)
        self.session.set_loss(_ROLE, partial(pairwise_loss, label_smoothing=0.0, center_coef=0.0))
        lengths = [pair.longest_row_tokens for pair in pairs]
        self.sampler = LengthGroupedSampler(lengths, batch_size=batch, seed=SEED)
        self.limit = worker_limit(model_dir, runtime)

    def run(self, steps: int) -> Block:
        """Take this many steps, from the beginning of an epoch."""
        batches, losses = [], []
        start = time.perf_counter()
        for _ in range(steps):
            chosen = [self.pairs[i] for i in self.sampler.next_batch(self.batch_pairs)]
            rows = [
                Row(pair.prompt_ids, response)
                for pair in chosen
                for response in (pair.chosen_ids, pair.rejected_ids)
            ]
            batch = Batch(rows, group_size=2)
            losses.append(self.session.train_step(_ROLE, batch)["loss"])
            batches.append(batch)
        seconds = time.perf_counter() - start
        if self.sampler.position:  # the warm-up step is not part of a pass
            self.sampler.reset()
        computed, padded = count_positions(batches, self.runtime, self.limit)
        return Block(seconds, steps, sum(losses) / len(losses), computed, padded)


def count_positions(
    batches: Sequence[Batch], runtime: RuntimeConfig, limit: MergeLimit | None
) -> tuple[int, int]:
    """Cut batches into micro-batches as the worker does; return their positions and how many of
    them are padding."""
    from tasks.runtime.micro_batches import layout_of, make_micro_batches

    flags = {"max_token_len_per_gpu": runtime.tokens_per_micro_batch}
    computed = padded = 0
    for batch in batches:
        parts, _ = make_micro_batches(to_tensordict(batch, flags), limit, None)
        for part in parts:
            layout, lengths = layout_of(part), part["input_ids"].offsets().diff()
            if layout is None:
                computed += int(len(lengths) * lengths.max())
                padded += int(len(lengths) * lengths.max() - lengths.sum())
            else:
                computed += layout.segments.numel()
                padded += int((layout.segments == PADDING).sum())
    return computed, padded


def worker_limit(model_dir: Path, runtime: RuntimeConfig) -> MergeLimit | None:
    """Return how far the worker merges rows that share a prompt, or None where it does not."""
    from transformers import AutoConfig

    from tasks.runtime.micro_batches import attention_implementation, merge_limit, shares_prompts

    config = AutoConfig.from_pretrained(model_dir)
    if not shares_prompts(config, runtime):
        return None
    config._attn_implementation = attention_implementation(config, runtime, "cpu")
    return merge_limit(config, runtime.tokens_per_micro_batch)


@dataclass(frozen=True)
class Peer:
    """TRL's process; see `peer_trl` for what is said."""

    process: subprocess.Popen[str]
    log: Path

    def run(self, sampling: str, steps: int) -> Block:
        """Take this many steps."""
        return Block(**self.ask({"sampling": sampling, "max_steps": steps}))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say what to do and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"TRL's process ended:\n{self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def open_peer(
    settings: Settings,
    trainer: Literal["reward", "dpo"],
    model_dir: Path,
    dtype: Dtype,
    pairs: Sequence[dict[str, Any]],
) -> Iterator[Peer]:
    """Start TRL's process with one of its trainers, and end it.

    Args:
        pairs: as the trainer takes them, and their ``length``.
    """
    job = {
        "trainer": trainer,
        "model_dir": str(model_dir),
        "dtype": dtype,
        "threads": settings.threads,
        "batch_pairs": settings.batch_pairs,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "pairs": list(pairs),
    }
    file, log = settings.scratch / "trl.json", settings.scratch / "trl.log"
    file.write_text(json.dumps(job))
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(settings.peer_python), str(_PEER), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=thread_environment(settings.threads),
        )
    try:
        peer = Peer(process, log)
        peer.answer()
        yield peer
    finally:
        process.kill()
        process.wait()


def _peer_pair(pair: RenderedPair) -> dict[str, Any]:
    return {
        "chosen_ids": [*pair.prompt_ids, *pair.chosen_ids],
        "rejected_ids": [*pair.prompt_ids, *pair.rejected_ids],
        "length": pair.longest_row_tokens,
    }
