"""Candidate to champion: by an evaluation's verdict, or by hand."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flows.stages import STAGE_SPECS
from tasks.artifacts import EvalReport, StudentAdapter, load_artifact
from tasks.config.shared import STAGES, PromotionConfig, Stage, TrackingConfig
from tasks.context import run_logger
from tasks.errors import ArtifactError, MissingInputError, PromotionError
from tasks.tracking.lineage import registered_version
from tasks.tracking.mlflow import RunRecord, Tracker, connect
from tasks.tracking.registry import (
    CHAMPION,
    Evaluation,
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

OUTCOME_TAG = "promotion"


@dataclass(frozen=True)
class Decision:
    """What became of a student after its evaluation."""

    is_champion: bool
    text: str


@dataclass(frozen=True)
class Verdict:
    """An evaluation that is to decide about its student.

    Args:
        limits: of the present run; a reused evaluation may have been made with others.
        chain_run_id: the chain that is told.
        is_reused: whether the evaluation was there already; a newer one may have spoken since.
    """

    report: EvalReport
    limits: PromotionConfig
    chain_run_id: str | None = None
    is_reused: bool = False

    @property
    def run_id(self) -> str:
        """MLflow run of the evaluation."""
        run_id = self.report.manifest.mlflow_run_id
        assert run_id is not None, "an artefact of a flow names its run"
        return run_id


def apply_verdict(tracker: Tracker, verdict: Verdict) -> Decision:
    """Record what an evaluation says of its student, and make it the champion if it is to be one.

    A refusal is no failure of the evaluation: it is logged, with its reasons, and tagged on its
    run, on that of its chain, and on the version. The champion stays.
    """
    decision = _decide(tracker, verdict)
    run_logger("evaluate").info("Promotion: %s", decision.text)
    ProgressDisplay("evaluate").note(f"promotion: {decision.text}")
    for told in (verdict.run_id, verdict.chain_run_id):
        if told is not None:
            tracker.set_tags(told, {OUTCOME_TAG: decision.text})
    return decision


def _decide(tracker: Tracker, verdict: Verdict) -> Decision:
    manifest = verdict.report.manifest
    student = manifest.parents.get("student")
    registry = Registry(tracker)
    made_by = student.mlflow_run_id if student else None
    version = registry.of_run(made_by) if made_by else None
    if version is None:
        return Decision(False, f"the student is no version of {registry.name}")
    # Read before anything is compared: what changes meanwhile makes the move fail.
    expected = champion_of(registry)
    accuracy = _accuracy(tracker, verdict.report)
    found = evaluation_of(verdict.run_id, manifest, verdict.report.report, accuracy)
    if not verdict.is_reused or known_evaluation(version) is None:
        record_evaluation(registry, version.version, found)
    name = f"version {version.version} of {registry.name}"
    if version.version == expected:
        return Decision(True, f"{name} is the champion already{_worry(found)}")
    if found.verdict is None or not verdict.limits.enabled:
        why = "no gate is set" if found.verdict is None else "promotion is off"
        return Decision(False, f"{name} stays a candidate: {why} (`rlhf promote`)")
    return _tried(registry, _Case(version, found, expected, verdict.limits))


@dataclass(frozen=True)
class _Case:
    """A student, what is said of it, and the champion that it is to replace."""

    version: StudentVersion
    found: Evaluation
    expected: int | None
    limits: PromotionConfig


def _tried(registry: Registry, case: _Case) -> Decision:
    """Make a student the champion unless something speaks against it."""
    number, run_id = case.version.version, case.found.run_id
    name = f"version {number} of {registry.name}"
    theirs = None
    if case.expected is not None:
        theirs = known_evaluation(registry.version(case.expected))
    checks = compare_with_champion(case.found, theirs, case.limits) if theirs else []
    reasons = _reasons_against(registry.name, case, theirs)
    reasons += [str(check) for check in checks if check.is_bad]
    if not reasons:
        try:
            why = "; ".join([f"the gate of evaluation {run_id} passed", *map(str, checks)])
            by = _who(f"evaluation {run_id}")
            move_champion(registry, Promotion(number, case.expected, by, why))
            instead = "" if case.expected is None else f" instead of version {case.expected}"
            # An earlier refusal is over.
            registry.tag(number, {"promotion.verdict": "promoted", "promotion.reasons": "none"})
            return Decision(True, f"{name} is the champion{instead}")
        except PromotionError as error:
            reasons = [str(error)]
    text = "; ".join(reasons)
    registry.tag(number, {"promotion.verdict": "refused", "promotion.reasons": text})
    return Decision(False, f"{name} is refused: {text}")


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


def _reasons_against(name: str, case: _Case, theirs: Evaluation | None) -> list[str]:
    """Return what speaks against a student besides figures below the champion's."""
    reasons, version = list(case.found.reasons), case.version
    if "rolled_back.at" in version.tags:
        reasons.append(
            f"it was rolled back at {version.tags['rolled_back.at']}; `rlhf promote` does it anyway"
        )
    if case.expected is None:
        return reasons
    if version.version < case.expected:
        reasons.append(f"it is older than the champion, version {case.expected}")
    obstacle = incomparable(case.found, theirs)
    if obstacle is not None:
        reasons.append(
            f"it cannot be compared with version {case.expected}: {obstacle}; promote it with "
            f"`rlhf promote {version.version}`, or evaluate models:/{name}@{CHAMPION} as this "
            "student was (stage evaluate with that student) and run this again"
        )
    return reasons


def _who(what: str = "") -> str:
    person = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"{person}, {what}" if what else person


@dataclass(frozen=True)
class PromoteRequest:
    """`rlhf promote`.

    Args:
        ref: a number, ``candidate``, ``models:/<name>@<alias>``, ``models:/<name>/<number>``, or
            ``runs:/<id>`` of the run that made the student.
        is_forced: promote although the gate failed.
    """

    ref: str
    why: str
    tracking: TrackingConfig
    is_forced: bool = False


def promote(request: PromoteRequest) -> str:
    """Make a version the champion; return a line about it.

    Raises:
        MissingInputError: no such version, or its student is gone.
        ArtifactError: its student is torn or edited.
        PromotionError: its evaluation failed the gate, or the champion changed in the meantime.
    """
    tracker = _tracker(request.tracking)
    registry, version = registered_version(tracker, request.ref)
    expected = champion_of(registry)
    if expected == version.version:
        return f"Version {expected} of {registry.name} is the champion already."
    note = _check_promotable(tracker, version)
    found = known_evaluation(version)
    if found is not None and found.verdict == "failed" and not request.is_forced:
        raise PromotionError(
            f"Version {version.version} of {registry.name} failed the gate: "
            + "; ".join(found.reasons),
            "an evaluation that passed",
            "promote another version, or add --force",
        )
    forced = " (forced: the gate failed)" if found and found.verdict == "failed" else ""
    wanted = Promotion(version.version, expected, _who(), request.why + forced)
    move_champion(registry, wanted)
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
