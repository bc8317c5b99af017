"""What the tests that kill a stage in the middle of its work look at from outside."""

from __future__ import annotations

import os
from pathlib import Path


def newest_step(home: Path, stage: str) -> int:
    """Return the step of the newest whole checkpoint of a running stage, -1 without one."""
    # A half-written one may be renamed while it is looked at: os.walk passes by what is gone.
    names = [name for _, found, _ in os.walk(home / "checkpoints" / stage) for name in found]
    steps = [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]
    return max(steps, default=-1)
