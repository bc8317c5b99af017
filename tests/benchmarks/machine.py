"""The machine: what it is, and how fast it multiplies matrices.

Run as a program it measures, so that the threads of the measurement are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (rows, inner, columns) as in torch.mm of (rows, inner) and (inner, columns).
_SHAPES: Final = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 1024, 1024),
    (4096, 1024, 4096),
)
_TRIALS: Final = 4
_BUSY_LOAD: Final = 0.5


def describe(threads: int) -> dict[str, Any]:
    """Return processor, memory, versions and load as plain values."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_1_minute": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def is_busy() -> bool:
    """Tell whether something else computes; call it before the benchmark does."""
    return os.getloadavg()[0] > _BUSY_LOAD


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that may use this many threads.

    Waiting threads sleep: spinning they would take time from the other side.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    values = {name: str(threads) for name in names} | {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **values, "TOKENIZERS_PARALLELISM": "false"}


def matmul_peak_flops(threads: int) -> dict[str, float]:
    """Return the best rate of torch.mm by dtype, in FLOP/s, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.machine", "--threads", str(threads)]
    output = subprocess.run(
        command, env=thread_environment(threads), capture_output=True, text=True, check=True
    ).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


def _measure(dtype: torch.dtype) -> float:
    best = 0.0
    for rows, inner, columns in _SHAPES:
        left = torch.randn(rows, inner).to(dtype)
        right = torch.randn(inner, columns).to(dtype)
        torch.mm(left, right)
        for _ in range(_TRIALS):
            start = time.perf_counter()
            torch.mm(left, right)
            best = max(best, 2.0 * rows * inner * columns / (time.perf_counter() - start))
    return best


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure and print {dtype: FLOP/s}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    print(json.dumps({name: _measure(dtype) for name, dtype in DTYPES.items()}))


if __name__ == "__main__":
    main()
