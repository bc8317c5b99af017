"""JSON Lines that survive a kill: every row is on the disk, whole, before the next step."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.errors import DataError, WorkspaceError


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
