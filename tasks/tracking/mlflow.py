"""MLflow: the experiment, one run per stage, datasets and models that link runs to each other."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import mlflow
from mlflow import MlflowClient
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import (
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException

from tasks.artifacts import Artifact
from tasks.config.shared import TrackingConfig
from tasks.errors import (
    ClusterError,
    ConfigError,
    MissingInputError,
    WorkspaceError,
    guard_logs,
    redact,
    redact_config,
    redact_tag,
    without_credentials,
)
from tasks.workspace import Workspace, bypass_proxies

# The MLflow client: its environment, its addresses, its errors in the project's words.


# Also where flows are not started by the command.
bypass_proxies()

_CONNECT_SECONDS = 5
# An alias that nobody set, and an id that cannot be one, are the second.
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")

T = TypeVar("T")


@cache
def client_of(uri: str) -> MlflowClient:
    """Return the client of an address, one per process."""
    return MlflowClient(tracking_uri=uri)


def quieten() -> None:
    """Silence what MLflow and its database migrations say at every start."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It prints the trace of an error that it raises, too; what is raised gets one message here.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="The specified dataset source can be interpreted")


def check_uri(uri: str) -> None:
    """Refuse an address that MLflow would misread.

    Raises:
        ConfigError: a file store, or a path relative to whatever directory a worker runs in.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme.startswith("file"):
        raise ConfigError(
            f"tracking.tracking_uri is {uri!r}",
            "http://host:port or sqlite:////absolute/path.db",
            "MLflow has no file store any more; leave it null for the workspace's database",
        )
    if scheme == "sqlite" and not rest.startswith("//"):
        raise ConfigError(
            f"tracking.tracking_uri {uri!r} is relative to whatever directory a worker runs in",
            "four slashes and an absolute path",
            "write sqlite:////absolute/path.db",
        )


def check_server(uri: str) -> None:
    """Ask a server whether it is well.

    Raises:
        ClusterError: no answer within 5 s.
    """
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_CONNECT_SECONDS):
            return
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ClusterError(
            f"No MLflow server answers at {uri}: {error}",
            "a running `mlflow server`",
            "start it, correct tracking.tracking_uri, or set it to null to need no server",
        ) from error


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn MLflow's errors into the project's.

    Raises:
        ClusterError: a server refused or did not answer.
        WorkspaceError: the embedded database cannot be used.
    """
    try:
        yield
    except MlflowException as error:
        reason = str(error).splitlines()[0][:300]
        if uri.startswith("http"):
            raise ClusterError(
                f"MLflow at {uri} refused: {reason}", "a working server", "look at the server's log"
            ) from error
        raise WorkspaceError(
            f"The MLflow database {uri} cannot be used: {reason}",
            "a readable and writable database of this MLflow version",
            "free space, correct its permissions, or choose another RLHF_HOME",
        ) from error


@contextmanager
def tables_locked(uri: str) -> Iterator[None]:
    """Let one program at a time open an embedded database: two that make its tables at once fail.

    Servers see to their databases themselves.
    """
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    if not os.access(database.parent, os.W_OK):
        # No tables are made here; MLflow says what is wrong with the place.
        yield
        return
    with database.with_name(f"{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def known_or_none(read: Callable[..., T], *names: str) -> T | None:
    """Return what MLflow has under a name; None when it says that there is nothing.

    Any other error of MLflow is raised: a server that cannot be asked does not say so.
    """
    try:
        return read(*names)
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return None
        raise


def quoted(value: str) -> str:
    """Return a value for MLflow's filter language."""
    return '"' + value.replace('"', "") + '"' if "'" in value else f"'{value}'"


# Names and values in the form that MLflow keeps whole.

MAX_PARAM_CHARS = 500
MAX_TAG_CHARS = 5000
_REFUSED_IN_NAMES = re.compile(r"[^\w\-. :/]")


def cut_tag(value: str) -> str:
    """Return a tag value, cut with a mark where MLflow would cut it without one."""
    text = str(value)
    return text if len(text) <= MAX_TAG_CHARS else text[: MAX_TAG_CHARS - 6] + " [...]"


def clean_name(name: str) -> str:
    """Replace the characters that MLflow refuses in names of metrics, parameters and tags."""
    return _REFUSED_IN_NAMES.sub("_", name)


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted names and short values; a longer one is given by its digest and length.

    MLflow cuts values over 6,000 characters without a word; ``config.json`` holds them whole.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = clean_name(f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MAX_PARAM_CHARS:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            text = f"sha256:{digest} length:{len(text)}"
        flat[name] = text
    return flat


PIPELINE = "pipeline"
REPRODUCTIONS = "-reproductions"
# Tag of a run that is part of a comparison; it goes when a chain uses the result.
TRIAL = "trial"
DIGEST_CHARS = 36
_PARAMS_PER_REQUEST = 100
_METRICS_PER_REQUEST = 1000

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class MetricPoint(NamedTuple):
    """One finite metric value; the timestamp is in milliseconds since 1970."""

    name: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class RunRecord:
    """What MLflow knows about a run; of each metric the last value."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    started_ms: int
    ended_ms: int | None
    name: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_deleted: bool = False

    @property
    def stage(self) -> str | None:
        """Stem of the stage, or ``pipeline``."""
        return self.tags.get("stage")


def connect(config: TrackingConfig, workspace: Workspace) -> Tracker:
    """Open the experiment, creating it when it is new.

    Raises:
        ConfigError: an address that MLflow cannot use, or an experiment that was deleted.
        ClusterError: the server does not answer within 5 s.
        WorkspaceError: the embedded database cannot be written.
    """
    quieten()
    guard_logs()
    uri = config.tracking_uri or workspace.tracking_uri
    check_uri(uri)
    if uri.startswith("http"):
        check_server(uri)
    with translated(uri), tables_locked(uri):
        experiment_id = _experiment_id(uri, config.experiment, workspace)
    return Tracker(uri, config.experiment, experiment_id)


def _experiment_id(uri: str, name: str, workspace: Workspace) -> str:
    client = client_of(uri)
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None
        if not uri.startswith("http"):
            workspace.mlflow_artifacts_dir.mkdir(parents=True, exist_ok=True)
            location = workspace.mlflow_artifacts_dir.as_uri()
        try:
            created: str = client.create_experiment(name, artifact_location=location)
            return created
        except MlflowException:
            # Another process may have created it in between.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise ConfigError(
            f"The MLflow experiment {name!r} was deleted",
            "an active experiment",
            f"run `mlflow experiments restore -x {found.experiment_id}` or set tracking.experiment",
        )
    identifier: str = found.experiment_id
    return identifier


@dataclass(frozen=True)
class Tracker:
    """Writes to and reads from one experiment. Picklable: Ray workers report to the same run."""

    tracking_uri: str
    experiment: str
    experiment_id: str

    @property
    def student_model_name(self) -> str:
        """Registered name of this experiment's students."""
        return f"{self.experiment}-student"

    @property
    def shown_uri(self) -> str:
        """The address as it may be printed."""
        return without_credentials(self.tracking_uri)

    @property
    def is_for_reproductions(self) -> bool:
        """Whether the experiment holds repeats of earlier runs, whose students nobody wants."""
        return self.experiment.endswith(REPRODUCTIONS)

    @contextmanager
    def client(self) -> Iterator[MlflowClient]:
        """The client; what it raises in the block is told in the project's words."""
        with translated(self.tracking_uri):
            yield client_of(self.tracking_uri)

    def start_run(
        self, name: str, tags: Mapping[str, str | None], config: Mapping[str, Any]
    ) -> str:
        """Open a run with its tags and config, whole and as flat parameters; return its id.

        Keys and passwords are left out of both.
        """
        config = redact_config(config)
        kept = {
            key: cut_tag(redact_tag(key, value)) for key, value in tags.items() if value is not None
        }
        with self.client() as client:
            run = client.create_run(self.experiment_id, tags=kept, run_name=name)
        run_id: str = run.info.run_id
        self.log_text(run_id, json.dumps(config, indent=2, sort_keys=True), "config.json")
        self.log_params(run_id, flat_params(config))
        return run_id

    def log_trial(
        self, parent_id: str, name: str, params: Mapping[str, float], metrics: Mapping[str, float]
    ) -> None:
        """Record a finished attempt of a search as a run nested under its parent."""
        tags = {"mlflow.parentRunId": parent_id, "trial_of": parent_id}
        with self.client() as client:
            trial_id = client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id
            now_ms = time.time_ns() // 1_000_000
            points = [Metric(key, value, now_ms, 0) for key, value in metrics.items()]
            entries = [Param(key, f"{value:g}") for key, value in params.items()]
            client.log_batch(trial_id, metrics=points, params=entries)
            client.set_terminated(trial_id)

    def reopen(self, run_id: str, tags: Mapping[str, str] | None = None) -> None:
        """Set an ended run to RUNNING again, for a retry of the same Prefect flow run.

        Why it had ended moves from the tag ``failure`` to ``earlier_failure``.
        """
        failure = self.read_run(run_id).tags.get("failure")
        earlier = {} if failure is None else {"earlier_failure": failure}
        self.set_tags(run_id, {**(tags or {}), **earlier})
        with self.client() as client:
            if failure is not None:
                client.delete_tag(run_id, "failure")
            client.update_run(run_id, status="RUNNING")

    def finish(self, run_id: str, status: Status, failure: str | None = None) -> None:
        """End a run; ``failure`` becomes the tag of that name."""
        if failure is not None:
            self.set_tags(run_id, {"failure": failure})
        with self.client() as client:
            client.set_terminated(run_id, status=status)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; longer values than MLflow keeps are cut with a mark."""
        entries = [RunTag(key, cut_tag(redact_tag(key, value))) for key, value in tags.items()]
        with self.client() as client:
            client.log_batch(run_id, tags=entries)

    def drop_tag(self, run_id: str, key: str) -> None:
        """Remove a tag that a run has."""
        with self.client() as client:
            client.delete_tag(run_id, key)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Record parameters that are short already."""
        entries = [Param(key, value) for key, value in params.items()]
        with self.client() as client:
            for start in range(0, len(entries), _PARAMS_PER_REQUEST):
                chunk = entries[start : start + _PARAMS_PER_REQUEST]
                client.log_batch(run_id, params=chunk)

    def log_points(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Record finite metric values in as few requests as MLflow allows."""
        entries = [Metric(p.name, p.value, p.timestamp_ms, p.step) for p in points]
        with self.client() as client:
            for start in range(0, len(entries), _METRICS_PER_REQUEST):
                chunk = entries[start : start + _METRICS_PER_REQUEST]
                client.log_batch(run_id, metrics=chunk)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Attach a text file."""
        with self.client() as client:
            client.log_text(run_id, redact(text), name)

    def log_file(self, run_id: str, path: Path, directory: str = "") -> None:
        """Attach a file."""
        with self.client() as client:
            client.log_artifact(run_id, str(path), directory or None)

    def log_dataset(
        self, run_id: str, path: Path | str, name: str, fingerprint: str, context: str
    ) -> None:
        """Link a data file, a directory or a hub data set to a run, under its fingerprint."""
        dataset = MetaDataset(
            source=resolve_dataset_source(str(path)), name=name, digest=fingerprint[:DIGEST_CHARS]
        )
        entry = DatasetInput(
            dataset=dataset._to_mlflow_entity(), tags=[InputTag("mlflow.data.context", context)]
        )
        with self.client() as client:
            client.log_inputs(run_id, datasets=[entry])

    def log_model_output(self, run_id: str, artifact: Artifact, name: str) -> str:
        """Record a model that stays where it is, as an output of a run; return its MLflow id.

        A run that has one already, because it is settled after a kill, keeps it.
        """
        known = self.read_run(run_id).tags.get("model.id")
        if known is not None:
            return known
        tags = {
            "checkpoint_uri": artifact.path.as_uri(),
            "fingerprint": artifact.fingerprint,
            "kind": artifact.manifest.kind,
        }
        with self.client() as client:
            mlflow.set_tracking_uri(self.tracking_uri)
            model = mlflow.create_external_model(
                name=name,
                source_run_id=run_id,
                tags=tags,
                model_type=artifact.manifest.kind,
                experiment_id=self.experiment_id,
            )
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        self.set_tags(run_id, {"model.id": model.model_id})
        model_id: str = model.model_id
        return model_id

    def log_model_input(self, run_id: str, model_id: str) -> None:
        """Record that a run used a model."""
        with self.client() as client:
            client.log_inputs(run_id, models=[LoggedModelInput(model_id)])

    def read_run(self, run_id: str) -> RunRecord:
        """Return one run of any experiment.

        Raises:
            MissingInputError: no such run.
            ClusterError: the server did not say whether there is one.
        """
        with self.client() as client:
            run: Run | None = known_or_none(client.get_run, run_id)
        if run is None:
            raise MissingInputError(
                f"No MLflow run {run_id} at {self.shown_uri}",
                "the id of a run",
                "copy the id from the MLflow page of the run",
            )
        return _record(run)

    def find_runs(
        self,
        tags: Mapping[str, str],
        status: Status | None = None,
        limit: int = 50,
        without: str | None = None,
    ) -> list[RunRecord]:
        """Return this experiment's runs with exactly these tags, newest first.

        Args:
            tags: what a run must have.
            status: its state; any where not given.
            limit: at most so many.
            without: a tag that a run must not have.
        """
        clauses = [f"tags.`{key}` = {quoted(value)}" for key, value in tags.items()]
        if without is not None:
            clauses.append(f"tags.`{without}` IS NULL")
        if status is not None:
            clauses.append(f"attributes.status = '{status}'")
        with self.client() as client:
            found = client.search_runs(
                [self.experiment_id],
                filter_string=" and ".join(clauses),
                order_by=["attributes.start_time DESC"],
                max_results=limit,
            )
        return [_record(run) for run in found]

    def latest_finished(self, stage: str) -> RunRecord | None:
        """Return the newest FINISHED run of a stage, trials of an ablation aside."""
        found = self.find_runs({"stage": stage}, "FINISHED", limit=1, without=TRIAL)
        return found[0] if found else None

    def metric_history(self, run_id: str, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric in the order of the steps."""
        with self.client() as client:
            points = client.get_metric_history(run_id, name)
        return sorted((point.step, point.value) for point in points)

    def read_text(self, run_id: str, name: str) -> str | None:
        """Return a text file of a run; None when it has none of that name."""
        with tempfile.TemporaryDirectory(prefix="rlhf-mlflow-") as directory:
            try:
                path = client_of(self.tracking_uri).download_artifacts(run_id, name, directory)
            except (MlflowException, OSError):
                return None
            return Path(path).read_text(encoding="utf-8")

    def run_url(self, run_id: str) -> str | None:
        """Return the page of a run, when a server shows it."""
        if not self.tracking_uri.startswith("http"):
            return None
        page = f"#/experiments/{self.experiment_id}/runs/{run_id}?workflowType=machine_learning"
        return f"{self.shown_uri.rstrip('/')}/{page}"


def member_tag(pipeline_run_id: str) -> str:
    """Return the name of the tag that marks the runs of one chain."""
    return f"chain.{pipeline_run_id}"


def _record(run: Run) -> RunRecord:
    return RunRecord(
        run_id=run.info.run_id,
        status=run.info.status,
        tags=dict(run.data.tags),
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
        name=run.info.run_name or "",
        params=dict(run.data.params),
        metrics=dict(run.data.metrics),
        is_deleted=run.info.lifecycle_stage == "deleted",
    )
