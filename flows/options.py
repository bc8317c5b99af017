"""What the chain tells a stage besides its config and inputs."""

from __future__ import annotations

from pydantic import Field

from tasks.config import PositiveInt, Section, TrackingConfig


class RunOptions(Section):
    """How a stage is run; nothing here changes its result.

    The defaults suit a run from the Prefect UI.
    """

    reuse: bool = Field(
        False,
        description="Answer with a finished artefact of the same fingerprint, if there is one.",
    )
    tracking: TrackingConfig = Field(
        TrackingConfig(), description="Where the run is recorded; the preset's where not given."
    )
    timeout_seconds: PositiveInt | None = Field(
        None,
        description="After this time the stage ends as failed; it continues from its checkpoint.",
    )
    pipeline_run_id: str | None = Field(
        None, description="MLflow run of the chain that this stage belongs to."
    )
    is_trial: bool = Field(
        False,
        description="Part of a comparison: `latest` passes it over, and a student is no candidate.",
    )


DEFAULT_OPTIONS = RunOptions()
