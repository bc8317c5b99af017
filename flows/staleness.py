"""Artefacts that stand on something older than what is there now."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from flows.stages import STAGE_SPECS
from tasks.config import STAGES, Stage
from tasks.errors import MissingInputError
from tasks.model_registry import CHAMPION, Registry
from tasks.tracking import RunRecord, Tracker


class StaleArtifact(BaseModel):
    """The newest artefact of a stage, or the champion, and why it is not up to date."""

    name: str
    stage: str
    run_id: str
    path: str
    reasons: list[str]


def stale_artifacts(tracker: Tracker) -> list[StaleArtifact]:
    """Return what would come out differently if it were made again now, in the chain's order.

    The newest finished run of each stage is looked at, and the run behind the alias ``champion``.
    An upstream has a newer version when the newest run of its stage has another fingerprint.
    """
    newest = {stage: tracker.latest_finished(stage) for stage in STAGES}
    stale: dict[str, StaleArtifact] = {}
    for stage, run in newest.items():
        found = None if run is None else _examined(stage, stage, run, newest, stale)
        if found is not None:
            stale[stage] = found
    champion = champion_run(tracker)
    if champion is not None:
        found = _examined(CHAMPION, "distill", champion, newest, stale)
        if found is not None:
            stale[CHAMPION] = found
    return list(stale.values())


def champion_run(tracker: Tracker) -> RunRecord | None:
    """Return the run that made the champion; None when no student has that alias."""
    version = Registry(tracker).of_alias(CHAMPION)
    if version is None or not version.run_id:
        return None
    try:
        return tracker.read_run(version.run_id)
    except MissingInputError:
        return None


def _examined(
    name: str,
    stage: Stage,
    run: RunRecord,
    newest: Mapping[Stage, RunRecord | None],
    stale: Mapping[str, StaleArtifact],
) -> StaleArtifact | None:
    reasons = []
    for label, wanted in STAGE_SPECS[stage].inputs.items():
        current = newest[wanted.stage]
        used = run.tags.get(f"upstream.{label}.fingerprint")
        if used is None or current is None:
            continue
        newer = current.tags.get("fingerprint")
        if used != newer:
            reasons.append(
                f"{label}: stands on {used[:12]}, the newest {wanted.stage} is {str(newer)[:12]} "
                f"(run {current.run_id})"
            )
        elif wanted.stage in stale:
            reasons.append(f"{label}: {wanted.stage} is not up to date itself")
    if not reasons:
        return None
    return StaleArtifact(
        name=name,
        stage=stage,
        run_id=run.run_id,
        path=run.tags.get("artifact.path", ""),
        reasons=reasons,
    )
