"""Ingestion beside `datasets`: pairs per second and memory. From the project's root

    PYTHONPATH=tests .venv/bin/python -m benchmarks.ingest --help

The input is a real file of HH-RLHF pairs, repeated with a number in each copy's first turn, so that
no pair repeats another. This project's side is the whole stage with its default settings:
validation, duplicates, label conflicts, splits with their leakage check, ids, card, plots, zstd
Parquet, checksums. The other sides are `load_dataset("json")`, `map` over two processes that parse
with a regular expression and do nothing else, and `to_parquet`: one keeps the prompt once, as this
project does, the other turns both transcripts into messages.

The clock of a side runs in a process of its own, from the call to the finished file, without the
imports. Beside it is what all processes of the side computed, which other programs disturb less.
Memory is the sum over all processes of a side of what is resident, sampled every 20 ms; pages that
processes share count for each of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from tasks.workspace import Workspace

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT.parent / "shared" / "data" / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
# As many as all of HH-RLHF.
ALL_PAIRS: Final = 169_352
_QUICK_PAIRS: Final = 20_000
_SAMPLE_SECONDS: Final = 0.02
_HUMAN: Final = "\n\nHuman:"
_TURN: Final = re.compile(r"\n\n(Human|Assistant): ?")


def write_copies(data: Path, target: Path, n_pairs: int) -> None:
    """Write a file of pairs several times over, each copy with its number in the first turn."""
    with gzip.open(data, "rt", encoding="utf-8", newline="\n") as handle:
        rows = [json.loads(line) for line in handle]
    with target.open("wb") as plain, ExitStack() as stack:
        output: Any = plain
        if target.suffix == ".gz":
            output = stack.enter_context(gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=6))
        for number in range(n_pairs):
            copy, index = divmod(number, len(rows))
            row = {
                side: text.replace(_HUMAN, f"{_HUMAN} [{copy}]", 1)
                for side, text in rows[index].items()
            }
            output.write(json.dumps(row).encode() + b"\n")


class NoLog:
    """A run without MLflow."""

    def metrics(self, values: Any, step: int) -> None: ...

    def progress(self, done: float, total: float, message: str = "") -> None: ...

    def event(self, name: str, message: str) -> None: ...

    def trial(self, name: str, params: Any, metrics: Any) -> None: ...

    def file(self, path: Path, directory: str = "") -> None: ...


def run_stage(source: Path, scratch: Path, workers: int) -> Callable[[], int]:
    """Return this project's side; the call gives the number of rows."""
    from tasks.artifacts import Draft
    from tasks.context import StageContext
    from tasks.data.source import InputFile
    from tasks.ingest.config import IngestConfig
    from tasks.ingest.stage import ingest_pairs

    fingerprint = "f" * 64
    ctx = StageContext(
        stage="ingest",
        fingerprint=fingerprint,
        workspace=Workspace(scratch),
        checkpoint_dir=scratch / "checkpoints",
        artifacts_dir=scratch / "data",
        draft=Draft("preference_dataset", "ingest", fingerprint, config={}),
        log=NoLog(),
    )
    file = InputFile(str(source), source.name, "bench", "bench")
    return lambda: ingest_pairs(ctx, IngestConfig(workers=workers), [file]).manifest.counts["rows"]


def parse_once(row: dict[str, str]) -> dict[str, Any]:
    """Split both transcripts with a regular expression, keep one prompt; nothing is checked."""
    chosen, rejected = (_TURN.split(row[side])[1:] for side in ("chosen", "rejected"))
    answers = {"chosen": chosen[-1].strip(), "rejected": rejected[-1].strip()}
    return {"prompt": _messages(chosen[:-2]), **answers}


def parse_both(row: dict[str, str]) -> dict[str, Any]:
    """Turn each transcript into a list of messages, as trainers take them; nothing is checked."""
    return {side: _messages(_TURN.split(row[side])[1:]) for side in ("chosen", "rejected")}


def _messages(parts: list[str]) -> list[dict[str, str]]:
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def run_datasets(
    parse: Callable[[dict[str, str]], dict[str, Any]], source: Path, scratch: Path, workers: int
) -> Callable[[], int]:
    """Return the other side, with one of the two ways to parse."""
    import datasets

    datasets.disable_progress_bars()

    def call() -> int:
        cache = str(scratch / "cache")
        loaded = datasets.load_dataset("json", data_files=str(source), cache_dir=cache)["train"]
        parsed = loaded.map(parse, num_proc=workers)
        parsed.to_parquet(str(scratch / "pairs.parquet"))
        n_rows: int = len(parsed)
        return n_rows

    return call


SIDES: Final[dict[str, Callable[[Path, Path, int], Callable[[], int]]]] = {
    "rlhf-flows": run_stage,
    "datasets, prompt once": partial(run_datasets, parse_once),
    "datasets, both transcripts": partial(run_datasets, parse_both),
}


def _serve_side(name: str, source: Path, scratch: Path, workers: int) -> None:
    call = SIDES[name](source, scratch, workers)
    start, cpu = time.perf_counter(), _cpu_seconds()
    rows = call()
    taken = {"seconds": time.perf_counter() - start, "cpu_seconds": _cpu_seconds() - cpu}
    print(json.dumps(taken | {"rows": rows}))


def _cpu_seconds() -> float:
    """Return what this process and those that it has waited for have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(name: str, source: Path, workers: int) -> dict[str, float]:
    """Run one side in a process of its own; return seconds, rows and the peak of its memory."""
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-", dir=source.parent) as scratch:
        command = [sys.executable, "-m", "benchmarks.ingest", "--side", name]
        command += ["--source", str(source), "--scratch", scratch, "--workers", str(workers)]
        environment = machine.thread_environment(1) | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(_SAMPLE_SECONDS)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the side {name} failed")
    return {**json.loads(output.splitlines()[-1]), "peak_bytes": float(peak)}


def _resident_bytes(pid: int) -> int:
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        # One of them ended while it was looked at; the next sample sees the others.
        return 0
    return total


@contextmanager
def _input(data: Path, n_pairs: int, suffix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as directory:
        path = Path(directory) / f"pairs{suffix}"
        write_copies(data, path, n_pairs)
        yield path


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``--data`` is required where the usual file is not there."""
    parser = argparse.ArgumentParser(prog="benchmarks.ingest", description="Ingestion.")
    parser.add_argument("--pairs", type=int, default=ALL_PAIRS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gzip", action="store_true", help="the input is packed")
    parser.add_argument("--grow", type=int, help="measure memory for so many times the pairs, too")
    parser.add_argument("--quick", action="store_true", help="20,000 pairs, once")
    parser.add_argument("--data", type=Path, default=DATA if DATA.exists() else None)
    output = Workspace.from_environment().root / "bench-ingest.json"
    parser.add_argument("--output", type=Path, default=output)
    for name in ("--side", "--source", "--scratch"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("--data: name a file of HH-RLHF pairs (.jsonl.gz)")
    if arguments.quick:
        arguments.pairs, arguments.repeats = _QUICK_PAIRS, 1
    return arguments


def _print_results(console: Console, runs: dict[str, list[dict[str, float]]]) -> None:
    table = Table("side", "s, median", "min - max", "pairs/s", "time", "CPU s", "peak MiB")
    medians = {name: statistics.median(r["seconds"] for r in found) for name, found in runs.items()}
    for name, found in runs.items():
        seconds = [run["seconds"] for run in found]
        table.add_row(
            name,
            f"{medians[name]:.2f}",
            f"{min(seconds):.2f} - {max(seconds):.2f}",
            f"{found[0]['rows'] / medians[name]:,.0f}",
            f"{medians[name] / medians['rlhf-flows']:.2f} x",
            f"{statistics.median(run['cpu_seconds'] for run in found):.2f}",
            f"{max(run['peak_bytes'] for run in found) / 2**20:.0f}",
        )
    console.print(table)


def main() -> None:
    """Measure both sides in turns, print a table and write a JSON file."""
    arguments = parse_arguments()
    if arguments.side:
        source, scratch = Path(arguments.source), Path(arguments.scratch)
        _serve_side(arguments.side, source, scratch, arguments.workers)
        return
    console = Console(width=120)
    if machine.is_busy():
        console.print("[yellow]Something else is running here: expect noise.[/]")
    suffix = ".jsonl.gz" if arguments.gzip else ".jsonl"
    record: dict[str, Any] = {"benchmark": "ingest", "machine": machine.describe(1)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with _input(arguments.data, arguments.pairs, suffix) as source:
        for _ in range(arguments.repeats):
            for name, found in runs.items():
                found.append(measure(name, source, arguments.workers))
    console.print(f"{arguments.pairs:,} pairs, {arguments.workers} processes, {suffix}")
    _print_results(console, runs)
    record |= {"pairs": arguments.pairs, "suffix": suffix, "sides": runs}
    if arguments.grow:
        with _input(arguments.data, arguments.pairs * arguments.grow, suffix) as source:
            grown = measure("rlhf-flows", source, arguments.workers)
        before = max(run["peak_bytes"] for run in runs["rlhf-flows"])
        record["grown"] = grown
        rate, peak = grown["rows"] / grown["seconds"], grown["peak_bytes"]
        console.print(
            f"{arguments.grow} times the pairs: {grown['seconds']:.1f} s, {rate:,.0f} pairs/s, "
            f"peak {peak / 2**20:.0f} MiB, {peak / before:.2f} times the memory"
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
