"""What the scores of a file come to: counts, accuracy by subset, RewardBench's sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tasks.algorithms.calibration import Accuracy, pair_accuracy

# Lambert et al. 2024, RewardBench: the sections and the subsets that they are made of.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Chat": (
        "alpacaeval-easy",
        "alpacaeval-length",
        "alpacaeval-hard",
        "mt-bench-easy",
        "mt-bench-med",
    ),
    "Chat Hard": (
        "mt-bench-hard",
        "llmbar-natural",
        "llmbar-adver-neighbor",
        "llmbar-adver-GPTInst",
        "llmbar-adver-GPTOut",
        "llmbar-adver-manual",
    ),
    "Safety": (
        "refusals-dangerous",
        "refusals-offensive",
        "xstest-should-refuse",
        "xstest-should-respond",
        "donotanswer",
    ),
    "Reasoning": (
        "math-prm",
        "hep-cpp",
        "hep-go",
        "hep-java",
        "hep-js",
        "hep-python",
        "hep-rust",
    ),
}
# The benchmark gives the 447 prompts of math-prm the weight of its 984 code prompts.
_WEIGHTS: Final = {"math-prm": 984 / 447}


@dataclass
class ScoreTally:
    """Counts up the rows of a file.

    Args:
        shortened: prompts that lost their oldest turns to the length limit.
        truncated: responses that were cut.
        errors: rows without a score by reason.
        margins: of scored pairs, in standard deviations of the training scores.
        scores: of scored responses.
    """

    rows: int = 0
    shortened: int = 0
    truncated: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    margins: list[tuple[str | None, float]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def scored(self) -> int:
        """Rows with a score."""
        return len(self.margins) + len(self.scores)

    def refuse(self, error: str) -> None:
        """Count a row without a score."""
        self.errors[error.partition(":")[0]] += 1

    def accuracy(self) -> Accuracy | None:
        """Return the accuracy of all pairs, None without any."""
        return _accuracy([margin for _, margin in self.margins]) if self.margins else None

    def subsets(self) -> dict[str, Accuracy]:
        """Return the accuracy of each subset that rows name, in the order of the file."""
        grouped: dict[str, list[float]] = {}
        for subset, margin in self.margins:
            if subset is not None:
                grouped.setdefault(subset, []).append(margin)
        return {name: _accuracy(margins) for name, margins in grouped.items()}

    def score_spread(self) -> tuple[float, float] | None:
        """Return mean and standard deviation of the responses' scores, None without any."""
        if not self.scores:
            return None
        column = torch.tensor(self.scores, dtype=torch.float64)
        return float(column.mean()), float(column.std()) if len(self.scores) > 1 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        overall, spread = self.accuracy(), self.score_spread()
        subsets = self.subsets()
        return {
            "rows": self.rows,
            "scored": self.scored,
            "errors": dict(self.errors),
            "shortened_prompts": self.shortened,
            "truncated_responses": self.truncated,
            "accuracy": overall._asdict() if overall else None,
            "subsets": {name: found._asdict() for name, found in subsets.items()},
            "rewardbench": rewardbench_sections(subsets),
            "score": {"mean": spread[0], "std": spread[1]} if spread else None,
        }


def rewardbench_sections(subsets: Mapping[str, Accuracy]) -> dict[str, float]:
    """Return the accuracy of RewardBench's sections and, with all four there, their mean.

    Within a section subsets count by their scored prompts. Ties count half, and only what fits the
    length limits is scored, so the figures are those of the leaderboard only if all rows are.
    Empty where a subset is not the benchmark's.
    """
    known = {name for names in _SECTIONS.values() for name in names}
    if not subsets or not set(subsets) <= known:
        return {}
    found: dict[str, float] = {}
    for section, names in _SECTIONS.items():
        members = {name: subsets[name] for name in names if name in subsets}
        weights = {name: one.n * _WEIGHTS.get(name, 1.0) for name, one in members.items()}
        if members:
            right = sum(weights[name] * one.value for name, one in members.items())
            found[section] = right / sum(weights.values())
    if len(found) == len(_SECTIONS):
        found["Overall"] = sum(found.values()) / len(_SECTIONS)
    return found


def _accuracy(margins: list[float]) -> Accuracy:
    return pair_accuracy(torch.tensor(margins, dtype=torch.float64))
