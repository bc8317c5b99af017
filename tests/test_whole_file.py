"""Small files are whole or not there, and nothing else stays."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.artifacts import write_whole
from tasks.errors import WorkspaceError

# Dies while the file is half written, as by a power cut.
_KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.artifacts import write_whole

os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path(sys.argv[1]), "half")
"""


def test_what_a_killed_process_left_goes_with_the_next_writing(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "first")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_text() == "first" and len(list(tmp_path.iterdir())) == 2
    # What another process writes at this moment, here or on another host where that number is
    # somebody else, or what is another file's, is left alone.
    (left,) = (file for file in tmp_path.iterdir() if file != path)
    alive = left.with_name(left.name.replace(left.name.split(".")[-2], str(os.getppid())))
    away = left.with_name(left.name.replace(socket.gethostname(), "host-elsewhere"))
    other = tmp_path / left.name.replace("summary", "other")
    alive.write_text(""), away.write_text(""), other.write_text("")
    write_whole(path, "second")
    assert path.read_text() == "second"
    assert set(tmp_path.iterdir()) == {path, alive, away, other}


def test_writing_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkspaceError, match=r"summary\.json cannot be written: No space left"):
        write_whole(tmp_path / "summary.json", "x")
    assert list(tmp_path.iterdir()) == []
