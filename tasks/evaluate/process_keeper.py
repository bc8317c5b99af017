"""Runs a command for as long as standard input is open; run as a script, it imports nothing else.

Whoever started it holds the other end. The kernel closes that end however its process ends, and
then the command and all that it started are ended. Linux ends the command with the keeper, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


def keep(command: Sequence[str]) -> int:
    """Run a command until it or standard input ends, and return its status as a shell tells it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_follow_parent
    )
    threading.Thread(target=_watch, daemon=True).start()
    try:
        status = server.wait()
    finally:
        # What a server left behind, whatever ended it, would hold its memory.
        end_group(server)
    return status if status >= 0 else 128 - status


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End a process and its group, and wait until all are gone: asked first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            os.killpg(server.pid, number)
            while time.monotonic() < deadline:
                server.poll()
                os.killpg(server.pid, 0)
                time.sleep(_POLL_SECONDS)
        except ProcessLookupError:
            return


def _follow_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch() -> None:
    # Not through sys.stdin: its lock would be held at the end of the interpreter.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
