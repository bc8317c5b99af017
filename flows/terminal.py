"""Where a command prints."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# Rich takes a pipe for 80 columns wide and folds what does not fit.
_WIDEST = 10_000


def terminal() -> Console:
    """Return a console that fits tables to a terminal; elsewhere every value is on one line."""
    console = Console()
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = _WIDEST
    return console
