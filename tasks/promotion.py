"""Which student is the champion: what an evaluation measured, what may not regress, who moved the
alias and why."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import BaseModel

from tasks.artifacts import Manifest
from tasks.config import PromotionConfig
from tasks.data.gate import BASELINE, GATED
from tasks.errors import PromotionError
from tasks.model_registry import CHAMPION, Move, Registry, StudentVersion, readable

ACCURACY: Final = "reward_model_accuracy"
SCORE: Final = "question_score"
_LONGEST_TAG: Final = 5000
_RATES: Final = ("win_rate_against_base", "judged_win_rate", "harmlessness_rate")


class Evaluation(BaseModel):
    """What an evaluation says of a student; a tag of its version, so it outlives every file.

    Args:
        verdict: of the gate; None without limits.
        reasons: what the gate found too low.
        figures: by name.
        yardsticks: what each figure was measured with; figures compare only where these are equal.
    """

    run_id: str
    verdict: Literal["passed", "failed"] | None
    reasons: list[str] = []
    figures: dict[str, float] = {}
    yardsticks: dict[str, str] = {}


@dataclass(frozen=True)
class FigureCheck:
    """One figure of a student beside the champion's."""

    name: str
    ours: float
    theirs: float | None
    limit: float
    status: Literal["ok", "regressed", "not comparable"]

    def __str__(self) -> str:
        if self.theirs is None or self.status == "not comparable":
            return f"{self.name} {self.ours:.4g} was not measured like the champion's"
        text = f"{self.name} {self.ours:.4g} against the champion's {self.theirs:.4g}"
        return f"{text}, which is more than {self.limit:g} below" if self.is_bad else text

    @property
    def is_bad(self) -> bool:
        """Whether it keeps the student from becoming the champion."""
        return self.status == "regressed"


def evaluation_of(
    run_id: str, manifest: Manifest, report: Mapping[str, Any], accuracy: float | None
) -> Evaluation:
    """Read what a report says of the student.

    Args:
        run_id: of the evaluation.
        manifest: of the report.
        report: content of ``report.json``.
        accuracy: of the reward model on its test split.
    """
    gate = report.get("gate") or {"verdict": None, "checks": []}
    metrics = manifest.metrics
    names = {SCORE: f"{GATED}_{SCORE}", **{rate: f"{GATED}_{rate}" for rate in _RATES}}
    figures = {name: metrics[key] for name, key in names.items() if key in metrics}
    if accuracy is not None:
        figures[ACCURACY] = accuracy
    return Evaluation(
        run_id=run_id,
        verdict=gate["verdict"],
        reasons=[_reason(check) for check in gate["checks"] if not check["passed"]],
        figures=figures,
        yardsticks={name: _yardstick(name, manifest) for name in figures},
    )


def _reason(check: Mapping[str, Any]) -> str:
    value = "was not measured" if check["value"] is None else f"is {check['value']:.4g}"
    bound = "at most" if check["name"] == "max_regression" else "at least"
    return f"{check['name']}: {check['what']} {value}, the limit is {bound} {check['limit']:g}"


def _yardstick(name: str, manifest: Manifest) -> str:
    """Return what a figure depends on besides the student."""
    parents = {key: parent.fingerprint[:16] for key, parent in manifest.parents.items()}
    config = manifest.config
    judge = str(config.get("judge", ""))
    if judge == "openai":
        judge += ":" + str(config.get("judging", {}).get("endpoint", {}).get("model", ""))
    data, scorer = parents.get("preferences", ""), parents.get("reward_model", "")
    base = parents.get("base", "")
    questions = parents.get("questions", str(config.get("questions", "")))
    asked = f"{questions}/{config.get('max_questions')}"
    by = scorer if judge == "reward_model" else f"{judge}{parents.get('judge_model', '')}"
    return {
        SCORE: f"judge {by}, questions {asked}",
        "judged_win_rate": f"judge {by}, questions {asked}, {BASELINE} {base}",
        "win_rate_against_base": f"reward model {scorer}, data {data}, {BASELINE} {base}",
        "harmlessness_rate": f"reward model {scorer}, data {data}",
        ACCURACY: f"data {data}",
    }[name]


def compare_with_champion(
    ours: Evaluation, theirs: Evaluation, limits: PromotionConfig
) -> list[FigureCheck]:
    """Return a check for each figure that both have."""
    checks = []
    for name, value in ours.figures.items():
        if name not in theirs.figures:
            continue
        limit = limits.max_score_drop if name == SCORE else limits.max_rate_drop
        drop = theirs.figures[name] - value
        # Differences of decimal fractions are not exact: 0.80 - 0.78 is more than 0.02.
        status: Literal["ok", "regressed"] = "regressed" if drop > limit + 1e-9 else "ok"
        is_same = ours.yardsticks.get(name) == theirs.yardsticks.get(name)
        checks.append(
            FigureCheck(
                name, value, theirs.figures[name], limit, status if is_same else "not comparable"
            )
        )
    return checks


def incomparable(ours: Evaluation, theirs: Evaluation | None) -> str | None:
    """Say why nothing tells a student from the champion; None when a figure of both does.

    The reward model's accuracy is no figure of a student.
    """
    if theirs is None:
        return "the champion has no evaluation"
    mine, other = ours.yardsticks, theirs.yardsticks
    both = [name for name in ours.figures if name in theirs.figures and name != ACCURACY]
    if any(mine.get(name) == other.get(name) for name in both):
        return None
    if not both:
        return "no figure of the student was measured of both"
    told = [f"{n} ({mine.get(n)}, the champion's {other.get(n)})" for n in both]
    return f"nothing was measured like the champion's: {', '.join(told)}"


EVALUATION: Final = "evaluation"


def known_evaluation(version: StudentVersion) -> Evaluation | None:
    """Return the newest evaluation of a version; None when it has none."""
    text = version.tags.get(EVALUATION)
    return Evaluation.model_validate_json(text) if text else None


def record_evaluation(registry: Registry, number: int, found: Evaluation) -> None:
    """Note on a version what an evaluation says of it."""
    registry.tag(
        number,
        {
            EVALUATION: found.model_dump_json(),
            "evaluation.run_id": found.run_id,
            "evaluation.verdict": found.verdict or "no limits were set",
        },
    )


@dataclass(frozen=True)
class Promotion:
    """A version that is to become the champion.

    Args:
        expected: the champion that the decision was made against, None for no champion.
        by: who decided.
    """

    version: int
    expected: int | None
    by: str
    why: str
    kind: Literal["promotion", "rollback"] = "promotion"


def champion_of(registry: Registry) -> int | None:
    """Return the champion's version, after finishing a move that a process died in."""
    newest = _newest(registry)
    if newest is not None and not newest.is_settled:
        _follow(registry, newest)
    found = registry.of_alias(CHAMPION)
    return None if found is None else found.version


def move_champion(registry: Registry, wanted: Promotion) -> Move:
    """Make a version the champion, if the champion is still the expected one.

    This is a compare-and-set. Of processes that expect the same champion one succeeds, in whatever
    order and on whatever machines they run; the alias follows the ledger.

    Raises:
        PromotionError: another champion than the expected one, or the version is gone; the
            champion is the same as before.
        ClusterError: the server failed; the next who asks for the champion finishes the move.
    """
    # The ledger is read before the alias: a move in between then takes the index that is wanted.
    newest = _newest(registry)
    found = champion_of(registry)
    if found != wanted.expected:
        raise _lost(registry, wanted, found)
    move = Move(
        index=(newest.index if newest else 0) + 1,
        version=wanted.version,
        before=wanted.expected,
        kind=wanted.kind,
        by=readable(wanted.by, _LONGEST_TAG),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        why=readable(wanted.why, _LONGEST_TAG),
        token=uuid.uuid4().hex,
    )
    if not registry.claim(move):
        raise _lost(registry, wanted, champion_of(registry))
    if not _follow(registry, move):
        raise PromotionError(
            f"{registry.name} version {move.version} was deleted in the meantime",
            "a version of the registered model",
            "promote another version with `rlhf promote VERSION`",
        )
    return move


def _newest(registry: Registry) -> Move | None:
    moves = registry.moves()
    return moves[-1] if moves else None


def _follow(registry: Registry, move: Move) -> bool:
    """Point the alias at a move's version, or at that of a newer move; False if it is deleted.

    Whoever wrote the alias last looks at the ledger afterwards, so a slow process cannot leave it
    at an older move.
    """
    while True:
        is_there = registry.find(move.version) is not None
        if is_there:
            registry.point(CHAMPION, move.version)
            _tag_move(registry, move)
        newest = _newest(registry)
        if newest is None or newest.index == move.index:
            break
        move = newest
    registry.settle(move)
    return is_there


def _tag_move(registry: Registry, move: Move) -> None:
    """Note who, when and why on both versions."""
    word = "promoted" if move.kind == "promotion" else "restored"
    tags = {f"{word}.by": move.by, f"{word}.at": move.at, f"{word}.why": move.why}
    if move.before is not None:
        tags[f"{word}.instead_of"] = str(move.before)
        gone = "replaced" if move.kind == "promotion" else "rolled_back"
        about = {f"{gone}.by": move.by, f"{gone}.at": move.at, f"{gone}.why": move.why}
        if registry.find(move.before) is not None:
            registry.tag(move.before, {**about, f"{gone}.for": str(move.version)})
    registry.tag(move.version, tags)


def _lost(registry: Registry, wanted: Promotion, found: int | None) -> PromotionError:
    def text(number: int | None) -> str:
        return "none" if number is None else f"version {number}"

    return PromotionError(
        f"{registry.name} version {wanted.version} was to replace {text(wanted.expected)}, but the "
        f"champion is {text(found)} meanwhile",
        "the champion that the decision was made against",
        f"compare it with {text(found)}, and promote it with `rlhf promote {wanted.version}` if it "
        "is better",
    )


def version_before(registry: Registry) -> int:
    """Return the version that the champion replaced, which a rollback makes the champion again.

    Raises:
        PromotionError: there is no champion, or it replaced none.
    """
    current = champion_of(registry)
    if current is None:
        raise PromotionError(
            f"{registry.name} has no champion", "one to go back from", "`rlhf promote VERSION`"
        )
    promotions = [move for move in registry.moves() if move.kind == "promotion"]
    for move in reversed(promotions):
        if move.version == current and move.before is not None:
            return move.before
        if move.version == current:
            raise PromotionError(
                f"Version {current} of {registry.name} was the first champion",
                "an earlier one to go back to",
                "promote another version with `rlhf promote VERSION`",
            )
    if promotions:
        # Somebody set the alias by hand: back to what was decided here last.
        return promotions[-1].version
    raise PromotionError(
        f"Version {current} of {registry.name} became the champion outside of `rlhf`",
        "an earlier champion to go back to",
        "promote another version with `rlhf promote VERSION`",
    )
