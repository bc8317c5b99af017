"""The command line of the benchmarks: `make bench`, or from the project's root

    PYTHONPATH=tests .venv/bin/python -m benchmarks.run --help

A benchmark measures one case, prints it and makes it plain values; it is named here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import epoch_report, machine, offline_ppo, report, reward_model
from tasks.workspace import Workspace

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT.parent / "shared" / "data" / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
PEER_PYTHON: Final = ROOT / ".venv" / "bench" / "bin" / "python"
_QUICK_PAIRS: Final = 64


@dataclass(frozen=True)
class Benchmark:
    """One of the benchmarks.

    Args:
        run_case: of settings, model, precision and number of pairs.
        print_case: of a console, the case and the machine's peaks.
        record: of the case and the peaks, plain values.
        pairs: of a pass by model; it takes seconds with the tiny model and minutes with the other.
        dtypes: precisions of every model but the tiny one, which is fp32 only.
        repeats: timed passes of each side.
    """

    run_case: Callable[..., Any]
    print_case: Callable[..., None]
    record: Callable[..., dict[str, Any]]
    pairs: dict[str, int]
    dtypes: tuple[str, ...]
    repeats: int


BENCHMARKS: Final = {
    "reward-model": Benchmark(
        reward_model.run_case,
        report.print_case,
        report.case_record,
        {reward_model.TINY: 512, reward_model.SMOLLM2: 64},
        dtypes=("fp32", "bf16"),
        repeats=3,
    ),
    "offline-ppo": Benchmark(
        offline_ppo.run_case,
        epoch_report.print_case,
        epoch_report.case_record,
        {reward_model.TINY: 256, reward_model.SMOLLM2: 16},
        dtypes=("fp32",),
        repeats=3,
    ),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``--data`` is required where the usual file is not there."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Benchmarks.")
    parser.add_argument("benchmark", nargs="?", choices=list(BENCHMARKS), default="reward-model")
    parser.add_argument("--model", help="tiny, smollm2-135m, a directory or a hub id; default all")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: all, tiny fp32 only")
    parser.add_argument("--pairs", type=int, help="pairs of a pass")
    parser.add_argument("--repeats", type=int, help="timed passes of each side")
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the tiny model, a minute")
    parser.add_argument("--data", type=Path, default=DATA if DATA.exists() else None)
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="has TRL")
    parser.add_argument("--output", type=Path, help="default: in the workspace")
    arguments = parser.parse_args()
    if arguments.output is None:
        name = "bench" if arguments.benchmark == "reward-model" else f"bench-{arguments.benchmark}"
        arguments.output = Workspace.from_environment().root / f"{name}.json"
    if arguments.data is None or not arguments.data.is_file():
        parser.error("--data: name a file of HH-RLHF pairs (.jsonl or .jsonl.gz)")
    if not arguments.peer_python.is_file():
        parser.error(f"--peer-python: no {arguments.peer_python}; `make bench` makes it")
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else BENCHMARKS[arguments.benchmark].repeats
    return arguments


def choose_cases(arguments: argparse.Namespace) -> list[tuple[str, Any, int]]:
    """Return model, precision and number of pairs of each case."""
    benchmark = BENCHMARKS[arguments.benchmark]
    models = [reward_model.TINY, reward_model.SMOLLM2]
    if arguments.model or arguments.quick:
        models = [arguments.model or reward_model.TINY]
    cases = []
    for model in models:
        dtypes = ["fp32"] if model == reward_model.TINY or arguments.quick else benchmark.dtypes
        pairs = _QUICK_PAIRS if arguments.quick else benchmark.pairs.get(model, _QUICK_PAIRS)
        for dtype in [arguments.dtype] if arguments.dtype else dtypes:
            cases.append((model, dtype, arguments.pairs or pairs))
    return cases


def main() -> None:
    """Run the cases, print a table for each and write the JSON file."""
    arguments = parse_arguments()
    # So that the processes of both sides end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Ray would run this project's side at a lower priority than the other side has.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (the name is in lower case)
    # verl names the backends that are not installed, each time it is imported.
    warnings.filterwarnings("ignore", message=".*engine is not available")
    console = Console(width=160)
    threads, benchmark = arguments.threads, BENCHMARKS[arguments.benchmark]
    if machine.is_busy():
        console.print("[yellow]Something else is running here: expect noise.[/]")
    head = {"benchmark": arguments.benchmark, "machine": machine.describe(threads)}
    peaks = machine.matmul_peak_flops(threads)
    results = []
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as scratch:
        settings = reward_model.Settings(
            arguments.data,
            arguments.peer_python,
            Path(scratch),
            threads,
            arguments.batch_pairs,
            arguments.repeats,
        )
        for case in choose_cases(arguments):
            results.append(benchmark.run_case(settings, *case))
            after = machine.matmul_peak_flops(threads)
            peaks = {name: max(peak, after[name]) for name, peak in peaks.items()}
            benchmark.print_case(console, results[-1], peaks)
            records = [benchmark.record(result, peaks) for result in results]
            report.write_results(arguments.output, {**head, "peak_flops": peaks}, records)
    rates = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in peaks.items())
    console.print(f"torch.mm at its best with {threads} threads: {rates}. {arguments.output}")


if __name__ == "__main__":
    main()
