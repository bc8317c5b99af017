"""The student's step with soft labels against the same step with cross-entropy alone.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.distill --help

One model is teacher and student; the student is a LoRA adapter on it. Both losses take turns on
the same batches in the same worker process, with the same model, optimizer and chunks of logits,
and which goes first changes with each batch, so that what else the machine does hits both. The
clock covers a whole optimizer step, building and sending the batch included. The peak of a step is
the highest resident memory of the worker process during it (VmHWM, reset before each step): model,
optimizer state, activations and all.

Rows are the chosen responses of real HH-RLHF pairs. The labels, k tokens and a tail, are made by
the teacher before the clock starts, and how long that takes is printed, too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.reward_model import SEED, SMOLLM2, TINY, Settings, find_model, read_pairs
from benchmarks.run import DATA
from tasks.config.shared import OptimizerConfig, RenderingConfig, RuntimeConfig, StudentLoraConfig
from tasks.data.rendering import Renderer, render_pairs
from tasks.runtime.logits_hooks import FLAG, TEACHER_IDS, TEACHER_LOGPROBS, StudentLoss, TopKReader
from tasks.runtime.rows import Batch, RoleSpec, Row
from tasks.runtime.session import Session, cluster_session, open_session
from tasks.workspace import Workspace

RENDERING: Final = RenderingConfig(
    max_prompt_tokens=256, max_response_tokens=96, truncate_response=True
)
TAU: Final = 2.0
ALPHA: Final = 0.5
LIMIT: Final = 1.15
_ROLE: Final = "student"
SOFT, HARD = "soft labels", "cross-entropy"


@dataclass
class Side:
    """One loss: seconds, the worker's processor seconds and peak bytes of each of its steps."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


@dataclass
class Case:
    """One model.

    Args:
        tokens: of all rows, prompts included; response_tokens those with a loss.
        label_seconds: that the teacher took to label all rows.
    """

    model: str
    n_prompts: int
    batch_rows: int
    top_k: int
    tokens: int
    response_tokens: int
    label_seconds: float
    sides: dict[str, Side]

    @property
    def time_ratio(self) -> float:
        """Seconds of all steps, soft labels to cross-entropy."""
        return sum(self.sides[SOFT].seconds) / sum(self.sides[HARD].seconds)

    @property
    def cpu_ratio(self) -> float:
        """The same in processor seconds, which other programs disturb less."""
        return sum(self.sides[SOFT].cpu_seconds) / sum(self.sides[HARD].cpu_seconds)

    @property
    def memory_ratio(self) -> float:
        """Highest peak of a step, soft labels to cross-entropy."""
        return max(self.sides[SOFT].peak_bytes) / max(self.sides[HARD].peak_bytes)


class Bench:
    """A student that takes single steps with either loss."""

    def __init__(self, model_dir: Path, rows: Sequence[Row], top_k: int, threads: int) -> None:
        self.rows = rows
        vocabulary = Renderer.load(model_dir, RENDERING).vocab_size
        self.session: Session = open_session(RuntimeConfig(device="cpu", cpu_threads=threads))
        self.session.load(RoleSpec("teacher", "language_model", str(model_dir)))
        begin = time.perf_counter()
        reader = TopKReader(min(top_k, vocabulary), TAU, vocabulary)
        labels = self.session.read_tokens("teacher", rows, reader)
        self.label_seconds = time.perf_counter() - begin
        self.logprobs = [values[:, :-1] for values in labels[TEACHER_LOGPROBS]]
        self.ids = labels[TEACHER_IDS]
        self.session.drop()
        optimizer = OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup_share=0.0)
        spec = (_ROLE, "language_model", str(model_dir), SEED, 1_000_000, optimizer)
        self.session.load(RoleSpec(*spec, StudentLoraConfig()))  # type: ignore[arg-type]
        self.losses = {
            SOFT: StudentLoss("top_k", ALPHA, TAU, vocabulary),
            HARD: StudentLoss("none", 0.0, 1.0, vocabulary),
        }

    def step(self, side: Side, units: Sequence[int]) -> None:
        """Take a step with a loss and note what it took."""
        name = side.name
        self.session.set_loss(_ROLE, self.losses[name])
        _reset_peak(self.pid)
        begin, cpu = time.perf_counter(), _cpu_seconds(self.pid)
        columns = {}
        if name == SOFT:
            columns = {
                TEACHER_LOGPROBS: [self.logprobs[unit] for unit in units],
                TEACHER_IDS: [self.ids[unit] for unit in units],
            }
        batch = Batch([self.rows[unit] for unit in units], columns, scalars={FLAG: True})
        self.session.train_step(_ROLE, batch)
        side.seconds.append(time.perf_counter() - begin)
        side.cpu_seconds.append(_cpu_seconds(self.pid) - cpu)
        side.peak_bytes.append(_peak(self.pid))

    @cached_property
    def pid(self) -> int:
        """Process of the worker."""
        return int(self.session.groups[0].resources()[0]["pid"])


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_case(settings: Settings, model: str, n_prompts: int, top_k: int) -> Case:
    """Measure both losses on one model; ``settings.repeats`` passes over the rows."""
    pairs = read_pairs(settings.data)
    model_dir = find_model(settings, model, pairs)
    rendered, _ = render_pairs(pairs, Renderer.load(model_dir, RENDERING))
    chosen = {pair.prompt_ids: Row(pair.prompt_ids, pair.chosen_ids) for pair in rendered}
    rows = random.Random(SEED).sample(list(chosen.values()), min(n_prompts, len(chosen)))
    # Batches of like length, as the stage draws them.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    size = settings.batch_pairs
    batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    sides = {name: Side(name) for name in (SOFT, HARD)}
    with cluster_session():
        bench = Bench(model_dir, rows, top_k, settings.threads)
        for name in sides:
            bench.step(Side(name), batches[-1])
        for index, units in enumerate(batches * settings.repeats):
            names = list(sides) if index % 2 else list(sides)[::-1]
            for name in names:
                bench.step(sides[name], units)
    used = [rows[i] for units in batches for i in units]
    return Case(
        model,
        len(used),
        size,
        top_k,
        sum(map(len, used)),
        sum(len(row.response_ids) for row in used),
        bench.label_seconds,
        sides,
    )


def print_case(console: Console, case: Case) -> None:
    """Print one case."""
    title = (
        f"student's step, {case.model}: {case.n_prompts} prompts, {case.tokens} tokens, "
        f"{case.response_tokens} of them responses; labels of {case.top_k} took "
        f"{case.label_seconds:.1f} s"
    )
    columns = ("loss", "s, all steps", "median step", "processor s", "peak, MiB")
    table = Table(*columns, title=title)
    for side in case.sides.values():
        table.add_row(
            side.name,
            f"{sum(side.seconds):.2f}",
            f"{statistics.median(side.seconds):.3f}",
            f"{sum(side.cpu_seconds):.2f}",
            f"{max(side.peak_bytes) / 2**20:.0f}",
        )
    found = (f"{case.time_ratio:.3f} x", "", f"{case.cpu_ratio:.3f} x")
    table.add_row(f"soft to hard (at most {LIMIT})", *found, f"{case.memory_ratio:.3f} x")
    console.print(table)


def main() -> None:
    """Measure, print and write a JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.distill", description=__doc__)
    parser.add_argument("--model", help="tiny, smollm2-135m, a directory or a hub id; default both")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the tiny model, half a minute")
    parser.add_argument("--data", type=Path, default=DATA if DATA.exists() else None)
    parser.add_argument("--output", type=Path, help="default: in the workspace")
    arguments = parser.parse_args()
    if arguments.data is None or not arguments.data.is_file():
        parser.error("--data: name a file of HH-RLHF pairs (.jsonl or .jsonl.gz)")
    output = arguments.output or Workspace.from_environment().root / "bench-distill.json"
    console = Console(width=160)
    if machine.is_busy():
        console.print("[yellow]Something else is running here: expect noise.[/]")
    models = [TINY, SMOLLM2] if not arguments.model else [arguments.model]
    cases = []
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as scratch:
        settings = Settings(
            arguments.data,
            Path(),
            Path(scratch),
            arguments.threads,
            arguments.batch_rows,
            arguments.repeats,
        )
        for model in [TINY] if arguments.quick else models:
            cases.append(run_case(settings, model, arguments.prompts, arguments.top_k))
            print_case(console, cases[-1])
    records = [
        asdict(case)
        | {
            "time_ratio": case.time_ratio,
            "cpu_ratio": case.cpu_ratio,
            "memory_ratio": case.memory_ratio,
        }
        for case in cases
    ]
    head = {"benchmark": "distill", "machine": machine.describe(arguments.threads)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**head, "cases": records}, indent=2) + "\n")
    console.print(str(output))


if __name__ == "__main__":
    main()
