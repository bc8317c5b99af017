"""Sources of every shape: the number of processes changes no byte, and a kill leaves nothing."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tasks.ingest.stage as stage
from tasks.artifacts import PreferenceDataset, load_artifact
from tasks.ingest import sources as chunk_sources

Ingest = Callable[..., PreferenceDataset]
ROOT = Path(__file__).resolve().parents[2]
H, A = "\n\nHuman: ", "\n\nAssistant: "
SHAPES = ("file", "directory", "mixture")
# Of each shape; 22 in all.
KILLS = {"file": 8, "directory": 7, "mixture": 7}


def line_of(number: int) -> bytes:
    head = f"{H}question {number}\u2028 {'x' * (number % 700)}{A}"
    rejected = "" if number % 97 == 0 else f"no {number}"
    row = {"chosen": f"{head}yes", "rejected": head + rejected}
    return json.dumps(row, ensure_ascii=number % 2 == 0).encode() + b"\n"


def lines_of(start: int, stop: int) -> bytes:
    return b"".join(line_of(number) for number in range(start, stop))


def _write_directory(root: Path) -> Path:
    """Write four packed files of two subsets; each repeats 20 rows of the one before."""
    for index, name in enumerate(("harmless-base", "helpful-base")):
        for part, split in enumerate(("test", "train")):
            start = 2000 * index + 1000 * part
            path = root / name / f"{split}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(lines_of(max(0, start - 20), start + 1000), 1))
    return root


def _write_table(path: Path) -> Path:
    """Write scored rows with a subset each, a tie in every 50th, in small row groups."""
    numbers = range(3000)
    columns = {
        "prompt": [f"table {n} {'y' * (n % 300)}" for n in numbers],
        "chosen": [f"yes {n}" for n in numbers],
        "rejected": [f"no {n}" for n in numbers],
        "score_chosen": [1.0 if n % 50 else 0.0 for n in numbers],
        "score_rejected": [0.0 for _ in numbers],
        "kind": [f"k{n % 3}" for n in numbers],
    }
    pq.write_table(pa.table(columns), path, row_group_size=700)
    return path


def config_of(shape: str, root: Path) -> dict[str, Any]:
    """Write a source of a shape; return the fields of the config that name it."""
    root.mkdir()
    if shape == "file":
        path = root / "s.jsonl"
        path.write_bytes(lines_of(0, 4000) + lines_of(0, 50))
        return {"source": str(path)}
    directory = _write_directory(root / "hh")
    if shape == "directory":
        return {"source": str(directory)}
    table = str(_write_table(root / "t.parquet"))
    return {
        "sources": [
            {"name": "hh", "path": str(directory), "weight": 0.5},
            {"name": "table", "path": table, "weight": 0.7, "subset_column": "kind"},
        ]
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_processes_changes_no_byte(
    shape: str, ingest: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", 2**17)
    # Packed rows are fewer bytes than several processes are worth.
    monkeypatch.setattr(stage, "_SMALL_SOURCE_BYTES", 0)
    fields = config_of(shape, tmp_path / "sources")
    one, two, three = (
        ingest(**fields, workers=n, rows_per_group=300, max_quarantine_share=1.0) for n in (1, 2, 3)
    )
    assert one.manifest.files == two.manifest.files == three.manifest.files
    counts = one.manifest.counts
    assert counts["rows"] == counts["kept"] + counts["quarantined"]
    if shape == "mixture":
        # 4,060 rows of text and 3,000 of the table.
        assert counts["rows"] == 7060
        # Three tenths of the 3,000 and half of the 4,060, but for ties and empty responses, which
        # have other reasons; deviations sqrt(3000 * 0.21) = 25 and sqrt(4060 / 4) = 32.
        assert abs(counts["quarantined_not_sampled"] - (900 + 2030)) < 250
        return
    # 0, 97, ... below 4,000 are empty. Of those, rows repeat in the file 0 alone, and in the
    # directory 980 to 999, 1,980 to 1,999 and 2,980 to 2,999: none.
    assert counts["quarantined_empty_response"] == 42 + (1 if shape == "file" else 0)
    assert counts["quarantined_duplicate"] == (49 if shape == "file" else 60)
    assert counts["rows"] == (4050 if shape == "file" else 4060)


KILLED = """
import json, os, sys, traceback
from pathlib import Path
from tasks.artifacts import Draft
from tasks.ingest.config import IngestConfig
from tasks.context import StageContext
from tasks.data.source import find_files
from tasks.ingest import sources as chunk_sources
from tasks.ingest import stage
from tasks.workspace import Workspace

class Log:
    def metrics(self, values, step): ...
    def progress(self, done, total, message=""): ...
    def event(self, name, message): ...
    def file(self, path, directory=""): ...

def ingest(home, fields):
    cfg = IngestConfig(**fields, workers=2, rows_per_group=200, max_quarantine_share=1.0)
    draft = Draft("preference_dataset", "ingest", "f" * 64, config={})
    ctx = StageContext(stage="ingest", fingerprint="f" * 64, workspace=Workspace(home),
                       checkpoint_dir=home / "checkpoints", artifacts_dir=home / "data",
                       draft=draft, log=Log())
    files = [file for source in cfg.all_sources for file in find_files(source)]
    stage.ingest_pairs(ctx, cfg, files)

chunk_sources.CHUNK_BYTES = 2**17
stage._SMALL_SOURCE_BYTES = 0
# A process for each run, without the seconds that the imports take.
for line in sys.stdin:
    home, fields = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ingest(Path(home), fields)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class _Runs:
    """Starts runs, one after another, each in a process of its own."""

    def __init__(self) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", KILLED],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, home: Path, fields: dict[str, Any]) -> psutil.Process:
        """Return the process that has just started."""
        assert self.parent.stdin is not None
        print(json.dumps([str(home), fields]), file=self.parent.stdin, flush=True)
        return psutil.Process(self._number())

    def wait(self) -> int:
        """Return the exit code of the run, negative for a signal."""
        return self._number()

    def _number(self) -> int:
        assert self.parent.stdout is not None
        return int(self.parent.stdout.readline())


@pytest.fixture(scope="module")
def runs() -> Iterator[_Runs]:
    found = _Runs()
    yield found
    found.parent.kill()
    found.parent.wait()


def _complete(home: Path) -> list[PreferenceDataset]:
    """Return the datasets that a reader could take for complete; each must verify."""
    directories = home.joinpath("data").glob("[!.]*")
    return [load_artifact(path, PreferenceDataset) for path in directories]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kill_at_any_moment_leaves_nothing_that_looks_complete(
    shape: str, tmp_path: Path, runs: _Runs
) -> None:
    fields = config_of(shape, tmp_path / "sources")
    runs.start(tmp_path / "whole", fields)
    started = time.monotonic()
    assert runs.wait() == 0
    seconds = time.monotonic() - started
    (right,) = _complete(tmp_path / "whole")
    home = tmp_path / "killed"
    moments = random.Random(SHAPES.index(shape))
    workers: list[psutil.Process] = []
    for number in range(KILLS[shape]):
        process = runs.start(home, fields)
        # A random moment of each part of the run, so that every phase has its turn.
        time.sleep(seconds * (number + moments.random()) / KILLS[shape])
        with suppress(psutil.NoSuchProcess):
            workers += process.children(recursive=True)
            process.kill()
        assert runs.wait() in (-signal.SIGKILL, 0)
        for dataset in _complete(home):
            assert dataset.manifest.files == right.manifest.files
    before = len(_complete(home))
    runs.start(home, fields)
    assert runs.wait() == 0
    found = _complete(home)
    assert len(found) == before + 1
    assert all(dataset.manifest.files == right.manifest.files for dataset in found)
    # What the killed runs left is gone, and so are their workers.
    assert [p.name for p in (home / "data").iterdir() if p.name.startswith(".")] == []
    assert list((home / "checkpoints").iterdir()) == []
    assert workers
    assert psutil.wait_procs(workers, timeout=20)[1] == []
