"""What a reward model's artefact says of its components: ``reward.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE: Final = "reward.json"


@dataclass(frozen=True)
class RewardComponent:
    """One kind of reward: the mean score of its members.

    Args:
        name: for instance ``preference`` or ``harmlessness``.
        member_dirs: one-label token classifiers in transformers format, at least one.
        member_means: mean score of the training responses by each member.
        std: standard deviation of the averaged scores of the same responses.
    """

    name: str
    member_dirs: tuple[Path, ...]
    member_means: tuple[float, ...]
    std: float

    @property
    def mean(self) -> float:
        """Mean of the averaged scores of the training responses."""
        return sum(self.member_means) / len(self.member_means)


def read_reward_components(directory: Path) -> dict[str, RewardComponent]:
    """Return what `write_reward_components` wrote, in its order."""
    loaded = json.loads((directory / _FILE).read_text())
    return {
        name: RewardComponent(
            name,
            tuple(directory / member["directory"] for member in record["members"]),
            tuple(member["mean"] for member in record["members"]),
            record["std"],
        )
        for name, record in loaded["components"].items()
    }


def write_reward_components(directory: Path, components: Iterable[RewardComponent]) -> None:
    """Write the record beside the members, which must lie under ``directory``."""
    records = {
        component.name: {
            "members": [
                {"directory": str(member.relative_to(directory)), "mean": mean}
                for member, mean in zip(component.member_dirs, component.member_means, strict=True)
            ],
            "std": component.std,
        }
        for component in components
    }
    text = json.dumps({"components": records}, indent=2) + "\n"
    (directory / _FILE).write_text(text, encoding="utf-8")
