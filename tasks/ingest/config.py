"""Configuration of stage ingest, by concern."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.shared import (
    UNNAMED,
    PositiveInt,
    RenderingConfig,
    RowForm,
    Section,
    Share,
    SourceConfig,
    StageConfig,
    setting,
)
from tasks.data.quarantine import REASONS, UNUSABLE, Action


class DemoWorldConfig(Section):
    """The synthetic preference world behind ``ingest.source: demo``."""

    n_pairs: PositiveInt = Field(4000, description="Pairs of the demo world.")
    flip_rate: float = Field(
        0.1, ge=0.0, lt=0.5, description="Share of pairs whose label is wrong on purpose."
    )


class SplitConfig(Section):
    """Which rows stay together, and where the splits come from."""

    group_by: Literal["conversation", "prompt"] = Field(
        "conversation",
        description="What is never in two splits. conversation: all rows with the same first user "
        "turn, so that no prompt continues one of another split; prompt: the same prompt.",
    )
    assign: Literal["hash", "file"] = Field(
        "hash",
        description="hash: by seeded hash of the group; file: as the files are named (train, "
        "validation, test), and rows of a group that a more held-out split has are left out.",
    )


class LengthLimitsConfig(Section):
    """Lengths in characters above which a row is too long; null is no limit."""

    max_prompt_chars: PositiveInt | None = Field(None, description="Of the prompt.")
    max_response_chars: PositiveInt | None = Field(None, description="Of either response.")


class TokenColumnsConfig(Section):
    """Token ids beside the text, for a model that is known already."""

    model_dir: str = Field(description="A directory with a tokenizer that has a chat template.")
    rendering: RenderingConfig = RenderingConfig()


class IngestConfig(StageConfig):
    """Preference pairs in, validated Parquet out."""

    source: str = Field(
        "demo",
        description="'demo', a file (.jsonl, .jsonl.gz, .json, .parquet), a glob, a directory of "
        "HH-RLHF subsets, or a hub data set (owner/name).",
    )
    sources: tuple[SourceConfig, ...] = Field(
        (), description="Several sources with names and weights, instead of `source`."
    )
    format: RowForm = Field("auto", description="Format of the rows of `source`.")
    demo: DemoWorldConfig = DemoWorldConfig()
    validation_share: Share = Field(
        0.1, description="Share of the groups that choose hyperparameters and checkpoints."
    )
    test_share: Share = Field(0.1, description="Share of the groups that only measure.")
    splits: SplitConfig = SplitConfig()
    deduplicate: Literal["normalized", "exact", "none"] = Field(
        "normalized",
        description="What makes two pairs the same; normalized: case and white space aside.",
    )
    reasons: dict[str, Action] = Field(
        {},
        description="What is done with rows of a reason: drop (to quarantine), keep (with a flag) "
        "or fail; non_alternating and control_characters are kept unless they are named here, "
        "all others dropped.",
    )
    limits: LengthLimitsConfig = LengthLimitsConfig()
    tokens: TokenColumnsConfig | None = Field(
        None, description="Also write token ids, for programs of your own."
    )
    max_quarantine_share: float = Field(
        0.2, ge=0.0, le=1.0, description="Above this the source counts as broken."
    )
    rows_per_group: PositiveInt = Field(10_000, description="Rows of one Parquet row group.")
    workers: PositiveInt | None = setting(
        None, description="Processes that parse; null: one for each core."
    )

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources; a single one is named after its subset."""
        if self.sources:
            return self.sources
        return (SourceConfig(name=UNNAMED, path=self.source, format=self.format),)

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = sorted(set(self.reasons) - set(REASONS))
        if unknown:
            raise ValueError(f"reasons: unknown {unknown}; there are {', '.join(REASONS)}")
        unusable = sorted(r for r, action in self.reasons.items() if action == "keep")
        unusable = [reason for reason in unusable if reason in UNUSABLE]
        if unusable:
            raise ValueError(f"reasons: rows of {', '.join(unusable)} hold no pair to keep")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: names must differ, found {names}")
        if self.sources and self.source != "demo":
            raise ValueError("give `source` or `sources`, not both")
        return self
