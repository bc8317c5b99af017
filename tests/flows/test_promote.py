"""A verdict that makes a champion, or refuses with reasons; `rlhf promote` and `rlhf rollback`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from flows.promote import (
    apply_verdict,
    champion_run,
    promote,
    rollback,
)
from tasks.artifacts import StudentAdapter, load_artifact
from tasks.config.shared import PromotionConfig, TrackingConfig
from tasks.errors import ArtifactError, MissingInputError, PromotionError
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import (
    CHAMPION,
    Registry,
    champion_of,
    compare_with_champion,
    known_evaluation,
)

Make = Callable[..., Any]
BAD_INPUT = 2
COMPARE = "flows.promote.compare_with_champion"
LIMITS = PromotionConfig()
PASSED = {"verdict": "passed", "checks": []}
FAILED = {
    "verdict": "failed",
    "checks": [
        {"name": "min_score", "what": "mean score", "limit": 6.0, "value": 5.5, "passed": False},
        {"name": "min_win_rate", "what": "win rate", "limit": 0.5, "value": 0.6, "passed": True},
    ],
}


class Chains:
    """Students and their evaluations, as finished chains leave them."""

    def __init__(self, tracker: Tracker, make: Make) -> None:
        self.tracker = tracker
        self.make = make
        self.registry = Registry(tracker)
        run_id = tracker.start_run("reward_model", {"stage": "reward_model"}, {})
        self.reward_model = make("reward_model", run_id=run_id)

    def student(self) -> Any:
        """Register a new version."""
        run_id = self.tracker.start_run("distill", {"stage": "distill"}, {})
        artifact = self.make("distill", run_id=run_id, name=run_id)
        model_id = self.tracker.log_model_output(run_id, artifact, "distill")
        self.registry.register(model_id, artifact)
        self.tracker.finish(run_id, "FINISHED")
        return artifact

    def evaluate(self, student: Any, gate: Any = PASSED, **settings: Any) -> str:
        """Let an evaluation speak; keywords are its figures, `promotion`, and `judge`."""
        limits = PromotionConfig.model_validate(settings.pop("promotion", {}))
        judge = settings.pop("judge", "reward_model")
        run_id = self.tracker.start_run("evaluate", {"stage": "evaluate"}, {})
        parents = {"student": student, "reward_model": self.reward_model}
        report = self.make("evaluate", parents, run_id, {"gate": gate}, judge=judge)
        figures = {"question_score": 6.0, **settings}
        report.manifest.metrics.update({f"student_{name}": v for name, v in figures.items()})
        self.report = report
        said = apply_verdict(self.tracker, report, limits, None, is_reused=False)
        self.run = self.tracker.read_run(run_id)
        return said

    def reuse(
        self, report: Any, limits: PromotionConfig = LIMITS, chain_run_id: str | None = None
    ) -> str:
        """Let an evaluation that was there already speak again."""
        return apply_verdict(self.tracker, report, limits, chain_run_id, is_reused=True)


@pytest.fixture
def chains(tracker: Tracker, make_artifact: Make) -> Chains:
    return Chains(tracker, make_artifact)


def test_first_student_that_passes_is_the_champion(chains: Chains) -> None:
    chains.evaluate(chains.student(), question_score=6.0)
    version = chains.registry.aliased(CHAMPION)
    assert version.version == 1
    assert chains.run.run_id in version.tags["promoted.why"]
    assert chains.run.run_id in version.tags["promoted.by"]
    assert chains.run.tags["promotion"] == "version 1 of rlhf-flows-student is the champion"
    evaluation = known_evaluation(version)
    assert evaluation is not None
    assert evaluation.figures == {"question_score": 6.0}


def test_student_that_fails_is_refused_with_the_reasons_and_the_champion_stays(
    chains: Chains,
) -> None:
    chains.evaluate(chains.student())
    chains.evaluate(chains.student(), FAILED)
    assert champion_of(chains.registry) == 1
    reason = "min_score: mean score is 5.5, the limit is at least 6"
    tags = chains.registry.version(2).tags
    assert (tags["promotion.verdict"], tags["promotion.reasons"]) == ("refused", reason)
    assert chains.run.tags["promotion"].endswith(f"is refused: {reason}")


def test_without_limits_nothing_moves(chains: Chains) -> None:
    said = chains.evaluate(chains.student(), {"verdict": None, "checks": []})
    assert "no gate is set" in said
    said = chains.evaluate(chains.student(), promotion={"enabled": False})
    assert "promotion is off" in said
    assert champion_of(chains.registry) is None


def test_student_below_the_champion_is_refused(chains: Chains) -> None:
    chains.evaluate(chains.student(), win_rate_against_base=0.80, harmlessness_rate=0.9)
    said = chains.evaluate(chains.student(), win_rate_against_base=0.70, harmlessness_rate=0.95)
    # 0.80 - 0.70 is more than 0.02.
    assert "win_rate_against_base 0.7 against the champion's 0.8" in said
    assert "harmlessness" not in said
    assert champion_of(chains.registry) == 1
    said = chains.evaluate(chains.student(), win_rate_against_base=0.79, harmlessness_rate=0.9)
    assert said == "version 3 of rlhf-flows-student is the champion instead of version 1"


def test_champion_stays_where_nothing_can_be_compared(chains: Chains) -> None:
    chains.evaluate(chains.student(), question_score=5.0)
    student = chains.student()
    said = chains.evaluate(student, question_score=9.0, judge="openai")
    assert champion_of(chains.registry) == 1
    # Both yardsticks and both ways out are named.
    scorer = chains.reward_model.fingerprint[:16]
    assert f"question_score (judge openai:, questions /None, the champion's judge {scorer}" in (
        said
    )
    assert "`rlhf promote 2`" in said
    assert "evaluate models:/rlhf-flows-student@champion as this student was" in said
    tags = chains.registry.version(2).tags
    assert tags["promotion.verdict"] == "refused"
    assert said.endswith(tags["promotion.reasons"])
    # The way out: the champion on the new yardstick, then the same evaluation again.
    report = chains.report
    chains.evaluate(_student_of(chains, 1), question_score=8.0, judge="openai")
    chains.reuse(report)
    assert champion_of(chains.registry) == 2
    tags = chains.registry.version(2).tags
    assert (tags["promotion.verdict"], tags["promotion.reasons"]) == ("promoted", "none")
    assert tags["promoted.why"].endswith("passed; question_score 9 against the champion's 8")


def _student_of(chains: Chains, number: int) -> Any:
    path = chains.registry.version(number).artifact_path
    return load_artifact(Path(str(path)), StudentAdapter)


def test_champion_that_was_never_evaluated_stays(chains: Chains) -> None:
    chains.student()
    _promote("1")
    said = chains.evaluate(chains.student())
    assert "cannot be compared with version 1: the champion has no evaluation" in said
    assert champion_of(chains.registry) == 1


def test_reward_models_accuracy_alone_is_no_comparison_of_students(chains: Chains) -> None:
    chains.evaluate(chains.student())
    accuracy = MlflowClient(chains.tracker.tracking_uri).log_metric
    accuracy(chains.reward_model.manifest.mlflow_run_id, "summary/test_accuracy", 0.9)
    said = chains.evaluate(chains.student(), judge="openai")
    assert "cannot be compared" in said
    assert champion_of(chains.registry) == 1


def test_reused_evaluation_decides_by_the_limits_of_now(chains: Chains) -> None:
    off = PromotionConfig(enabled=False)
    chains.evaluate(chains.student(), promotion=off.model_dump())
    assert champion_of(chains.registry) is None
    chain = chains.tracker.start_run("chain", {"stage": "pipeline"}, {})
    chains.reuse(chains.report, chain_run_id=chain)
    assert champion_of(chains.registry) == 1
    assert "is the champion" in chains.tracker.read_run(chain).tags["promotion"]
    # 6.0 - 5.5 is more than 0.1, and less than 1.
    said = chains.evaluate(chains.student(), question_score=5.5)
    assert "more than 0.1 below" in said
    chains.reuse(chains.report, PromotionConfig(max_score_drop=1.0))
    assert champion_of(chains.registry) == 2
    # A newer evaluation of the student is not replaced by an older one that is reused.
    older = chains.report
    chains.evaluate(_student_of(chains, 2), question_score=5.9)
    chains.reuse(older)
    newest = known_evaluation(chains.registry.version(2))
    assert newest is not None and newest.figures["question_score"] == 5.9


def test_worse_reward_model_keeps_a_student_from_winning(chains: Chains) -> None:
    run_id = chains.reward_model.manifest.mlflow_run_id
    accuracy = MlflowClient(chains.tracker.tracking_uri).log_metric
    accuracy(run_id, "summary/test_accuracy", 0.9)
    chains.evaluate(chains.student())
    assert champion_of(chains.registry) == 1
    accuracy(run_id, "summary/test_accuracy", 0.8)
    said = chains.evaluate(chains.student())
    assert "reward_model_accuracy 0.8 against the champion's 0.9" in said
    assert champion_of(chains.registry) == 1


def test_champion_that_is_evaluated_again_stays_and_is_worried_about(chains: Chains) -> None:
    student = chains.student()
    chains.evaluate(student)
    said = chains.evaluate(student, FAILED)
    assert "is the champion already, and fails the gate now (min_score" in said


def test_older_student_and_one_that_was_rolled_back_are_for_people_to_decide(
    chains: Chains,
) -> None:
    first, second = chains.student(), chains.student()
    chains.evaluate(second)
    said = chains.evaluate(first)
    assert "older than the champion, version 2" in said
    third = chains.student()
    chains.evaluate(third)
    rollback("answers in French", TrackingConfig())
    assert champion_of(chains.registry) == 2
    assert chains.registry.version(3).tags["rolled_back.why"] == "answers in French"
    said = chains.evaluate(third)
    assert "it was rolled back at" in said
    assert champion_of(chains.registry) == 2


def test_champion_that_changed_during_the_evaluation_refuses(
    chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains.evaluate(chains.student())
    second, third = chains.student(), chains.student()
    read = compare_with_champion

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(COMPARE, read)
        # Between the comparison with version 1 and the move, version 2 becomes the champion.
        chains.evaluate(second)
        return read(*arguments)

    monkeypatch.setattr(COMPARE, slow)
    said = chains.evaluate(third)
    assert "the champion is version 2 meanwhile" in said
    assert champion_of(chains.registry) == 2


def test_champion_whose_files_are_gone_is_the_champion_still(chains: Chains) -> None:
    assert champion_run(chains.tracker) is None
    student = chains.student()
    chains.evaluate(student)
    shutil.rmtree(student.path)
    run = champion_run(chains.tracker)
    assert run is not None and run.run_id == student.manifest.mlflow_run_id


def test_student_of_no_version_is_told(chains: Chains) -> None:
    run_id = chains.tracker.start_run("distill", {"stage": "distill"}, {})
    said = chains.evaluate(chains.make("distill", run_id=run_id))
    assert said == "the student is no version of rlhf-flows-student"


def _promote(ref: str, is_forced: bool = False) -> str:
    return promote(ref, "because", TrackingConfig(), is_forced=is_forced)


@pytest.mark.parametrize(
    "ref",
    ["1", "candidate", "models:/rlhf-flows-student@candidate", "models:/rlhf-flows-student/1"],
)
def test_version_by_every_name(chains: Chains, ref: str) -> None:
    student = chains.student()
    assert _promote(ref) == "Version 1 of rlhf-flows-student is the champion."
    assert chains.registry.version(1).tags["promoted.why"] == "because"
    assert "already" in _promote(f"runs:/{student.manifest.mlflow_run_id}")


def test_failed_gate_needs_force(chains: Chains) -> None:
    chains.evaluate(chains.student(), FAILED)
    with pytest.raises(PromotionError, match=r"min_score: mean score is 5\.5"):
        _promote("1")
    assert champion_of(chains.registry) is None
    _promote("1", is_forced=True)
    assert "forced" in chains.registry.version(1).tags["promoted.why"]


def test_artefact_that_was_deleted_is_not_promoted_and_the_champion_stays(chains: Chains) -> None:
    chains.evaluate(chains.student())
    student = chains.student()
    shutil.rmtree(student.path)
    with pytest.raises(MissingInputError, match=r"student of version 2 .*--only distill"):
        _promote("2")
    torn = chains.student()
    (torn.path / "payload.bin").write_bytes(b"other!!")
    with pytest.raises(ArtifactError, match=r"student of version 3 .*SHA-256"):
        _promote("3")
    assert champion_of(chains.registry) == 1


def test_run_that_failed_or_was_deleted_is_not_promoted(chains: Chains) -> None:
    run_id = chains.student().manifest.mlflow_run_id
    chains.tracker.finish(run_id, "FAILED")
    with pytest.raises(MissingInputError, match=f"run {run_id} of version 1 .* is FAILED"):
        _promote("1")
    chains.tracker.finish(run_id, "FINISHED")
    MlflowClient(chains.tracker.tracking_uri).delete_run(run_id)
    with pytest.raises(MissingInputError, match=f"mlflow runs restore --run-id {run_id}"):
        _promote("1")
    assert champion_of(chains.registry) is None


def test_rollback_to_a_student_that_is_gone_leaves_the_champion(chains: Chains) -> None:
    first = chains.student()
    chains.evaluate(first)
    chains.evaluate(chains.student())
    shutil.rmtree(first.path)
    with pytest.raises(MissingInputError, match="student of version 1"):
        rollback("why", TrackingConfig())
    assert champion_of(chains.registry) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["promote", "7"], "no version 7"),
        (["promote", "nosuch"], "a version's number (1), or an alias: candidate."),
        (["promote", "champion"], "alias 'champion'"),
        (["promote", "models:/nobody@candidate"], "name rlhf-flows-student"),
        (["promote", "models:/nobody@candidate"], "No registered model 'nobody'"),
        (["promote", "runs:/0123"], "No MLflow run 0123"),
        (["rollback"], "alias 'champion'"),
    ],
)
def test_reference_with_nothing_behind_it_is_one_message(
    chains: Chains, arguments: list[str], expected: str
) -> None:
    chains.student()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == BAD_INPUT
    assert expected in result.stderr and "Fix: " in result.stderr
    assert result.stderr.count("Error: ") == 1 and "Traceback" not in result.stderr


def test_commands(chains: Chains) -> None:
    chains.student(), chains.student()
    run = CliRunner().invoke
    assert "Version 1 of" in run(app, ["promote", "1", "--why", "first"]).stdout
    assert "instead of version 1" in run(app, ["promote", "2"]).stdout
    result = run(app, ["rollback", "--why", "worse in use"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "Version 1 of rlhf-flows-student is the champion instead of version 2.\n"
    )
    assert chains.registry.version(2).tags["rolled_back.why"] == "worse in use"
    assert Path(chains.registry.version(1).artifact_path or "").is_dir()
