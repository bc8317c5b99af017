"""Commands about runs that are done: lineage, compare, promote, rollback, reproduce."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.shared import (
    FAILURE,
    AsJson,
    Debug,
    Experiment,
    TrackingUri,
    open_tracker,
    reported,
    say,
    terminal,
)
from tasks.artifacts import write_whole
from tasks.config.shared import STAGES, TrackingConfig
from tasks.errors import ConfigError

if TYPE_CHECKING:
    from tasks.tracking.comparison import Comparison
    from tasks.tracking.lineage import LineageNode

runs_app = typer.Typer()

Why = Annotated[str, typer.Option(help="The reason; it becomes a tag of the version.")]


@runs_app.command("lineage")
def lineage_command(
    ref: Annotated[
        str,
        typer.Argument(
            help="A path, `runs:/<id>`, `models:/<name>@<alias>`, `models:/<name>/<version>`, "
            f"latest, or a stage: {', '.join(STAGES)}."
        ),
    ],
    as_json: AsJson = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid diagram.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the hash of every file of every artefact.")
    ] = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Print the tree from an artefact, a run or a version back to the raw files, with hashes.

    The exit code is 1 when a link is broken: an artefact or a run that was deleted, a torn or
    edited artefact, a raw file that has changed.
    """
    with reported(debug):
        from tasks.tracking.lineage import lineage_tree

        if as_json and as_mermaid:
            raise ConfigError("--json and --mermaid were both given", "one", "remove one")
        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        tree = lineage_tree(open_tracker(tracking), ref, is_deep=verify)
        if as_json:
            print(tree.model_dump_json(indent=2))
        elif as_mermaid:
            print(lineage_mermaid(tree))
        else:
            print_lineage(terminal(), tree)
        if tree.broken:
            raise typer.Exit(FAILURE)


@runs_app.command("compare")
def compare_command(
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REF]...",
            help="Runs: latest (the newest chain), a stage, `runs:/<id>` or the id, "
            "`models:/<name>@<alias>`, `models:/<name>/<version>`, or an artefact's path. "
            "Default: the two newest chains.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page, with curves, to this file.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show settings that are the same in all runs, too.")
    ] = False,
    as_json: AsJson = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Put runs side by side: settings that differ, inputs, packages, metrics."""
    with reported(debug):
        from tasks.tracking.comparison import compare_runs, newest_chains, render_comparison

        tracker = open_tracker(TrackingConfig(tracking_uri=tracking_uri, experiment=experiment))
        found = compare_runs(
            tracker,
            refs or newest_chains(tracker),
            is_complete=show_all,
            has_curves=html is not None,
        )
        plain = found.model_dump(mode="json")
        if html is not None:
            write_whole(html.expanduser().absolute(), render_comparison(found))
        if as_json:
            print(json.dumps(plain, indent=2, allow_nan=False))
        else:
            print_comparison(terminal(), found)


@runs_app.command("promote")
def promote_command(
    version: Annotated[
        str,
        typer.Argument(
            help="A version's number, candidate, `models:/<name>@<alias>`, "
            "`models:/<name>/<version>`, or `runs:/<id>` of the run that made the student."
        ),
    ],
    why: Why = "by hand",
    force: Annotated[bool, typer.Option("--force", help="Although the gate failed.")] = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Make a student the champion; who, when and why become tags of its version."""
    with reported(debug):
        from flows.promote import promote

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        print(promote(version, why, tracking, is_forced=force))


@runs_app.command("rollback")
def rollback_command(
    why: Why = "by hand",
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Make the champion before this one the champion again."""
    with reported(debug):
        from flows.promote import rollback

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        print(rollback(why, tracking))


@runs_app.command("reproduce")
def reproduce_command(
    ref: Annotated[
        str,
        typer.Argument(
            help="A stage's run: `runs:/<id>` or the id, `models:/<name>@<alias>`, a stage, or "
            "an artefact's path."
        ),
    ],
    as_json: AsJson = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the repeat's files when they are equal, too.")
    ] = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Run a stage again from its recorded config, parents and seed, and compare the results.

    The exit code is 1 when they differ; what differs in packages, code and device is listed.
    """
    with reported(debug):
        from flows.cli.reproduce import print_reproduction, reproduce

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        found = reproduce(ref, tracking, is_kept=keep, is_debug=debug)
        if as_json:
            print(found.model_dump_json(indent=2))
        else:
            print_reproduction(terminal(), found)
        if not found.is_equal:
            raise typer.Exit(FAILURE)


def _short(ref: str) -> str:
    """Return a reference with run ids cut as git cuts commits."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24}\b", r"\1", ref)


def print_comparison(console: Console, found: Comparison) -> None:
    """Print a table per kind of row."""
    for kept in found.tables:
        table = Table(title=kept.title, title_justify="left", box=SIMPLE)
        table.add_column("", overflow="fold")
        for run in found.runs:
            table.add_column(Text(_short(run.ref)), overflow="fold")
        for row in kept.rows:
            style = "yellow" if row.differs and kept.title in ("settings", "inputs") else None
            # What models and people named is text, not markup.
            table.add_row(Text(row.name), *(Text(cell) for cell in row.cells), style=style)
        console.print(table)
    if not any(table.title == "settings" for table in found.tables):
        console.print("All settings are the same.")


# What `rlhf lineage` prints: a tree, or a Mermaid diagram.

_FINGERPRINT_CHARS = 12
_PLAIN = " ._-/:@=+,"  # beside letters and digits


def print_lineage(console: Console, node: LineageNode) -> None:
    """Print the tree from an artefact to its raw sources, and the links that do not hold.

    What was deleted and made again is named, too.
    """
    for line in lineage_lines(node):
        say(console, line)
    remade = [found for found in node.walk() if found.status == "remade"]
    for style, told in (("yellow", remade), ("red", node.broken)):
        for found in told:
            say(console, f"{found.status}: {found.path or found.key}: {found.note}", style)


def lineage_lines(node: LineageNode) -> list[str]:
    """Return the tree as text; what is shown in full already is only named the second time."""
    lines: list[str] = []
    _grow(lines, node, node.stage or node.kind, ("", ""), set())
    return lines


def _grow(
    lines: list[str], node: LineageNode, name: str, indents: tuple[str, str], shown: set[str]
) -> None:
    """Add a node and all above it; ``indents`` are those of its first line and of the rest."""
    first, rest = indents
    head = f"{first}{name}: {node.kind} {node.fingerprint}"
    if node.status != "present":
        head += f" [{node.status}]"
    if node.key in shown and node.parents:
        lines.append(f"{head} (see above)")
        return
    shown.add(node.key)
    run = f"  (MLflow run {node.mlflow_run_id})" if node.mlflow_run_id else ""
    lines += [head, f"{rest}{'│ ' if node.parents else '  '}{node.path}{run}"]
    last = len(node.parents) - 1
    for index, (label, parent) in enumerate(node.parents.items()):
        is_last = index == last
        branch = ("└─ " if is_last else "├─ ", "   " if is_last else "│  ")
        _grow(lines, parent, label, (rest + branch[0], rest + branch[1]), shown)


def lineage_mermaid(tree: LineageNode) -> str:
    """Return a Mermaid flowchart, raw sources on top; broken links are red."""
    nodes = tree.walk()
    names = {node.key: f"n{index}" for index, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    for node in nodes:
        shape = '(["{}"])' if node.stage is None else '["{}"]'
        lines.append(f"    {names[node.key]}{shape.format(_label(node))}")
    for node in nodes:
        lines += [
            f"    {names[parent.key]} -->|{_text(label)}| {names[node.key]}"
            for label, parent in node.parents.items()
        ]
    broken = [names[node.key] for node in tree.broken]
    if broken:
        lines += [
            "    classDef broken stroke:#c00,stroke-width:3px,color:#c00",
            f"    class {','.join(broken)} broken",
        ]
    return "\n".join(lines)


def _label(node: LineageNode) -> str:
    title = node.stage or node.path.rpartition("/")[2] or node.kind
    lines = [title, f"{node.kind} {node.fingerprint[:_FINGERPRINT_CHARS]}"]
    if node.status != "present":
        lines.append(node.status)
    return "<br/>".join(_text(line) for line in lines)


def _text(text: str) -> str:
    """Return text in which nothing ends a Mermaid label or is HTML: odd characters as entities."""
    line = " ".join(text.split())
    return "".join(c if c.isalnum() or c in _PLAIN else f"#{ord(c)};" for c in line)
