"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PhaseClock:
    """Adds up seconds by phase; what no phase takes is ``other``."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time towards a phase. Phases do not nest."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - start

    def shares(self) -> dict[str, float]:
        """Return ``time_share_<phase>``, which add up to 1, since the clock was made."""
        total = max(time.monotonic() - self.started_at, 1e-9)
        shares = {f"time_share_{name}": value / total for name, value in self.seconds.items()}
        return {**shares, "time_share_other": max(0.0, 1.0 - sum(shares.values()))}
