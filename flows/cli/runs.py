"""Commands about runs that are done: lineage, compare, promote, rollback, reproduce."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.shared import FAILURE as _FAILURE
from flows.cli.shared import AsJson, Debug, Experiment, TrackingUri, terminal
from tasks.errors import ConfigError, WorkspaceError
from tasks.pipeline_config import STAGES, TrackingConfig
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.tracking.comparison import Comparison
    from tasks.tracking.lineage import LineageNode

_STAGE_LIST = ", ".join(STAGES)

Why = Annotated[str, typer.Option(help="The reason; it becomes a tag of the version.")]

# Turns errors into one message and an exit code; given whether to show tracebacks.
Reported = Callable[[bool], AbstractContextManager[None]]


def add_run_commands(app: typer.Typer, reported: Reported) -> None:
    """Add the commands to the program."""
    _add_lineage(app, reported)
    _add_compare(app, reported)
    _add_promotion(app, reported)
    _add_reproduce(app, reported)


def _add_lineage(app: typer.Typer, reported: Reported) -> None:
    @app.command("lineage")
    def lineage_command(
        ref: Annotated[
            str,
            typer.Argument(
                help="A path, `runs:/<id>`, `models:/<name>@<alias>`, `models:/<name>/<version>`, "
                f"latest, or a stage: {_STAGE_LIST}."
            ),
        ],
        as_json: AsJson = False,
        as_mermaid: Annotated[
            bool, typer.Option("--mermaid", help="Print a Mermaid diagram.")
        ] = False,
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
            from tasks.tracking.mlflow import connect

            if as_json and as_mermaid:
                raise ConfigError("--json and --mermaid were both given", "one", "remove one")
            workspace = Workspace.from_environment()
            workspace.prepare()
            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            tree = lineage_tree(connect(tracking, workspace), ref, is_deep=verify)
            if as_json:
                print(tree.model_dump_json(indent=2))
            elif as_mermaid:
                print(lineage_mermaid(tree))
            else:
                print_lineage(terminal(), tree)
            if tree.broken:
                raise typer.Exit(_FAILURE)


def _add_compare(app: typer.Typer, reported: Reported) -> None:
    @app.command("compare")
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
            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            found = run_compare(CompareRequest(tuple(refs or ()), tracking, show_all, html))
            if as_json:
                print(json.dumps(comparison_json(found), indent=2, allow_nan=False))
            else:
                print_comparison(terminal(), found)


def _add_promotion(app: typer.Typer, reported: Reported) -> None:
    @app.command("promote")
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

    @app.command("rollback")
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


def _add_reproduce(app: typer.Typer, reported: Reported) -> None:
    @app.command("reproduce")
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
            from flows.cli.reproduce import ReproduceRequest, print_reproduction, reproduce

            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            found = reproduce(ReproduceRequest(ref, tracking, keep, debug))
            if as_json:
                print(found.model_dump_json(indent=2))
            else:
                print_reproduction(terminal(), found)
            if not found.is_equal:
                raise typer.Exit(_FAILURE)


# What `rlhf compare` does: runs side by side, in the terminal, as a page or as JSON.


@dataclass(frozen=True)
class CompareRequest:
    """One invocation.

    Args:
        refs: the runs; none stands for the two newest finished chains.
        is_complete: show what is the same in all runs, too.
        page: file to write.
    """

    refs: tuple[str, ...]
    tracking: TrackingConfig
    is_complete: bool = False
    page: Path | None = None


def run_compare(request: CompareRequest) -> Comparison:
    """Compare, and write the page if one is wanted.

    Raises:
        RlhfError: a reference with nothing behind it, or a page that cannot be written.
    """
    # Not at the top: mlflow takes seconds to import, and every command imports this file.
    from tasks.tracking.comparison import compare_runs, newest_chains, render_comparison
    from tasks.tracking.mlflow import connect

    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(request.tracking, workspace)
    refs = request.refs or tuple(newest_chains(tracker))
    found = compare_runs(
        tracker, refs, is_complete=request.is_complete, has_curves=request.page is not None
    )
    if request.page is not None:
        _write(request.page, render_comparison(comparison_json(found)))
    return found


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, and of each row whether the runs differ in it."""
    plain = found.model_dump(mode="json")
    for table, kept in zip(plain["tables"], found.tables, strict=True):
        for row, known in zip(table["rows"], kept.rows, strict=True):
            row["differs"] = known.differs
    return plain


def _write(path: Path, text: str) -> None:
    target = Path(os.path.expanduser(path)).absolute()
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".compare-")
        temporary = Path(name)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise WorkspaceError(
            f"{path} cannot be written: {error.strerror}", "a writable directory", "name another"
        ) from error


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
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    remade = [found for found in node.walk() if found.status == "remade"]
    for style, told in (("yellow", remade), ("red", node.broken)):
        for found in told:
            console.print(
                f"{found.status}: {found.path or found.key}: {found.note}",
                style=style,
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


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
