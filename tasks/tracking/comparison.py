"""Runs side by side: what they are, which settings differ, what they measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, computed_field

from tasks.artifacts import MANIFEST_NAME, read_manifest
from tasks.config.shared import STAGES
from tasks.errors import ConfigError, MissingInputError
from tasks.report.page import render_html
from tasks.tracking.lineage import LATEST, last_finished, named_run, upstreams_of
from tasks.tracking.mlflow import PIPELINE, RunRecord, Tracker

ABSENT: Final = "-"
_SYSTEM: Final = "system/"
_FINAL: Final = ("summary/", "count/", *(f"{stage}/" for stage in STAGES))
_CURVES: Final = 12
_CURVE_POINTS: Final = 300


class ComparedRun(BaseModel):
    """One column."""

    ref: str
    run_id: str
    name: str
    stage: str
    status: str
    url: str | None = None


class Row(BaseModel):
    """One line: a text per run, and the numbers behind it where there are any."""

    name: str
    cells: list[str]
    numbers: list[float | None] | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def differs(self) -> bool:
        """Whether the runs are not all alike."""
        return len(set(self.cells)) > 1


class Table(BaseModel):
    """Rows of one kind."""

    title: str
    rows: list[Row]


class Curve(BaseModel):
    """A metric over steps, one line per run; a run without it has no points."""

    name: str
    lines: list[list[tuple[int, float]]]


class Comparison(BaseModel):
    """Runs side by side."""

    runs: list[ComparedRun]
    tables: list[Table]
    curves: list[Curve] = []


def find_run(tracker: Tracker, ref: str) -> RunRecord:
    """Return the run that a reference names, in whatever state it is.

    Args:
        tracker: the experiment to look in.
        ref: ``latest`` (the newest chain), a stage (its newest finished run), ``runs:/<id>`` or the
            id alone, ``models:/<name>@<alias>``, ``models:/<name>/<version>``, or the path of an
            artefact.

    Raises:
        MissingInputError: nothing is behind the reference.
    """
    text = ref.strip()
    is_path = Path(text).expanduser().exists()
    if text == LATEST or (text in STAGES and not is_path):
        stage = PIPELINE if text == LATEST else text
        found = tracker.latest_finished(stage)
        if found is None:
            raise MissingInputError(
                f"Reference {ref!r}: experiment {tracker.experiment!r} has no finished {stage}",
                "one to compare",
                "run `rlhf run` first, or give a run id",
            )
        return found
    run = named_run(tracker, text)
    if run is not None:
        return run
    manifest = read_manifest(Path(text).expanduser().absolute())
    if manifest.mlflow_run_id is None:
        raise MissingInputError(
            f"The artefact {text} names no MLflow run",
            "an artefact that a flow made",
            "give a run id",
        )
    return tracker.read_run(manifest.mlflow_run_id)


def newest_chains(tracker: Tracker) -> list[str]:
    """Return references to the two newest finished chains, the older first.

    Raises:
        MissingInputError: there are fewer.
    """
    found = tracker.find_runs({"stage": PIPELINE}, "FINISHED", limit=2)
    if len(found) < 2:
        raise MissingInputError(
            f"Experiment {tracker.experiment!r} has {len(found)} finished chains",
            "two to compare",
            "name the runs: `rlhf compare REF REF`",
        )
    return [f"runs:/{run.run_id}" for run in reversed(found)]


def compare_runs(
    tracker: Tracker, refs: Sequence[str], *, is_complete: bool = False, has_curves: bool = False
) -> Comparison:
    """Put runs side by side.

    Args:
        tracker: the experiment to look in.
        refs: see `find_run`.
        is_complete: keep settings that are the same in all runs, and the metrics of the machine.
        has_curves: read the histories of the metrics that the runs share.

    Raises:
        ConfigError: fewer than two references.
        MissingInputError: nothing is behind one of them.
    """
    if len(refs) < 2:
        raise ConfigError(f"{len(refs)} run was given", "two or more", "name another run")
    runs = [find_run(tracker, ref) for ref in refs]
    metrics = [run.metrics for run in runs]
    packages = [_packages(tracker, run) for run in runs]
    shown = _metric_names(metrics, is_complete)
    tables = [
        Table(title="runs", rows=_identity_rows(runs)),
        Table(title="settings", rows=_text_rows([run.params for run in runs], is_complete)),
        Table(title="inputs", rows=_text_rows([_inputs(run) for run in runs], is_complete)),
        Table(title="packages", rows=_text_rows(packages, is_complete)),
        Table(title="metrics", rows=[_metric_row(name, metrics) for name in shown]),
    ]
    columns = [_column(tracker, ref, run) for ref, run in zip(refs, runs, strict=True)]
    curves = _curves(tracker, runs, shown) if has_curves else []
    return Comparison(runs=columns, tables=[t for t in tables if t.rows], curves=curves)


def _column(tracker: Tracker, ref: str, run: RunRecord) -> ComparedRun:
    return ComparedRun(
        ref=ref,
        run_id=run.run_id,
        name=run.name,
        stage=run.stage or "",
        status="deleted" if run.is_deleted else run.status,
        url=tracker.run_url(run.run_id),
    )


def _identity_rows(runs: Sequence[RunRecord]) -> list[Row]:
    facts: dict[str, Callable[[RunRecord], str | None]] = {
        "stage": lambda run: run.stage,
        "status": lambda run: "deleted" if run.is_deleted else run.status,
        "started": lambda run: _moment(run.started_ms),
        "seconds": _seconds,
        "git commit": lambda run: run.tags.get("git.commit", "")[:12] or None,
        "fingerprint": lambda run: run.tags.get("fingerprint", "")[:12] or None,
        "chain": lambda run: run.tags.get("pipeline.run_id"),
        "processor": lambda run: run.tags.get("machine.cpu"),
        "accelerators": lambda run: run.tags.get("machine.accelerators"),
        "promotion": lambda run: run.tags.get("promotion"),
        "failure": lambda run: run.tags.get("failure"),
    }
    rows = [Row(name=n, cells=[look(run) or ABSENT for run in runs]) for n, look in facts.items()]
    return [row for row in rows if set(row.cells) != {ABSENT}]


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seconds(run: RunRecord) -> str | None:
    return None if run.ended_ms is None else f"{(run.ended_ms - run.started_ms) / 1000:.1f}"


def _text_rows(columns: Sequence[Mapping[str, str]], is_complete: bool) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in sorted(column))
    rows = [Row(name=name, cells=[col.get(name, ABSENT) for col in columns]) for name in names]
    return [row for row in rows if is_complete or row.differs]


def _inputs(run: RunRecord) -> dict[str, str]:
    return {name: f"{ref.fingerprint[:12]} ({ref.kind})" for name, ref in upstreams_of(run).items()}


def _packages(tracker: Tracker, run: RunRecord) -> dict[str, str]:
    """Return the versions that the run's artefact records; of a chain, those of its last stage."""
    run_id = last_finished(run) if run.stage == PIPELINE else run.run_id
    # Not as a manifest: another version of this program may have written it.
    text = tracker.read_text(run_id, MANIFEST_NAME) if run_id else None
    versions: dict[str, str] = json.loads(text or "{}").get("package_versions", {})
    return versions


def _metric_names(metrics: Sequence[Mapping[str, float]], is_complete: bool) -> list[str]:
    """Return the metrics, final figures before those of single steps."""
    names = {name for one in metrics for name in one}
    if not is_complete:
        names = {name for name in names if not name.startswith(_SYSTEM)}
    return sorted(names, key=lambda name: (not name.startswith(_FINAL), name))


def _metric_row(name: str, metrics: Sequence[Mapping[str, float]]) -> Row:
    numbers = [one.get(name) for one in metrics]
    first = numbers[0]
    cells = []
    for index, value in enumerate(numbers):
        text = ABSENT if value is None else f"{value:.6g}"
        if index and value is not None and first is not None and value != first:
            text += f" ({value - first:+.3g})"
        cells.append(text)
    return Row(name=name, cells=cells, numbers=numbers)


def _curves(tracker: Tracker, runs: Sequence[RunRecord], names: Sequence[str]) -> list[Curve]:
    """Return the histories of step metrics, those that most runs have first."""
    of_steps = [name for name in names if not name.startswith((_SYSTEM, *_FINAL))]
    of_steps.sort(key=lambda name: -sum(name in run.metrics for run in runs))
    curves = []
    for name in of_steps:
        lines = [
            _thinned(tracker.metric_history(run.run_id, name)) if name in run.metrics else []
            for run in runs
        ]
        if any(len(line) > 1 for line in lines):
            curves.append(Curve(name=name, lines=lines))
        if len(curves) == _CURVES:
            break
    return curves


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `_CURVE_POINTS` points, the last one among them."""
    stride = -(-len(points) // _CURVE_POINTS) or 1
    return points[::-1][::stride][::-1]


# A comparison of runs as one page for a browser, which needs no network and runs no script.

_WIDTH: Final = 320
_HEIGHT: Final = 140
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")


def render_comparison(comparison: Comparison) -> str:
    """Return the page."""
    columns = zip(comparison.runs, cycle(_COLOURS), strict=False)
    return render_html(
        "tasks.tracking",
        "compare_page",
        runs=[{"run": run, "colour": colour, "link": _link(run.url)} for run, colour in columns],
        tables=comparison.tables,
        charts=[_chart(curve) for curve in comparison.curves],
        width=_WIDTH,
        height=_HEIGHT,
    )


def _link(url: str | None) -> str | None:
    """Return an address that a browser may follow."""
    return url if url and url.startswith(("http://", "https://")) else None


def _chart(curve: Curve) -> dict[str, Any]:
    points = [point for line in curve.lines for point in line]
    left, right = _bounds([step for step, _ in points])
    low, high = _bounds([value for _, value in points])
    lines = []
    for line, colour in zip(curve.lines, cycle(_COLOURS), strict=False):
        placed = [
            f"{_WIDTH * (step - left) / (right - left):.1f},"
            f"{_HEIGHT * (1 - (value - low) / (high - low)):.1f}"
            for step, value in line
        ]
        if placed:
            lines.append({"colour": colour, "points": " ".join(placed)})
    values, steps = (f"{low:.4g}", f"{high:.4g}"), (f"{left:g}", f"{right:g}")
    return {"name": curve.name, "lines": lines, "values": values, "steps": steps}


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # A line of equal values lies in the middle.
    return (low, high) if high > low else (low - 0.5, high + 0.5)
