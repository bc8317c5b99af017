"""Runs a command for as long as standard input is open; run as a script, it imports nothing else.

Whoever started it holds the other end. The kernel closes that end however its process ends, and
then the command and all that it started are ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_STOP_SECONDS = 20.0


def keep(command: Sequence[str]) -> int:
    """Run a command until it or standard input ends, and return its status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        # Not through sys.stdin: its lock would be held at the end of the interpreter.
        while os.read(0, 1):
            pass
        end_group(server)

    threading.Thread(target=watch, daemon=True).start()
    status = server.wait()
    # What a server left behind, whatever ended it, would hold its memory.
    end_group(server)
    return status


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End a process and its group: asked first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(_STOP_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
