"""The metrics of a training run, one line per step, that a resume continues and never repeats."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tasks.artifacts import appearing
from tasks.errors import ArtifactError, DataError, WorkspaceError

FILE_NAME: Final = "history.jsonl"

History = list[tuple[int, dict[str, float]]]


class RunHistory:
    """Append-only file of metrics beside the checkpoints; one process writes to it.

    A line reaches the operating system before `append` returns, so a killed process loses none. It
    reaches the disk with `sync`, which belongs before each checkpoint: after a crash of the machine
    the run goes on from a checkpoint, so what was written after the last one is cut anyway, and a
    step need not wait for the disk.

    Args:
        path: file whose directory exists.
        last_step: the newest step in it, None for an empty one.
    """

    def __init__(self, path: Path, last_step: int | None) -> None:
        self.path = path
        self.last_step = last_step
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file: int | None = os.open(path, flags, 0o644)

    @classmethod
    def open(cls, directory: Path, resumed_step: int) -> RunHistory:
        """Open the history of a run that goes on after a step; later lines are cut.

        Args:
            directory: of the checkpoints; made if it is not there.
            resumed_step: steps of the checkpoint that the run goes on from, 0 for a fresh start
                (lines of step 0, before training, stay).

        Raises:
            ArtifactError: a broken line among those that stay.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        kept = list(_intact_lines(path, stop_after=resumed_step))
        if path.exists():
            with appearing(path) as temporary:
                temporary.write_bytes(b"".join(line for line, _, _ in kept))
        return cls(path, kept[-1][1] if kept else None)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what was measured at a step; the same step may come again with other metrics.

        Raises:
            DataError: a step before the last one.
        """
        if step < (0 if self.last_step is None else self.last_step):
            raise DataError(
                f"{self.path} goes on with step {step} after step {self.last_step or 0}",
                "steps that never fall",
                "count a step after a rollback as a further step",
            )
        assert self._file is not None, "a closed history takes no more lines"
        line = _line(step, metrics)
        # A short write would leave the rest of this line to be glued to the next one.
        while line:
            line = line[os.write(self._file, line) :]
        self.last_step = step

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Sync and let go of the file; a second call does nothing."""
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def read(self) -> History:
        """Return all that was written so far."""
        return read_history(self.path)


def read_history(path: Path) -> History:
    """Return the metrics by step, in order; a torn end of the file is left out.

    Lines of one step are merged. A value that was not finite is so again.

    Raises:
        ArtifactError: a broken line before an intact one.
    """
    merged: History = []
    for _, step, metrics in _intact_lines(path):
        if merged and merged[-1][0] == step:
            merged[-1][1].update(metrics)
        else:
            merged.append((step, metrics))
    return merged


def write_history(path: Path, history: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """Write a whole history; the file appears only when complete."""
    with appearing(path) as temporary:
        temporary.write_bytes(b"".join(_line(step, metrics) for step, metrics in history))


def _line(step: int, metrics: Mapping[str, float]) -> bytes:
    values = {name: _plain(float(value)) for name, value in metrics.items()}
    text = json.dumps({"step": step, "metrics": values}, allow_nan=False)
    return text.encode() + b"\n"


def _plain(value: float) -> float | str:
    # JSON has no word for NaN or infinity; float() reads these back.
    return value if math.isfinite(value) else str(value)


def _intact_lines(
    path: Path, stop_after: int | None = None
) -> Iterator[tuple[bytes, int, dict[str, float]]]:
    """Yield raw line, step and metrics up to a step or the torn end; a file not there is empty."""
    broken: int | None = None
    for number, line in enumerate(_raw_lines(path), start=1):
        parsed = _parse(line)
        if parsed is None:
            broken = broken or number
        elif stop_after is not None and parsed[0] > stop_after:
            return
        elif broken is not None:
            raise ArtifactError(
                f"{path}, line {broken} is no metrics of a step, and line {number} after it is",
                "broken lines only at the end, where a crash leaves them",
                f"remove the line, or {path} to go on without the plots of what came before",
            )
        else:
            yield (line, *parsed)


def _raw_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as handle:
        yield from handle


def _parse(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return step and metrics, or None for a line that is torn or something else."""
    if not line.endswith(b"\n"):
        return None
    try:
        found: Any = json.loads(line)
        step, metrics = found["step"], found["metrics"]
        values = {str(name): float(value) for name, value in metrics.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (step, values) if isinstance(step, int) else None


# JSON Lines that survive a kill: every row is on the disk, whole, before the next step.


class LineStore:
    """Rows of one file, appended from any thread, whole or not at all.

    A last line that a kill left unfinished is cut off when the store is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self.rows: list[dict[str, Any]] = self._recover()
        except OSError as error:
            raise self._unwritable(error) from error

    def _recover(self) -> list[dict[str, Any]]:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._handle, whole)
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{self.path}, line {number} is not JSON: {error}",
                    "rows that this program wrote",
                    "remove the file; what it held is made again",
                ) from error
            rows.append(row)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and wait until it is on the disk.

        Raises:
            DataError: a value that JSON or UTF-8 cannot hold.
            WorkspaceError: the disk is full or cannot be written.
        """
        try:
            line = (json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n").encode()
        except ValueError as error:
            raise DataError(f"{self.path.name} cannot hold a row: {error}", "finite numbers") from (
                error
            )
        with self._lock:
            try:
                self._write(line)
                os.fsync(self._handle)
            except OSError as error:
                raise self._unwritable(error) from error
            self.rows.append(dict(row))

    def _write(self, line: bytes) -> None:
        written = os.write(self._handle, line)
        while written < len(line):
            written += os.write(self._handle, line[written:])

    def close(self) -> None:
        """Close the file; rows stay readable."""
        os.close(self._handle)

    def _unwritable(self, error: OSError) -> WorkspaceError:
        return WorkspaceError(
            f"{self.path} cannot be written: {error.strerror}", "a writable workspace", "free space"
        )
