"""The students as versions of a registered MLflow model, and the ledger of its champions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from tasks.mlflow_client import client_of, known_or_none, quoted, translated

# isort: split
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tasks.artifacts import Artifact
from tasks.errors import MissingInputError
from tasks.redaction import redact, redact_tag
from tasks.tracking import Tracker

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

    @property
    def _client(self) -> MlflowClient:
        return client_of(self.tracker.tracking_uri)

    def register(self, model_id: str, artifact: Artifact) -> int:
        """Register a model as the newest version and point ``candidate`` at it."""
        with translated(self.tracker.tracking_uri):
            if not self._known_name(self.name):
                self._create()
            version = self._client.create_model_version(
                self.name,
                source=f"models:/{model_id}",
                run_id=artifact.manifest.mlflow_run_id,
                tags={
                    "artifact.path": str(artifact.path),
                    "fingerprint": artifact.fingerprint,
                },
                model_id=model_id,
            )
            _repeated(
                self._client.set_registered_model_alias, self.name, CANDIDATE, version.version
            )
        return int(version.version)

    def _known_name(self, name: str) -> bool:
        found = self._client.search_registered_models(f"name = {quoted(name)}", max_results=1)
        return bool(found)

    def _create(self) -> None:
        try:
            self._client.create_registered_model(self.name)
        except MlflowException:
            # Another process may have created it in between.
            if not self._known_name(self.name):
                raise

    def versions(self) -> list[StudentVersion]:
        """Return all versions, the newest first."""
        with translated(self.tracker.tracking_uri):
            found = self._client.search_model_versions(
                f"name = {quoted(self.name)}", max_results=_MAX_VERSIONS
            )
        return sorted((_version(entry) for entry in found), key=lambda v: -v.version)

    def find(self, number: int) -> StudentVersion | None:
        """Return a version; None when there is none of that number."""
        with translated(self.tracker.tracking_uri):
            # This one has the aliases, which a search leaves out.
            found = known_or_none(self._client.get_model_version, self.name, str(number))
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
        with translated(self.tracker.tracking_uri):
            found = known_or_none(self._client.get_model_version_by_alias, self.name, alias)
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
        if self.name != own and self._known_name(own):
            return f"name {own}, which the students of this experiment are versions of"
        return f"run the chain, which registers {own}@{CANDIDATE}"

    def of_run(self, run_id: str) -> StudentVersion | None:
        """Return the newest version that a run made; None when it made none."""
        made = [entry for entry in self.versions() if entry.run_id == run_id]
        return self.find(made[0].version) if made else None

    def tag(self, number: int, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        client = self._client
        with translated(self.tracker.tracking_uri):
            for key, value in tags.items():
                kept = redact_tag(key, value)
                _repeated(client.set_model_version_tag, self.name, str(number), key, kept)

    def point(self, alias: str, number: int) -> None:
        """Set an alias, whatever it was before."""
        with translated(self.tracker.tracking_uri):
            _repeated(self._client.set_registered_model_alias, self.name, alias, str(number))

    def moves(self) -> list[Move]:
        """Return the ledger, the oldest move first."""
        with translated(self.tracker.tracking_uri):
            params = self._client.get_run(self._ledger).data.params
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
        with translated(self.tracker.tracking_uri):
            try:
                self._client.log_param(run_id, key, value)
            except MlflowException:
                # A request that was repeated after a cut connection meets its own value.
                kept = self._client.get_run(run_id).data.params.get(key)
                if kept is None:
                    raise
                return bool(kept == value)
        return True

    @cached_property
    def _ledger(self) -> str:
        """Id of the run that holds the moves; made at the first question for it."""
        with translated(self.tracker.tracking_uri):
            model = self._client.get_registered_model(self.name)
            known: str | None = model.tags.get(_LEDGER)
            if known is None:
                known = self._agree_on_ledger()
                _repeated(self._client.set_registered_model_tag, self.name, _LEDGER, known)
            return known

    def _agree_on_ledger(self) -> str:
        """Make a ledger, or return that of a process which made one at the same time."""
        first = min(self.versions(), key=lambda entry: entry.version, default=None)
        if first is None or not first.run_id:
            raise MissingInputError(
                f"{self.name} has no version that a run made",
                "a student of this project",
                "run the chain, which registers its student",
            )
        tags = {"stage": "promotions", "registered_model": self.name}
        run = self._client.create_run(
            self.tracker.experiment_id, tags=tags, run_name=f"promotions of {self.name}"
        )
        mine: str = run.info.run_id
        self._client.set_terminated(mine)
        if self._write_once(first.run_id, _LEDGER, mine):
            return mine
        self._client.delete_run(mine)
        theirs: str = self._client.get_run(first.run_id).data.params[_LEDGER]
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
