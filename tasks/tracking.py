"""MLflow: the experiment, one run per stage, datasets and models that link runs to each other."""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
# The client's own defaults wait for minutes before they report a server that is gone.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

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
from tasks.config import TrackingConfig
from tasks.errors import ClusterError, ConfigError, MissingInputError, WorkspaceError
from tasks.tracking_values import cut_tag, flat_params
from tasks.workspace import Workspace

PIPELINE = "pipeline"
DIGEST_CHARS = 36
_CONNECT_SECONDS = 5
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
    """What MLflow knows about a run."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    started_ms: int
    ended_ms: int | None

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
    _quieten()
    uri = config.tracking_uri or workspace.tracking_uri
    _check_uri(uri)
    if uri.startswith("http"):
        _check_server(uri)
    with _translated(uri):
        experiment_id = _experiment_id(uri, config.experiment, workspace)
    return Tracker(uri, config.experiment, experiment_id)


def _quieten() -> None:
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="The specified dataset source can be interpreted")


def _check_uri(uri: str) -> None:
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


def _check_server(uri: str) -> None:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_CONNECT_SECONDS):
            return
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ClusterError(
            f"No MLflow server answers at {uri}: {error}",
            "a running `mlflow server`",
            "start it, correct tracking.tracking_uri, or set it to null to need no server",
        ) from error


def _experiment_id(uri: str, name: str, workspace: Workspace) -> str:
    client = _client(uri)
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


@cache
def _client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


@contextmanager
def _translated(uri: str) -> Iterator[None]:
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

    def start_run(
        self, name: str, tags: Mapping[str, str | None], config: Mapping[str, Any]
    ) -> str:
        """Open a run with its tags and config, whole and as flat parameters; return its id."""
        kept = {key: cut_tag(value) for key, value in tags.items() if value is not None}
        with _translated(self.tracking_uri):
            run = _client(self.tracking_uri).create_run(
                self.experiment_id, tags=kept, run_name=name
            )
        run_id: str = run.info.run_id
        self.log_text(run_id, json.dumps(config, indent=2, sort_keys=True), "config.json")
        self.log_params(run_id, flat_params(config))
        return run_id

    def log_trial(
        self, parent_id: str, name: str, params: Mapping[str, float], metrics: Mapping[str, float]
    ) -> None:
        """Record a finished attempt of a search as a run nested under its parent."""
        tags = {"mlflow.parentRunId": parent_id, "trial_of": parent_id}
        with _translated(self.tracking_uri):
            client = _client(self.tracking_uri)
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
        with _translated(self.tracking_uri):
            if failure is not None:
                _client(self.tracking_uri).delete_tag(run_id, "failure")
            _client(self.tracking_uri).update_run(run_id, status="RUNNING")

    def finish(self, run_id: str, status: Status, failure: str | None = None) -> None:
        """End a run; ``failure`` becomes the tag of that name."""
        if failure is not None:
            self.set_tags(run_id, {"failure": failure})
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).set_terminated(run_id, status=status)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; longer values than MLflow keeps are cut with a mark."""
        entries = [RunTag(key, cut_tag(value)) for key, value in tags.items()]
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).log_batch(run_id, tags=entries)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Record parameters that are short already."""
        entries = [Param(key, value) for key, value in params.items()]
        with _translated(self.tracking_uri):
            for start in range(0, len(entries), _PARAMS_PER_REQUEST):
                chunk = entries[start : start + _PARAMS_PER_REQUEST]
                _client(self.tracking_uri).log_batch(run_id, params=chunk)

    def log_points(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Record finite metric values in as few requests as MLflow allows."""
        entries = [Metric(p.name, p.value, p.timestamp_ms, p.step) for p in points]
        with _translated(self.tracking_uri):
            for start in range(0, len(entries), _METRICS_PER_REQUEST):
                chunk = entries[start : start + _METRICS_PER_REQUEST]
                _client(self.tracking_uri).log_batch(run_id, metrics=chunk)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Attach a text file."""
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).log_text(run_id, text, name)

    def log_file(self, run_id: str, path: Path, directory: str = "") -> None:
        """Attach a file."""
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).log_artifact(run_id, str(path), directory or None)

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
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).log_inputs(run_id, datasets=[entry])

    def log_model_output(self, run_id: str, artifact: Artifact, name: str) -> str:
        """Record a model that stays where it is, as an output of a run; return its MLflow id."""
        tags = {
            "checkpoint_uri": artifact.path.as_uri(),
            "fingerprint": artifact.fingerprint,
            "kind": artifact.manifest.kind,
        }
        with _translated(self.tracking_uri):
            mlflow.set_tracking_uri(self.tracking_uri)
            model = mlflow.create_external_model(
                name=name,
                source_run_id=run_id,
                tags=tags,
                model_type=artifact.manifest.kind,
                experiment_id=self.experiment_id,
            )
            client = _client(self.tracking_uri)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        self.set_tags(run_id, {"model.id": model.model_id})
        model_id: str = model.model_id
        return model_id

    def register_candidate(self, model_id: str, artifact: Artifact) -> int:
        """Register a model as the newest version of the student and point ``candidate`` at it."""
        name = self.student_model_name
        client = _client(self.tracking_uri)
        with _translated(self.tracking_uri):
            if not client.search_registered_models(f"name = {_quoted(name)}", max_results=1):
                client.create_registered_model(name)
            version = client.create_model_version(
                name,
                source=f"models:/{model_id}",
                run_id=artifact.manifest.mlflow_run_id,
                tags={"artifact.path": str(artifact.path)},
                model_id=model_id,
            )
            client.set_registered_model_alias(name, "candidate", version.version)
        return int(version.version)

    def log_model_input(self, run_id: str, model_id: str) -> None:
        """Record that a run used a model."""
        with _translated(self.tracking_uri):
            _client(self.tracking_uri).log_inputs(run_id, models=[LoggedModelInput(model_id)])

    def read_run(self, run_id: str) -> RunRecord:
        """Return one run of any experiment.

        Raises:
            MissingInputError: no such run.
        """
        try:
            return _record(_client(self.tracking_uri).get_run(run_id))
        except MlflowException as error:
            raise MissingInputError(
                f"No MLflow run {run_id} at {self.tracking_uri}",
                "the id of a run",
                "copy the id from the MLflow page of the run",
            ) from error

    def find_runs(
        self, tags: Mapping[str, str], status: Status | None = None, limit: int = 50
    ) -> list[RunRecord]:
        """Return this experiment's runs with exactly these tags, newest first."""
        clauses = [f"tags.`{key}` = {_quoted(value)}" for key, value in tags.items()]
        if status is not None:
            clauses.append(f"attributes.status = '{status}'")
        with _translated(self.tracking_uri):
            found = _client(self.tracking_uri).search_runs(
                [self.experiment_id],
                filter_string=" and ".join(clauses),
                order_by=["attributes.start_time DESC"],
                max_results=limit,
            )
        return [_record(run) for run in found]

    def latest_finished(self, stage: str) -> RunRecord | None:
        """Return the newest FINISHED run of a stage."""
        found = self.find_runs({"stage": stage}, "FINISHED", limit=1)
        return found[0] if found else None

    def run_of_alias(self, name: str, alias: str) -> str:
        """Return the id of the run behind ``models:/<name>@<alias>``.

        Raises:
            MissingInputError: no such model or alias.
        """
        try:
            version = _client(self.tracking_uri).get_model_version_by_alias(name, alias)
        except MlflowException as error:
            raise MissingInputError(
                f"No registered model {name!r} with alias {alias!r} at {self.tracking_uri}",
                "a model and alias of the MLflow model registry",
                f"run the chain, which registers {self.student_model_name}@candidate",
            ) from error
        run_id: str = version.run_id
        return run_id

    def run_url(self, run_id: str) -> str | None:
        """Return the page of a run, when a server shows it."""
        if not self.tracking_uri.startswith("http"):
            return None
        page = f"#/experiments/{self.experiment_id}/runs/{run_id}?workflowType=machine_learning"
        return f"{self.tracking_uri.rstrip('/')}/{page}"


def _record(run: Run) -> RunRecord:
    return RunRecord(
        run_id=run.info.run_id,
        status=run.info.status,
        tags=dict(run.data.tags),
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
    )


def _quoted(value: str) -> str:
    return '"' + value.replace('"', "") + '"' if "'" in value else f"'{value}'"
