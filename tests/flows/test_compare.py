"""`rlhf compare`: the table, the page, JSON."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tasks.config.shared import TrackingConfig
from tasks.tracking.comparison import Curve, compare_runs, render_comparison
from tasks.tracking.mlflow import MetricPoint, Tracker, connect
from tasks.workspace import Workspace

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
BAD_INPUT = 2


@pytest.fixture
def runs(tracker: Tracker) -> list[str]:
    """Two runs; somebody named one of them, a setting and a failure to do harm."""
    made = []
    for number in range(2):
        config = {"optimizer": {"learning_rate": 0.1 * (number + 1)}, "name": f"{number}{EVIL}"}
        run_id = tracker.start_run(f"run {EVIL}", {"stage": "sft"}, config)
        points = [MetricPoint("loss", 1.0 / step, step, 0) for step in range(1, 5)]
        tracker.log_points(run_id, [*points, MetricPoint("summary/accuracy", 0.5, 0, 0)])
        tracker.finish(run_id, "FAILED", failure=f"[bold]{EVIL}[/bold]")
        made.append(run_id)
    return made


class _Tags(HTMLParser):
    """Collects what a browser would see as elements and as addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_page_needs_no_network_and_runs_nothing(tracker: Tracker, runs: list[str]) -> None:
    page = render_comparison(compare_runs(tracker, runs, has_curves=True))
    tags = _Tags()
    tags.feed(page)
    assert tags.names.isdisjoint({"script", "img", "iframe", "link", "object", "form"})
    names = {name for name, _ in tags.attributes}
    assert not [name for name in names if name.startswith("on")]
    assert names.isdisjoint({"src", "href"})  # A database has no pages to link to.
    policies = [value for name, value in tags.attributes if name == "content"]
    assert any(value.startswith("default-src 'none'; ") for value in policies)
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<polyline") == 2
    assert re.search(r'points="0\.0,\S+ \S+ \S+ 320\.0,\S+"', page)


def test_only_web_addresses_become_links(tracker: Tracker, runs: list[str]) -> None:
    found = compare_runs(tracker, runs)
    found.runs[0].url = "javascript:alert(1)"
    found.runs[1].url = "http://host/#/runs/1"
    tags = _Tags()
    tags.feed(render_comparison(found))
    assert {v for name, v in tags.attributes if name == "href"} == {"http://host/#/runs/1"}


def test_flat_curve_is_drawn_in_the_middle(tracker: Tracker, runs: list[str]) -> None:
    found = compare_runs(tracker, runs)
    found.curves = [Curve(name="flat", lines=[[(1, 2.0), (3, 2.0)], []])]
    # 140 high, so the middle is 70; the steps span the width of 320.
    assert 'points="0.0,70.0 320.0,70.0"' in render_comparison(found)


def test_command_prints_writes_a_page_and_json(
    tracker: Tracker, runs: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "compare.html"
    result = CliRunner().invoke(app, ["compare", *runs, "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "optimizer.learning_rate 0.1 0.2" in text
    assert "summary/accuracy" in text
    assert all(run_id[:8] in text for run_id in runs)
    assert "[bold]" in result.stdout  # Text of a run is no markup.
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".html"] == [page.name]
    found = json.loads(CliRunner().invoke(app, ["compare", *runs, "--json"]).stdout)
    assert [run["run_id"] for run in found["runs"]] == runs
    settings = next(table for table in found["tables"] if table["title"] == "settings")
    assert all(row["differs"] for row in settings["rows"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "has 0 finished chains"),
        (["latest"], "1 run was given"),
        (["latest", "distill"], "has no finished pipeline"),
        (["runs:/1", "runs:/2"], "No MLflow run 1"),
    ],
)
def test_bad_reference_is_one_message(
    tracker: Tracker, arguments: list[str], expected: str
) -> None:
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == BAD_INPUT
    assert expected in result.stderr and "Fix: " in result.stderr
    assert result.stdout == ""


def test_page_that_cannot_be_written_is_told_and_home_is_expanded(
    tracker: Tracker, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "page.html").mkdir(parents=True)
    for target in (tmp_path / "none" / "page.html", tmp_path / "user" / "page.html"):
        result = CliRunner().invoke(app, ["compare", *runs, "--html", str(target)])
        assert result.exit_code == BAD_INPUT
        assert f"{target} cannot be written" in result.stderr
    result = CliRunner().invoke(app, ["compare", *runs, "--html", "~/other.html"])
    assert result.exit_code == 0, result.stderr
    found = sorted(path.name for path in (tmp_path / "user").iterdir())
    assert found == ["other.html", "page.html"]


@pytest.mark.slow
def test_page_of_a_server_links_to_its_runs(
    mlflow_server: str, workspace: Workspace, tmp_path: Path
) -> None:
    tracking = TrackingConfig(tracking_uri=mlflow_server, experiment="compare")
    tracker = connect(tracking, workspace)
    made = [tracker.start_run("sft", {"stage": "sft"}, {"rate": rate}) for rate in (1, 2)]
    page = tmp_path / "page.html"
    arguments = [made[0], f"runs:/{made[1]}", "--html", str(page), "--tracking-uri", mlflow_server]
    result = CliRunner().invoke(app, ["compare", *arguments, "--experiment", "compare", "--json"])
    assert result.exit_code == 0, result.stderr
    settings = json.loads(result.stdout)["tables"][1]
    assert [row["cells"] for row in settings["rows"]] == [["1", "2"]]
    tags = _Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    links = {value for name, value in tags.attributes if name == "href"}
    assert links == {tracker.run_url(run_id) for run_id in made}
    assert all(link.startswith(f"{mlflow_server}/#/experiments/") for link in links)
