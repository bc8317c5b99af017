"""Candidate to champion: by an evaluation's verdict, or by hand."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from flows.stages import STAGE_SPECS, StageSpec
from tasks.artifacts import EvalReport, StudentAdapter, load_artifact
from tasks.config.shared import PromotionConfig, TrackingConfig
from tasks.context import run_logger
from tasks.errors import ArtifactError, MissingInputError, PromotionError
from tasks.tracking.lineage import registered_version
from tasks.tracking.mlflow import RunRecord, Tracker, connect
from tasks.tracking.registry import (
    CHAMPION,
    Evaluation,
    FigureCheck,
    Promotion,
    Registry,
    StudentVersion,
    champion_of,
    compare_with_champion,
    evaluation_of,
    incomparable,
    known_evaluation,
    move_champion,
    record_evaluation,
    version_before,
)
from tasks.tracking.run_log import ProgressDisplay
from tasks.workspace import Workspace, is_elsewhere


def apply_verdict(
    tracker: Tracker,
    report: EvalReport,
    limits: PromotionConfig,
    chain_run_id: str | None,
    *,
    is_reused: bool,
) -> str:
    """Record what an evaluation says of its student, and make it the champion if it is to be one.

    A refusal is no failure of the evaluation: it is logged, with its reasons, and tagged on its
    run, on that of its chain, and on the version. The champion stays.

    Args:
        limits: of the present run; a reused evaluation may have been made with others.
        chain_run_id: the chain that is told.
        is_reused: whether the evaluation was there already; a newer one may have spoken since.

    Returns:
        What became of the student.
    """
    run_id = report.manifest.mlflow_run_id
    assert run_id is not None, "an artefact of a flow names its run"
    decision = _decide(tracker, report, run_id, limits, is_reused)
    run_logger("evaluate").info("Promotion: %s", decision)
    ProgressDisplay("evaluate").note(f"promotion: {decision}")
    for told in (run_id, chain_run_id):
        if told is not None:
            tracker.set_tags(told, {"promotion": decision})
    return decision


def _decide(
    tracker: Tracker, report: EvalReport, run_id: str, limits: PromotionConfig, is_reused: bool
) -> str:
    """Make a student the champion unless something speaks against it."""
    manifest = report.manifest
    student = manifest.parents.get("student")
    registry = Registry(tracker)
    made_by = student.mlflow_run_id if student else None
    version = registry.of_run(made_by) if made_by else None
    if version is None:
        return f"the student is no version of {registry.name}"
    # Read before anything is compared: what changes meanwhile makes the move fail.
    expected = champion_of(registry)
    ours = evaluation_of(run_id, manifest, report.report, _accuracy(tracker, report))
    if not is_reused or known_evaluation(version) is None:
        record_evaluation(registry, version.version, ours)
    name = f"version {version.version} of {registry.name}"
    if version.version == expected:
        return f"{name} is the champion already{_worry(ours)}"
    if ours.verdict is None or not limits.enabled:
        why = "no gate is set" if ours.verdict is None else "promotion is off"
        return f"{name} stays a candidate: {why} (`rlhf promote`)"
    reasons, checks = _against(registry, version, ours, expected, limits)
    if not reasons:
        try:
            why = "; ".join([f"the gate of evaluation {run_id} passed", *map(str, checks)])
            by = _who(f"evaluation {run_id}")
            move_champion(registry, Promotion(version.version, expected, by, why))
            instead = "" if expected is None else f" instead of version {expected}"
            # An earlier refusal is over.
            verdict = {"promotion.verdict": "promoted", "promotion.reasons": "none"}
            registry.tag(version.version, verdict)
            return f"{name} is the champion{instead}"
        except PromotionError as error:
            reasons = [str(error)]
    text = "; ".join(reasons)
    registry.tag(version.version, {"promotion.verdict": "refused", "promotion.reasons": text})
    return f"{name} is refused: {text}"


def _against(
    registry: Registry,
    version: StudentVersion,
    ours: Evaluation,
    expected: int | None,
    limits: PromotionConfig,
) -> tuple[list[str], list[FigureCheck]]:
    """Return what speaks against a student, and its figures beside the champion's."""
    reasons = list(ours.reasons)
    if "rolled_back.at" in version.tags:
        reasons.append(
            f"it was rolled back at {version.tags['rolled_back.at']}; `rlhf promote` does it anyway"
        )
    if expected is None:
        return reasons, []
    theirs = known_evaluation(registry.version(expected))
    if version.version < expected:
        reasons.append(f"it is older than the champion, version {expected}")
    obstacle = incomparable(ours, theirs)
    if obstacle is not None:
        reasons.append(
            f"it cannot be compared with version {expected}: {obstacle}; promote it with "
            f"`rlhf promote {version.version}`, or evaluate models:/{registry.name}@{CHAMPION} as "
            "this student was (stage evaluate with that student) and run this again"
        )
    checks = compare_with_champion(ours, theirs, limits) if theirs else []
    return reasons + [str(check) for check in checks if check.is_bad], checks


def _worry(found: Evaluation) -> str:
    if found.verdict != "failed":
        return ""
    return f", and fails the gate now ({'; '.join(found.reasons)}): think of `rlhf rollback`"


def _accuracy(tracker: Tracker, artifact: EvalReport) -> float | None:
    """Return the reward model's accuracy on its test split, from the run that trained it."""
    parent = artifact.manifest.parents.get("reward_model")
    if parent is None or parent.mlflow_run_id is None:
        return None
    try:
        return tracker.read_run(parent.mlflow_run_id).metrics.get("summary/test_accuracy")
    except MissingInputError:
        return None


def _who(what: str = "") -> str:
    person = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"{person}, {what}" if what else person


def promote(ref: str, why: str, tracking: TrackingConfig, *, is_forced: bool) -> str:
    """Make a version the champion; return a line about it.

    Args:
        ref: a number, ``candidate``, ``models:/<name>@<alias>``, ``models:/<name>/<number>``, or
            ``runs:/<id>`` of the run that made the student.
        is_forced: promote although the gate failed.

    Raises:
        MissingInputError: no such version, or its student is gone.
        ArtifactError: its student is torn or edited.
        PromotionError: its evaluation failed the gate, or the champion changed in the meantime.
    """
    tracker = _tracker(tracking)
    registry, version = registered_version(tracker, ref)
    expected = champion_of(registry)
    if expected == version.version:
        return f"Version {expected} of {registry.name} is the champion already."
    note = _check_promotable(tracker, version)
    found = known_evaluation(version)
    if found is not None and found.verdict == "failed":
        if not is_forced:
            raise PromotionError(
                f"Version {version.version} of {registry.name} failed the gate: "
                + "; ".join(found.reasons),
                "an evaluation that passed",
                "promote another version, or add --force",
            )
        why += " (forced: the gate failed)"
    move_champion(registry, Promotion(version.version, expected, _who(), why))
    return _told(registry, version.version, expected) + note


def rollback(why: str, tracking: TrackingConfig) -> str:
    """Make the champion before the current one the champion again; return a line about it.

    Raises:
        PromotionError: there is nothing to go back to, or the champion changed in the meantime.
        MissingInputError: the earlier champion's version or student is gone.
    """
    tracker = _tracker(tracking)
    registry = Registry(tracker)
    registry.aliased(CHAMPION)
    expected = champion_of(registry)
    version = registry.version(version_before(registry))
    note = _check_promotable(tracker, version)
    move_champion(registry, Promotion(version.version, expected, _who(), why, "rollback"))
    return _told(registry, version.version, expected) + note


def _tracker(tracking: TrackingConfig) -> Tracker:
    workspace = Workspace.from_environment()
    workspace.prepare()
    return connect(tracking, workspace)


def _told(registry: Registry, number: int, expected: int | None) -> str:
    instead = "" if expected is None else f" instead of version {expected}"
    return f"Version {number} of {registry.name} is the {CHAMPION}{instead}."


def _check_promotable(tracker: Tracker, version: StudentVersion) -> str:
    """Refuse a version without a sound student; return a note where that cannot be seen from here.

    Raises:
        MissingInputError: the student, or the run that made it, is gone.
        ArtifactError: the student is torn or edited.
    """
    run = tracker.read_run(version.run_id)
    name = f"version {version.version} of {version.name}"
    if run.is_deleted or run.status != "FINISHED":
        state = "was deleted" if run.is_deleted else f"is {run.status}"
        raise MissingInputError(
            f"The MLflow run {run.run_id} of {name} {state}",
            "a FINISHED run",
            f"`mlflow runs restore --run-id {run.run_id}`, or promote another version"
            if run.is_deleted
            else "promote another version",
        )
    path = Path(version.artifact_path or "")
    if not path.exists() and is_elsewhere(run.tags.get("workspace", "")):
        return f" Its files are in {run.tags['workspace']}, which was not looked at."
    try:
        load_artifact(path, StudentAdapter)
    except (MissingInputError, ArtifactError) as error:
        raise type(error)(
            f"The student of {name} cannot be used: {error.found}",
            error.expected,
            "promote another version, or run `rlhf run --only distill` for a new one",
        ) from error
    return ""


# Artefacts that stand on something older than what is there now.


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
    newest = {stage: tracker.latest_finished(stage) for stage in STAGE_SPECS}
    stale: dict[str, StaleArtifact] = {}
    looked_at = [(stage, stage, run) for stage, run in newest.items()]
    for name, stage, run in [*looked_at, (CHAMPION, "distill", champion_run(tracker))]:
        reasons = [] if run is None else _reasons(STAGE_SPECS[stage], run, newest, stale)
        if run is not None and reasons:
            path = run.tags.get("artifact.path", "")
            stale[name] = StaleArtifact(
                name=name, stage=stage, run_id=run.run_id, path=path, reasons=reasons
            )
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


def _reasons(
    spec: StageSpec,
    run: RunRecord,
    newest: Mapping[str, RunRecord | None],
    stale: Mapping[str, StaleArtifact],
) -> list[str]:
    """Say which upstreams of a run have a newer version."""
    reasons = []
    for label, upstream in spec.inputs.items():
        current = newest[upstream.name]
        used = run.tags.get(f"upstream.{label}.fingerprint")
        if used is None or current is None:
            continue
        newer = current.tags.get("fingerprint")
        if used != newer:
            reasons.append(
                f"{label}: stands on {used[:12]}, the newest {upstream.name} is "
                f"{str(newer)[:12]} (run {current.run_id})"
            )
        elif upstream.name in stale:
            reasons.append(f"{label}: {upstream.name} is not up to date itself")
    return reasons
