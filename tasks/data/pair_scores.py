"""What a reward model says of each pair that it was given, as a Parquet table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from tasks.data.schemas import RowGroupWriter, make_schema

_ROWS_PER_GROUP: Final = 50_000

PAIR_SCORE_SCHEMA: Final = make_schema(
    "pair_scores",
    [
        ("pair_id", pa.string(), False),
        ("split", pa.string(), False),
        ("component", pa.string(), False),
        ("chosen_score", pa.float64(), False),
        ("rejected_score", pa.float64(), False),
        ("disagreement", pa.float64(), True),
        ("held_out_margin", pa.float64(), True),
        ("trust", pa.float64(), True),
    ],
)


@dataclass(frozen=True, slots=True)
class PairScore:
    """One pair and one component.

    Args:
        chosen_score, rejected_score: in standard deviations of the component's training scores.
        disagreement: standard deviation of the members' margins, raw; None for one member.
        held_out_margin: calibrated margin, in nats, of the member that did not see the pair; None
            where labels were taken as they are.
        trust: probability that the label is right; None likewise.
    """

    pair_id: str
    split: str
    component: str
    chosen_score: float
    rejected_score: float
    disagreement: float | None = None
    held_out_margin: float | None = None
    trust: float | None = None


def write_pair_scores(path: Path, scores: Iterable[PairScore]) -> None:
    """Write the table; it appears only when complete."""
    with RowGroupWriter(path, PAIR_SCORE_SCHEMA, _ROWS_PER_GROUP) as writer:
        writer.write(asdict(score) for score in scores)
