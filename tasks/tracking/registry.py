"""The students as versions of a registered MLflow model, and the ledger of its champions."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Literal

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from tasks.artifacts import Artifact, Manifest
from tasks.config.shared import PromotionConfig
from tasks.errors import MissingInputError, PromotionError, redact, redact_tag
from tasks.tracking.mlflow import Tracker, known_or_none, quoted

CANDIDATE: Final = "candidate"
CHAMPION: Final = "champion"
_LEDGER: Final = "promotion.ledger"
_MOVE: Final = re.compile(r"move\.(\d{6})$")
_LONGEST_WHY: Final = 1000
_LONGEST_BY: Final = 300
# MLflow cuts a longer parameter without a word, which makes the ledger unreadable for ever.
_LONGEST_ENTRY: Final = 6000
_MAX_VERSIONS: Final = 1000
_ATTEMPTS: Final = 5
_WAIT_SECONDS: Final = 0.1
_CLASH: Final = re.compile(r"IntegrityError|UNIQUE constraint|duplicate key|Duplicate entry")


@dataclass(frozen=True)
class StudentVersion:
    """One version of the registered model; its files stay in the workspace that made them."""

    name: str
    version: int
    run_id: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()

    @property
    def artifact_path(self) -> str | None:
        """Where the student lies."""
        return self.tags.get("artifact.path")


@dataclass(frozen=True)
class Move:
    """One entry of the ledger: a version became the champion.

    Args:
        index: counts from 1; MLflow keeps the first entry of an index and refuses any other.
        before: the champion until then, None for the first.
        token: tells two entries with the same content apart.
    """

    index: int
    version: int
    before: int | None
    kind: Literal["promotion", "rollback"]
    by: str
    at: str
    why: str
    token: str
    is_settled: bool = field(default=False, compare=False)

    @property
    def key(self) -> str:
        """Name of its parameter."""
        return f"move.{self.index:06d}"


class Registry:
    """Versions, aliases and ledger of one registered model.

    MLflow sets an alias without asking what it was before, so an alias alone cannot decide between
    two processes. A parameter of a run can: it is written once, and another value for it is
    refused by the database itself. The ledger is a run of its own with a parameter per move.
    """

    def __init__(self, tracker: Tracker, name: str | None = None) -> None:
        self.tracker = tracker
        self.name = name or tracker.student_model_name

    def register(self, model_id: str, artifact: Artifact) -> int:
        """Register a model as the newest version and point ``candidate`` at it."""
        with self.tracker.client() as client:
            if not self._is_known(self.name):
                self._create(client)
            version = client.create_model_version(
                self.name,
                source=f"models:/{model_id}",
                run_id=artifact.manifest.mlflow_run_id,
                tags={
                    "artifact.path": str(artifact.path),
                    "fingerprint": artifact.fingerprint,
                },
                model_id=model_id,
            )
            _repeated(client.set_registered_model_alias, self.name, CANDIDATE, version.version)
        return int(version.version)

    def _is_known(self, name: str) -> bool:
        with self.tracker.client() as client:
            return bool(client.search_registered_models(f"name = {quoted(name)}", max_results=1))

    def _create(self, client: MlflowClient) -> None:
        try:
            client.create_registered_model(self.name)
        except MlflowException:
            # Another process may have created it in between.
            if not self._is_known(self.name):
                raise

    def versions(self) -> list[StudentVersion]:
        """Return all versions, the newest first."""
        with self.tracker.client() as client:
            found = client.search_model_versions(
                f"name = {quoted(self.name)}", max_results=_MAX_VERSIONS
            )
        return sorted((_version(entry) for entry in found), key=lambda v: -v.version)

    def find(self, number: int) -> StudentVersion | None:
        """Return a version; None when there is none of that number."""
        with self.tracker.client() as client:
            # This one has the aliases, which a search leaves out.
            found = known_or_none(client.get_model_version, self.name, str(number))
        return None if found is None else _version(found)

    def version(self, number: int) -> StudentVersion:
        """Return a version.

        Raises:
            MissingInputError: there is none of that number.
        """
        found = self.find(number)
        if found is None:
            known = [str(entry.version) for entry in self.versions()]
            raise MissingInputError(
                f"{self.name} has no version {number} at {self.tracker.shown_uri}",
                f"one of {', '.join(known[:10])}" if known else "a registered version",
                "give one of these" if known else "run the chain, which registers the student",
            )
        return found

    def of_alias(self, alias: str) -> StudentVersion | None:
        """Return the version that an alias points at; None when nobody set it."""
        with self.tracker.client() as client:
            found = known_or_none(client.get_model_version_by_alias, self.name, alias)
        return None if found is None else self.find(int(found.version))

    def aliased(self, alias: str) -> StudentVersion:
        """Return the version that an alias points at.

        Raises:
            MissingInputError: nobody set the alias, or there is no such model.
        """
        found = self.of_alias(alias)
        if found is None:
            raise MissingInputError(
                f"No registered model {self.name!r} with alias {alias!r} at "
                f"{self.tracker.shown_uri}",
                "a model and alias of the MLflow model registry",
                self._way_to(alias),
            )
        return found

    def _way_to(self, alias: str) -> str:
        if alias == CHAMPION and self.of_alias(CANDIDATE) is not None:
            return "no student is the champion yet: give one with `rlhf promote VERSION`"
        own = self.tracker.student_model_name
        known = [] if alias == CANDIDATE else self.versions()
        if known:
            low, high = known[-1].version, known[0].version
            numbers = f"{low} to {high}" if low < high else str(high)
            aliases = [name for name in (CANDIDATE, CHAMPION) if self.of_alias(name) is not None]
            return f"give a version's number ({numbers}), or an alias: {', '.join(aliases)}"
        if self.name != own and self._is_known(own):
            return f"name {own}, which the students of this experiment are versions of"
        return f"run the chain, which registers {own}@{CANDIDATE}"

    def of_run(self, run_id: str) -> StudentVersion | None:
        """Return the newest version that a run made; None when it made none."""
        made = [entry for entry in self.versions() if entry.run_id == run_id]
        return self.find(made[0].version) if made else None

    def tag(self, number: int, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        with self.tracker.client() as client:
            for key, value in tags.items():
                kept = redact_tag(key, value)
                _repeated(client.set_model_version_tag, self.name, str(number), key, kept)

    def point(self, alias: str, number: int) -> None:
        """Set an alias, whatever it was before."""
        with self.tracker.client() as client:
            _repeated(client.set_registered_model_alias, self.name, alias, str(number))

    def moves(self) -> list[Move]:
        """Return the ledger, the oldest move first."""
        with self.tracker.client() as client:
            params = client.get_run(self._ledger).data.params
        found = []
        for key, value in params.items():
            match = _MOVE.match(key)
            if match:
                settled = f"{key}.settled" in params
                entry = json.loads(value)
                found.append(Move(index=int(match[1]), is_settled=settled, **entry))
        return sorted(found, key=lambda move: move.index)

    def claim(self, move: Move) -> bool:
        """Write a move under its index; False when another one is there already."""
        return self._write_once(self._ledger, move.key, _encoded(move))

    def settle(self, move: Move) -> None:
        """Note that the alias follows a move."""
        self._write_once(self._ledger, f"{move.key}.settled", "true")

    def _write_once(self, run_id: str, key: str, value: str) -> bool:
        """Write a parameter; False when it has another value."""
        with self.tracker.client() as client:
            try:
                client.log_param(run_id, key, value)
            except MlflowException:
                # A request that was repeated after a cut connection meets its own value.
                kept = client.get_run(run_id).data.params.get(key)
                if kept is None:
                    raise
                return bool(kept == value)
        return True

    @cached_property
    def _ledger(self) -> str:
        """Id of the run that holds the moves; made at the first question for it."""
        with self.tracker.client() as client:
            model = client.get_registered_model(self.name)
            known: str | None = model.tags.get(_LEDGER)
            if known is None:
                known = self._agree_on_ledger(client)
                _repeated(client.set_registered_model_tag, self.name, _LEDGER, known)
            return known

    def _agree_on_ledger(self, client: MlflowClient) -> str:
        """Make a ledger, or return that of a process which made one at the same time."""
        first = min(self.versions(), key=lambda entry: entry.version, default=None)
        if first is None or not first.run_id:
            raise MissingInputError(
                f"{self.name} has no version that a run made",
                "a student of this project",
                "run the chain, which registers its student",
            )
        tags = {"stage": "promotions", "registered_model": self.name}
        run = client.create_run(
            self.tracker.experiment_id, tags=tags, run_name=f"promotions of {self.name}"
        )
        mine: str = run.info.run_id
        client.set_terminated(mine)
        if self._write_once(first.run_id, _LEDGER, mine):
            return mine
        client.delete_run(mine)
        theirs: str = client.get_run(first.run_id).data.params[_LEDGER]
        return theirs


def readable(text: str, limit: int) -> str:
    """Return the beginning of a text, without the halves of characters that nothing can store."""
    return text.encode("utf-8", "replace").decode()[:limit]


def _encoded(move: Move) -> str:
    """Return a move as the value of a parameter; the reason is cut to what fits."""
    entry: dict[str, Any] = asdict(move)
    del entry["index"], entry["is_settled"]
    entry["by"] = readable(move.by, _LONGEST_BY)
    entry["why"] = readable(redact(move.why), _LONGEST_WHY)
    while len(text := json.dumps(entry, ensure_ascii=False)) > _LONGEST_ENTRY:
        # A control character or quotation mark is several characters here.
        entry["why"] = entry["why"][:-10]
    return text


def _repeated(write: Callable[..., Any], *values: str) -> None:
    """Set a tag or an alias, again if another process set the same one at the same moment.

    MLflow looks whether there is a row and then inserts one, so the second of two gets an error
    of the database instead of the last word.
    """
    for attempt in range(_ATTEMPTS):
        try:
            write(*values)
            return
        except MlflowException as error:
            if attempt + 1 == _ATTEMPTS or not _CLASH.search(str(error)):
                raise
            time.sleep(_WAIT_SECONDS * (attempt + 1))


def _version(found: ModelVersion) -> StudentVersion:
    return StudentVersion(
        name=found.name,
        version=int(found.version),
        run_id=found.run_id or "",
        tags=dict(found.tags),
        aliases=tuple(found.aliases or ()),
    )


# Which student is the champion: what an evaluation measured, what may not regress, who moved the
# alias and why.

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
    names = {SCORE: f"student_{SCORE}", **{rate: f"student_{rate}" for rate in _RATES}}
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
        "judged_win_rate": f"judge {by}, questions {asked}, base {base}",
        "win_rate_against_base": f"reward model {scorer}, data {data}, base {base}",
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
