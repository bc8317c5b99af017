"""Small files that are written whole or not at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from tasks.errors import WorkspaceError

_SUFFIX = ".unfinished"


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    What is unfinished carries the name of its process: it goes when the writing fails, and what a
    process left that was killed goes with the next writing of the same file.

    Raises:
        WorkspaceError: the directory cannot be written.
    """
    ours = f".{path.name}.{socket.gethostname()}."
    temporary = path.with_name(f"{ours}{os.getpid()}{_SUFFIX}")
    try:
        _sweep(path.parent, ours)
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
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
