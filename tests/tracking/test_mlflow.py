"""MLflow tracking on a real database, and on a real server."""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from tasks.artifacts import StudentAdapter
from tasks.config.shared import TrackingConfig
from tasks.errors import ClusterError, ConfigError, MissingInputError
from tasks.sft.config import SftConfig
from tasks.tracking.lineage import lineage_tree, resolve_reference, upstream_tags
from tasks.tracking.mlflow import (
    MAX_PARAM_CHARS,
    Tracker,
    clean_name,
    connect,
    cut_tag,
    flat_params,
)
from tasks.tracking.registry import Registry
from tasks.tracking.run_log import ProgressDisplay, StageLog
from tasks.workspace import Workspace

SharedCases = Callable[[str], list[dict[str, Any]]]
Make = Callable[..., Any]


def _case(shared_cases: SharedCases, name: str) -> dict[str, Any]:
    return next(case for case in shared_cases("mlflow") if case["id"] == name)


def _client(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracking_uri=tracker.tracking_uri)


def _start(tracker: Tracker, stage: str = "sft", **tags: str) -> str:
    return tracker.start_run(stage, {"stage": stage, **tags}, SftConfig().model_dump(mode="json"))


def _log(tracker: Tracker, run_id: str) -> StageLog:
    return StageLog(tracker, run_id, "sft", ProgressDisplay("sft"))


def _history(tracker: Tracker, run_id: str, name: str) -> list[list[float]]:
    return [[m.step, m.value] for m in _client(tracker).get_metric_history(run_id, name)]


def test_database_and_artifacts_are_in_the_workspace(
    tracker: Tracker, workspace: Workspace
) -> None:
    run_id = _start(tracker)
    assert (workspace.root / "mlflow.db").is_file()
    uri = _client(tracker).get_run(run_id).info.artifact_uri
    assert uri.startswith(workspace.mlflow_artifacts_dir.as_uri())
    assert connect(TrackingConfig(), workspace) == tracker


def test_run_holds_its_config_whole_and_as_parameters(tracker: Tracker) -> None:
    run_id = _start(tracker, fingerprint="f" * 64)
    run = _client(tracker).get_run(run_id)
    assert run.data.params["optimizer.learning_rate"] == "0.0001"
    assert run.data.tags["fingerprint"] == "f" * 64
    path = _client(tracker).download_artifacts(run_id, "config.json")
    assert json.loads(Path(path).read_text()) == SftConfig().model_dump(mode="json")


def test_nonfinite_metric_is_counted_and_the_rest_kept(
    tracker: Tracker, shared_cases: SharedCases
) -> None:
    case = _case(shared_cases, "ML-01")
    run_id = _start(tracker)
    log = _log(tracker, run_id)
    for name, value, step in case["input"]["metrics"]:
        log.metrics({name: float(value)}, step)
    log.close()
    tracker.finish(run_id, "FINISHED")
    run = tracker.read_run(run_id)
    assert run.status.lower() == case["expected"]["run_status"]
    assert _history(tracker, run_id, "loss") == case["expected"]["finite_metrics_logged"]["loss"]
    assert run.tags["nonfinite.loss"] == "1, first at step 3"


def test_all_kinds_of_nonfinite_values_are_counted_by_name(tracker: Tracker) -> None:
    run_id = _start(tracker)
    log = _log(tracker, run_id)
    log.metrics({"a": math.inf, "b": 1.0}, 0)
    log.metrics({"a": -math.inf, "b": math.nan}, 1)
    log.close()
    tags = tracker.read_run(run_id).tags
    assert (tags["nonfinite.a"], tags["nonfinite.b"]) == (
        "2, first at step 0",
        "1, first at step 1",
    )
    assert _history(tracker, run_id, "b") == [[0, 1.0]]
    events = Path(_client(tracker).download_artifacts(run_id, "events.jsonl")).read_text()
    # Once per name, however often it happens.
    assert [json.loads(line)["name"] for line in events.splitlines()] == [
        "nonfinite.a",
        "nonfinite.b",
    ]


def test_long_parameter_keeps_its_length_and_digest(
    tracker: Tracker, shared_cases: SharedCases
) -> None:
    case = _case(shared_cases, "ML-03")
    prompt = "x" * 6001
    run_id = tracker.start_run(
        "sft", {}, {"lr": case["input"]["params"]["lr"], "system_prompt": prompt}
    )
    params = _client(tracker).get_run(run_id).data.params
    assert params["lr"] == case["expected"]["lr_logged"]
    # printf 'x%.0s' $(seq 6001) | sha256sum | cut -c1-16
    assert params["system_prompt"] == "sha256:e12d2a8f900180c3 length:6001"
    whole = json.loads(Path(_client(tracker).download_artifacts(run_id, "config.json")).read_text())
    assert whole["system_prompt"] == prompt


@pytest.mark.slow
def test_spawned_workers_report_to_the_same_run(
    tracker: Tracker, shared_cases: SharedCases
) -> None:
    case = _case(shared_cases, "ML-05")
    run_id = _start(tracker)
    log = _log(tracker, run_id)
    context = multiprocessing.get_context(case["input"]["start_method"])
    workers = [
        context.Process(target=StageLog.metrics, args=(log, {f"worker_{number}": 1.0}, 0))
        for number in range(case["input"]["workers"])
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    runs = _client(tracker).search_runs([tracker.experiment_id])
    assert len(runs) == case["expected"]["runs_total"]
    assert len(runs[0].data.metrics) == case["expected"]["metric_count_in_R"]


def test_metrics_are_written_in_batches_and_at_the_end(tracker: Tracker) -> None:
    run_id = _start(tracker)
    log = _log(tracker, run_id)
    for step in range(1200):
        log.metrics({"loss": float(step)}, step)
    early = len(_history(tracker, run_id, "loss"))
    # 500 points make a batch, so two are written and 200 points wait.
    assert early in (1000, 1200)
    log.close()
    assert _history(tracker, run_id, "loss") == [[step, float(step)] for step in range(1200)]


def test_event_and_file_are_on_the_run(tracker: Tracker, tmp_path: Path) -> None:
    run_id = _start(tracker)
    log = _log(tracker, run_id)
    log.event("resume", "continued at step 50")
    plot = tmp_path / "plot.txt"
    plot.write_text("o")
    log.file(plot, "plots")
    log.close()
    assert tracker.read_run(run_id).tags["event.resume"] == "continued at step 50"
    events = Path(_client(tracker).download_artifacts(run_id, "events.jsonl")).read_text()
    assert json.loads(events)["message"] == "continued at step 50"
    assert Path(_client(tracker).download_artifacts(run_id, "plots/plot.txt")).read_text() == "o"


def test_server_that_is_away_delays_metrics_and_fails_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log = _log(Tracker("http://127.0.0.1:9", "x", "0"), "run")
    for step in range(501):
        log.metrics({"loss": 1.0}, step)
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9"):
        log.close()


def test_copy_in_another_process_writes_at_once(tracker: Tracker) -> None:
    run_id = _start(tracker)
    copy: StageLog = pickle.loads(pickle.dumps(_log(tracker, run_id)))
    copy.metrics({"loss": 0.5}, 3)
    copy.event("note", "from afar")
    assert _history(tracker, run_id, "loss") == [[3, 0.5]]
    assert tracker.read_run(run_id).tags["event.note"] == "from afar"


def test_progress_is_printed_where_there_is_no_terminal(
    tracker: Tracker, capfd: pytest.CaptureFixture[str]
) -> None:
    log = _log(tracker, _start(tracker))
    log.progress(1, 10, "loss 0.5")
    log.progress(2, 10, "loss 0.4")
    # Lines come at most every 15 s.
    assert capfd.readouterr().err == "sft: 1/10 loss 0.5\n"


def test_failure_is_a_tag(tracker: Tracker) -> None:
    run_id = _start(tracker)
    tracker.finish(run_id, "FAILED", failure="because")
    run = tracker.read_run(run_id)
    assert (run.status, run.tags["failure"]) == ("FAILED", "because")


def test_newest_finished_run_is_found(tracker: Tracker) -> None:
    older, newer, failed, other = (
        _start(tracker, stage) for stage in ("sft", "sft", "sft", "distill")
    )
    for run_id in (older, newer, other):
        tracker.finish(run_id, "FINISHED")
    tracker.finish(failed, "FAILED")
    found = tracker.latest_finished("sft")
    assert found is not None
    assert found.run_id in (older, newer)
    assert tracker.latest_finished("evaluate") is None
    assert tracker.find_runs({"stage": "it's"}) == []


def test_nested_run_names_its_parent(tracker: Tracker) -> None:
    parent = _start(tracker, "pipeline")
    child = tracker.start_run("sft", {"mlflow.parentRunId": parent}, {})
    found = tracker.find_runs({"mlflow.parentRunId": parent})
    assert [run.run_id for run in found] == [child]


def test_unreachable_server_is_named_quickly(workspace: Workspace) -> None:
    started_at = time.monotonic()
    with pytest.raises(ClusterError, match=r"No MLflow server answers at http://127\.0\.0\.1:9"):
        connect(TrackingConfig(tracking_uri="http://127.0.0.1:9"), workspace)
    assert time.monotonic() - started_at < 10


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/x", "sqlite:///mlflow.db"])
def test_addresses_that_mlflow_would_misread_are_refused(uri: str, workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.tracking_uri"):
        connect(TrackingConfig(tracking_uri=uri), workspace)


def test_deleted_experiment_is_named(tracker: Tracker, workspace: Workspace) -> None:
    _client(tracker).delete_experiment(tracker.experiment_id)
    with pytest.raises(ConfigError, match="mlflow experiments restore"):
        connect(TrackingConfig(), workspace)


def test_unknown_run_is_named(tracker: Tracker) -> None:
    with pytest.raises(MissingInputError, match="No MLflow run abc"):
        tracker.read_run("abc")


def test_models_link_producer_and_consumer(tracker: Tracker, make_artifact: Make) -> None:
    producer, consumer = _start(tracker), _start(tracker, "distill")
    base = make_artifact("sft", run_id=producer)
    model_id = tracker.log_model_output(producer, base, "sft")
    tracker.log_model_input(consumer, model_id)
    tracker.log_dataset(consumer, base.path, "preferences", "f" * 64, "training")
    client = _client(tracker)
    assert [model.model_id for model in client.get_run(producer).outputs.model_outputs] == [
        model_id
    ]
    inputs = client.get_run(consumer).inputs
    assert [model.model_id for model in inputs.model_inputs] == [model_id]
    assert [entry.dataset.digest for entry in inputs.dataset_inputs] == ["f" * 36]
    tags = client.get_logged_model(model_id).tags
    assert tags["checkpoint_uri"] == base.path.as_uri()
    assert tags["fingerprint"] == base.fingerprint


def test_candidate_moves_to_the_newest_student(tracker: Tracker, make_artifact: Make) -> None:
    versions = []
    for seed in (1, 2):
        run_id = _start(tracker, "distill")
        student = make_artifact("distill", run_id=run_id, seed=seed)
        model_id = tracker.log_model_output(run_id, student, "distill")
        versions.append(Registry(tracker).register(model_id, student))
        assert Registry(tracker, "rlhf-flows-student").aliased("candidate").run_id == run_id
    assert versions == [1, 2]


def test_flat_params() -> None:
    flat = flat_params(
        {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": None, "f": "x", "g": {"h & i": True}}
    )
    assert flat == {
        "a.b": "1",
        "a.c": "{}",
        "d": "[1, 2]",
        "e": "null",
        "f": "x",
        "g.h _ i": "true",
    }


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=2000), max_size=4))
def test_parameters_are_always_short_and_well_named(config: dict[str, str]) -> None:
    for name, value in flat_params(config).items():
        assert len(value) <= MAX_PARAM_CHARS
        assert clean_name(name) == name


def test_long_tag_is_cut_with_a_mark() -> None:
    assert cut_tag("x" * 5000) == "x" * 5000
    assert cut_tag("x" * 9000) == "x" * 4994 + " [...]"


@pytest.mark.slow
def test_everything_works_over_a_server(
    mlflow_server: str, workspace: Workspace, make_artifact: Make
) -> None:
    tracker = connect(TrackingConfig(tracking_uri=mlflow_server, experiment="server"), workspace)
    data = make_artifact("ingest", run_id=_start(tracker, "ingest"))
    parents = {"preferences": data.as_parent()}
    run_id = tracker.start_run(
        "distill",
        {"stage": "distill", **upstream_tags(parents)},
        SftConfig().model_dump(mode="json"),
    )
    log = _log(tracker, run_id)
    log.metrics({"loss": 0.5, "bad": math.nan}, 1)
    log.event("note", "over http")
    log.close()
    student = make_artifact("distill", parents, run_id=run_id)
    tracker.set_tags(run_id, {"artifact.path": str(student.path)})
    Registry(tracker).register(tracker.log_model_output(run_id, student, "distill"), student)
    tracker.log_dataset(run_id, data.path, "preferences", data.fingerprint, "training")
    tracker.finish(run_id, "FINISHED")

    assert _history(tracker, run_id, "loss") == [[1, 0.5]]
    assert tracker.read_run(run_id).tags["nonfinite.bad"] == "1, first at step 1"
    for ref in ("latest", f"runs:/{run_id}", "models:/server-student@candidate", str(student.path)):
        assert resolve_reference(tracker, ref, "distill", StudentAdapter) == student
    assert [node.stage for node in lineage_tree(tracker, "distill").walk()] == ["distill", "ingest"]
    url = tracker.run_url(run_id)
    assert url is not None
    assert url.startswith(f"{mlflow_server}/#/experiments/{tracker.experiment_id}/runs/{run_id}")
