"""Results as a table and as a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Block:
    """One timed pass over all pairs.

    Args:
        loss: mean over the steps, as the side reports it.
        computed_tokens: positions that the model was run on.
        padded_tokens: those of them that hold no token.
        parts: seconds of what the pass consists of, where it is told.
    """

    seconds: float
    steps: int
    loss: float
    computed_tokens: int
    padded_tokens: int
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class SideResult:
    """One side of a comparison: its repeats."""

    name: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median time of a pass."""
        return statistics.median(block.seconds for block in self.blocks)

    @property
    def padded_share(self) -> float:
        """Padding of all computed positions, over all repeats."""
        padded = sum(block.padded_tokens for block in self.blocks)
        return padded / sum(block.computed_tokens for block in self.blocks)

    @property
    def computed_tokens(self) -> float:
        """Mean positions of a pass."""
        return statistics.mean(block.computed_tokens for block in self.blocks)


@dataclass
class CaseResult:
    """One model, precision and set of pairs.

    Args:
        tokens_once: of one pass, each pair's prompt counted once.
        tokens_twice: of one pass, each pair's prompt counted with each of its two responses.
        flops_per_token: 6 N, N the weights that every token is multiplied with: without embeddings
            and the vocabulary head. Attention's own products are left out.
        sides: this project first; ratios are to it.
    """

    model: str
    dtype: str
    n_pairs: int
    tokens_once: int
    tokens_twice: int
    flops_per_token: float
    sides: list[SideResult]

    def rate(self, side: SideResult, peaks: dict[str, float]) -> dict[str, float]:
        """Return rates of useful work, and which share of the machine's peaks they are: fp32's, and
        that of the case's own precision."""
        useful = self.flops_per_token * self.tokens_once / side.seconds
        return {
            "pairs_per_second": self.n_pairs / side.seconds,
            "tokens_once_per_second": self.tokens_once / side.seconds,
            "tokens_twice_per_second": self.tokens_twice / side.seconds,
            "share_of_own_peak": useful / peaks[self.dtype],
            "share_of_fp32_peak": useful / peaks["fp32"],
            "share_of_fp32_peak_prompt_twice": useful
            / peaks["fp32"]
            * self.tokens_twice
            / self.tokens_once,
            "times_as_long": side.seconds / self.sides[0].seconds,
        }


def print_case(console: Console, case: CaseResult, peaks: dict[str, float]) -> None:
    """Print one case."""
    title = (
        f"reward model, {case.model} {case.dtype}: {case.n_pairs} pairs, "
        f"{case.tokens_once} tokens (prompt once), {case.tokens_twice} (prompt twice)"
    )
    columns = ["side", "time", "s, median", "min - max", "pairs/s", "tokens/s once", "twice"]
    columns += ["positions", "padded", "of fp32 peak once", "twice"]
    table = Table(*columns, title=title)
    for side in case.sides:
        rate, seconds = case.rate(side, peaks), [block.seconds for block in side.blocks]
        table.add_row(
            side.name,
            f"{rate['times_as_long']:.2f} x",
            f"{side.seconds:.2f}",
            f"{min(seconds):.2f} - {max(seconds):.2f}",
            f"{rate['pairs_per_second']:.2f}",
            f"{rate['tokens_once_per_second']:.0f}",
            f"{rate['tokens_twice_per_second']:.0f}",
            f"{side.computed_tokens:.0f}",
            f"{side.padded_share:.1%}",
            f"{rate['share_of_fp32_peak']:.1%}",
            f"{rate['share_of_fp32_peak_prompt_twice']:.1%}",
        )
    console.print(table)


def case_record(case: CaseResult, peaks: dict[str, float]) -> dict[str, Any]:
    """Return one case as plain values."""
    sides = [
        asdict(side)
        | case.rate(side, peaks)
        | {"median_seconds": side.seconds, "padded_share": side.padded_share}
        for side in case.sides
    ]
    return {**asdict(case), "sides": sides}


def write_results(path: Path, head: dict[str, Any], cases: Sequence[dict[str, Any]]) -> None:
    """Write the file anew; called after each case, so that a broken run leaves what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "cases": list(cases)}, indent=2) + "\n")
