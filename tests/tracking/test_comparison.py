"""Runs side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.artifacts import ParentRef
from tasks.errors import ConfigError, MissingInputError
from tasks.tracking.comparison import Comparison, Table, compare_runs, find_run, newest_chains
from tasks.tracking.lineage import upstream_tags
from tasks.tracking.mlflow import PIPELINE, MetricPoint, Tracker
from tasks.tracking.registry import Registry

Make = Callable[..., Any]


def _points(**values: float) -> list[MetricPoint]:
    return [MetricPoint(name.replace("__", "/"), value, 0, 0) for name, value in values.items()]


def _run(tracker: Tracker, learning_rate: float, stage: str = "sft", data: str = "d1") -> str:
    parent = ParentRef(kind="preference_dataset", fingerprint=data * 20, path="/data")
    tags = {"stage": stage, **upstream_tags({"preferences": parent})}
    config = {"optimizer": {"learning_rate": learning_rate}, "seed": 0}
    return tracker.start_run(stage, tags, config)


@pytest.fixture
def pair(tracker: Tracker) -> list[str]:
    """Two finished runs: another learning rate, other data, other results."""
    runs = [_run(tracker, 0.1, data="d1"), _run(tracker, 0.2, data="d2")]
    for run_id, accuracy in zip(runs, (0.75, 0.5), strict=True):
        tracker.log_points(run_id, _points(summary__accuracy=accuracy, system__cpu=9.0))
        curve = [MetricPoint("loss", accuracy / step, step, 0) for step in range(1, 4)]
        tracker.log_points(run_id, curve)
        tracker.finish(run_id, "FINISHED")
    return runs


def _table(found: Comparison, title: str) -> Table:
    return next(table for table in found.tables if table.title == title)


def _cells(found: Comparison, title: str) -> dict[str, list[str]]:
    return {row.name: row.cells for row in _table(found, title).rows}


def test_only_what_differs_is_shown_of_settings(tracker: Tracker, pair: list[str]) -> None:
    found = compare_runs(tracker, pair)
    assert _cells(found, "settings") == {"optimizer.learning_rate": ["0.1", "0.2"]}
    assert _cells(found, "inputs") == {
        "preferences": ["d1d1d1d1d1d1 (preference_dataset)", "d2d2d2d2d2d2 (preference_dataset)"]
    }
    assert [run.run_id for run in found.runs] == pair
    whole = _cells(compare_runs(tracker, pair, is_complete=True), "settings")
    assert whole["seed"] == ["0", "0"]


def test_final_figures_come_first_and_say_the_difference(tracker: Tracker, pair: list[str]) -> None:
    table = _table(compare_runs(tracker, pair), "metrics")
    assert [row.name for row in table.rows] == ["summary/accuracy", "loss"]
    # 0.5 - 0.75 = -0.25
    assert table.rows[0].cells == ["0.75", "0.5 (-0.25)"]
    assert table.rows[0].numbers == [0.75, 0.5]
    complete = _table(compare_runs(tracker, pair, is_complete=True), "metrics")
    assert "system/cpu" in [row.name for row in complete.rows]


def test_metric_that_a_run_lacks_is_a_dash(tracker: Tracker, pair: list[str]) -> None:
    tracker.log_points(pair[1], _points(summary__extra=1.0))
    assert _cells(compare_runs(tracker, pair), "metrics")["summary/extra"] == ["-", "1"]


def test_curves_are_the_histories(tracker: Tracker, pair: list[str]) -> None:
    assert compare_runs(tracker, pair).curves == []
    (curve,) = compare_runs(tracker, pair, has_curves=True).curves
    assert curve.name == "loss"
    # 0.75 / step and 0.5 / step
    assert curve.lines == [
        [(1, 0.75), (2, 0.375), (3, 0.25)],
        [(1, 0.5), (2, 0.25), (3, 0.5 / 3)],
    ]


def test_long_curve_is_thinned_and_keeps_its_end(tracker: Tracker, pair: list[str]) -> None:
    long = [MetricPoint("reward", float(step), step, 0) for step in range(1, 1001)]
    tracker.log_points(pair[0], long)
    curves = compare_runs(tracker, pair, has_curves=True).curves
    line = next(curve for curve in curves if curve.name == "reward").lines[0]
    # 1000 points at most 300 at a time: every fourth.
    assert len(line) == 250
    assert line[-1] == (1000, 1000.0)


def test_packages_come_from_the_manifests(tracker: Tracker, pair: list[str]) -> None:
    for run_id, version in zip(pair, ("2.13.0", "2.14.0"), strict=True):
        text = json.dumps({"package_versions": {"torch": version, "ray": "2.60"}})
        tracker.log_text(run_id, text, "artifact.json")
    assert _cells(compare_runs(tracker, pair), "packages") == {"torch": ["2.13.0", "2.14.0"]}


def test_failed_and_deleted_runs_are_compared_too(tracker: Tracker, pair: list[str]) -> None:
    failed = _run(tracker, 0.1)
    tracker.finish(failed, "FAILED", failure="loss is nan")
    MlflowClient(tracker.tracking_uri).delete_run(pair[0])
    cells = _cells(compare_runs(tracker, [pair[0], failed]), "runs")
    assert cells["status"] == ["deleted", "FAILED"]
    assert cells["failure"] == ["-", "loss is nan"]


def test_every_form_of_a_reference(tracker: Tracker, make_artifact: Make) -> None:
    run_id = _run(tracker, 0.1, "distill")
    student = make_artifact("distill", run_id=run_id)
    tracker.set_tags(run_id, {"artifact.path": str(student.path)})
    registry = Registry(tracker)
    registry.register(tracker.log_model_output(run_id, student, "distill"), student)
    tracker.finish(run_id, "FINISHED")
    name = registry.name
    forms = [run_id, f"runs:/{run_id}", "distill", str(student.path)]
    for ref in [*forms, f"models:/{name}@candidate", f"models:/{name}/1"]:
        assert find_run(tracker, ref).run_id == run_id
    chain = tracker.start_run("chain", {"stage": PIPELINE}, {})
    tracker.finish(chain, "FINISHED")
    assert find_run(tracker, "latest").run_id == chain
    assert find_run(tracker, chain).run_id == chain


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("latest", "has no finished pipeline"),
        ("distill", "has no finished distill"),
        ("runs:/0123", "No MLflow run 0123"),
        ("models:/x@champion", "No registered model 'x' with alias 'champion'"),
        ("/nowhere", "No artefact at /nowhere"),
    ],
)
def test_nothing_behind_a_reference(tracker: Tracker, ref: str, expected: str) -> None:
    with pytest.raises(MissingInputError, match=expected):
        find_run(tracker, ref)


def test_artefact_without_a_run_is_told(tracker: Tracker, make_artifact: Make) -> None:
    with pytest.raises(MissingInputError, match="names no MLflow run"):
        find_run(tracker, str(make_artifact("sft").path))


def test_one_run_is_not_compared(tracker: Tracker, pair: list[str]) -> None:
    with pytest.raises(ConfigError, match="1 run was given"):
        compare_runs(tracker, pair[:1])


def test_two_newest_chains_are_the_default(tracker: Tracker) -> None:
    with pytest.raises(MissingInputError, match="has 0 finished chains"):
        newest_chains(tracker)
    client = MlflowClient(tracker.tracking_uri)
    made = []
    for started_ms in (1000, 3000, 2000):
        tags = {"stage": PIPELINE}
        run = client.create_run(tracker.experiment_id, start_time=started_ms, tags=tags)
        tracker.finish(run.info.run_id, "FINISHED")
        made.append(run.info.run_id)
    assert newest_chains(tracker) == [f"runs:/{made[2]}", f"runs:/{made[1]}"]
