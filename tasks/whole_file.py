"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tasks.errors import WorkspaceError

_SUFFIX = ".unfinished"


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that gets its name when the block ends well.

    What is unfinished carries the name of its process: it goes when the writing fails, and what a
    process left that was killed goes with the next writing of the same file.
    """
    ours = f".{path.name}.{socket.gethostname()}."
    temporary = path.with_name(f"{ours}{os.getpid()}{_SUFFIX}")
    _sweep(path.parent, ours)
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        WorkspaceError: the directory cannot be written.
    """
    try:
        with appearing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkspaceError(
            f"{path} cannot be written: {error.strerror or error}",
            "a writable workspace with room",
            "free space, or make its directory writable",
        ) from error


def _sweep(directory: Path, ours: str) -> None:
    """Remove what dead processes of this machine left."""
    for file in directory.iterdir():
        pid = file.name.removeprefix(ours).removesuffix(_SUFFIX)
        if (
            file.name == f"{ours}{pid}{_SUFFIX}"
            and pid.isdigit()
            and not psutil.pid_exists(int(pid))
        ):
            file.unlink(missing_ok=True)
