"""The command line of the benchmarks: `make bench`, or from the project's root

    PYTHONPATH=tests .venv/bin/python -m benchmarks.run --help

A benchmark is a module with a function like `reward_model.run_case`; it is named here.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import machine, report, reward_model
from tasks.workspace import Workspace

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT.parent / "shared" / "data" / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
PEER_PYTHON: Final = ROOT / ".venv" / "bench" / "bin" / "python"
BENCHMARKS: Final = {"reward-model": reward_model}
# A pass over these takes seconds with the tiny model and minutes with the other.
_PAIRS: Final = {reward_model.TINY: 512, reward_model.SMOLLM2: 64}
_QUICK_PAIRS: Final = 64


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``--data`` is required where the usual file is not there."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Benchmarks.")
    parser.add_argument("benchmark", nargs="?", choices=list(BENCHMARKS), default="reward-model")
    parser.add_argument("--model", help="tiny, smollm2-135m, a directory or a hub id; default all")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: both, tiny fp32 only")
    parser.add_argument("--pairs", type=int, help="pairs of a pass")
    parser.add_argument("--repeats", type=int, help="timed passes of each side; default 3")
    parser.add_argument("--batch-pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the tiny model, a minute")
    parser.add_argument("--data", type=Path, default=DATA if DATA.exists() else None)
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="has TRL")
    output = Workspace.from_environment().root / "bench.json"
    parser.add_argument("--output", type=Path, default=output)
    arguments = parser.parse_args()
    if arguments.data is None or not arguments.data.is_file():
        parser.error("--data: name a file of HH-RLHF pairs (.jsonl or .jsonl.gz)")
    if not arguments.peer_python.is_file():
        parser.error(f"--peer-python: no {arguments.peer_python}; `make bench` makes it")
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 3
    return arguments


def choose_cases(arguments: argparse.Namespace) -> list[tuple[str, Any, int]]:
    """Return model, precision and number of pairs of each case."""
    models = [reward_model.TINY, reward_model.SMOLLM2]
    if arguments.model or arguments.quick:
        models = [arguments.model or reward_model.TINY]
    cases = []
    for model in models:
        dtypes = ["fp32"] if model == reward_model.TINY or arguments.quick else ["fp32", "bf16"]
        pairs = _QUICK_PAIRS if arguments.quick else _PAIRS.get(model, _QUICK_PAIRS)
        for dtype in [arguments.dtype] if arguments.dtype else dtypes:
            cases.append((model, dtype, arguments.pairs or pairs))
    return cases


def main() -> None:
    """Run the cases, print a table for each and write the JSON file."""
    arguments = parse_arguments()
    # So that the processes of both sides end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # verl names the backends that are not installed, each time it is imported.
    warnings.filterwarnings("ignore", message=".*engine is not available")
    console = Console(width=160)
    threads = arguments.threads
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
            results.append(BENCHMARKS[arguments.benchmark].run_case(settings, *case))
            after = machine.matmul_peak_flops(threads)
            peaks = {name: max(peak, after[name]) for name, peak in peaks.items()}
            report.print_case(console, results[-1], peaks)
            records = [report.case_record(result, peaks) for result in results]
            report.write_results(arguments.output, {**head, "peak_flops": peaks}, records)
    rates = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in peaks.items())
    console.print(f"torch.mm at its best with {threads} threads: {rates}. {arguments.output}")


if __name__ == "__main__":
    main()
