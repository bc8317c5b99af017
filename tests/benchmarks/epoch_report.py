"""Results of the offline PPO benchmark as a table and as plain values."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.report import SideResult

# What a block of a side consists of, in the order of the table; own passes are per run, not epoch.
UPDATE, SNAPSHOT, DRIVER = "update", "snapshot", "driver"
REFERENCE_PASS, REWARD_PASS = "reference pass", "reward pass"
PARTS: Final = (UPDATE, SNAPSHOT, DRIVER, REFERENCE_PASS, REWARD_PASS)


@dataclass
class EpochCase:
    """One model, precision and set of pairs.

    Args:
        tokens_once: of one epoch, each prompt counted once.
        tokens_twice: of one epoch, each prompt counted with each of its two responses.
            Positions and padding of the sides are those of the update alone.
        flops_per_token: 6 N as in `report.CaseResult`, of the update alone.
        epochs: that the passes before the loop are shared by.
        meaning: where that comes from.
        sides: this project first; ratios are to TRL's default sampling.
    """

    model: str
    dtype: str
    n_pairs: int
    batch_pairs: int
    tokens_once: int
    tokens_twice: int
    flops_per_token: float
    epochs: float
    meaning: str
    sides: list[SideResult]

    def part(self, side: SideResult, name: str) -> float:
        """Return the median seconds of a part, whole."""
        return statistics.median(block.parts.get(name, 0.0) for block in side.blocks)

    def shared_seconds(self, side: SideResult) -> float:
        """Return the median time with all passes shared by the epochs, on either side."""
        if side is self.sides[0]:
            return side.seconds
        return statistics.median(
            block.parts[UPDATE] + block.parts[REFERENCE_PASS] / self.epochs for block in side.blocks
        )

    def rate(self, side: SideResult, peaks: dict[str, float]) -> dict[str, float]:
        """Return ratios, rates and the update's share of the machine's peak."""
        default = self.sides[1]
        useful = self.flops_per_token * self.tokens_once / self.part(side, UPDATE)
        return {
            "of_default": side.seconds / default.seconds,
            "of_default_shared": self.shared_seconds(side) / self.shared_seconds(default),
            "shared_seconds": self.shared_seconds(side),
            "pairs_per_second": self.n_pairs / side.seconds,
            "update_share_of_own_peak": useful / peaks[self.dtype],
            "update_share_of_fp32_peak": useful / peaks["fp32"],
        }


def print_case(console: Console, case: EpochCase, peaks: dict[str, float]) -> None:
    """Print one case."""
    title = (
        f"offline PPO, {case.model} {case.dtype}: one epoch over {case.n_pairs} pairs in batches "
        f"of {case.batch_pairs}, {case.tokens_once} tokens (prompt once), {case.tokens_twice} "
        f"(prompt twice)\nown passes shared by the default config's epochs: {case.meaning}"
    )
    columns = ["side", "time", "s, median", "min - max", *PARTS, "positions", "padded"]
    columns += ["update of peak", "all passes shared"]
    table = Table(*columns, title=title)
    for side in case.sides:
        rate, seconds = case.rate(side, peaks), [block.seconds for block in side.blocks]
        parts = [case.part(side, name) for name in PARTS]
        table.add_row(
            side.name,
            f"{rate['of_default']:.2f} x",
            f"{side.seconds:.2f}",
            f"{min(seconds):.2f} - {max(seconds):.2f}",
            *(f"{value:.2f}" if value else "" for value in parts),
            f"{side.computed_tokens:.0f}",
            f"{side.padded_share:.1%}",
            f"{rate['update_share_of_own_peak']:.1%}",
            f"{rate['of_default_shared']:.2f} x",
        )
    console.print(table)


def case_record(case: EpochCase, peaks: dict[str, float]) -> dict[str, Any]:
    """Return one case as plain values."""
    sides = [
        asdict(side)
        | case.rate(side, peaks)
        | {"median_seconds": side.seconds, "padded_share": side.padded_share}
        | {"median_parts": {name: case.part(side, name) for name in PARTS}}
        for side in case.sides
    ]
    return {**asdict(case), "sides": sides}
