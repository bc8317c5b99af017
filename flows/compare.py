"""What `rlhf compare` does: runs side by side, in the terminal, as a page or as JSON."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.comparison import Comparison, compare_runs, newest_chains
from tasks.config import TrackingConfig
from tasks.data.compare_page import render_comparison
from tasks.errors import WorkspaceError
from tasks.tracking import connect
from tasks.workspace import Workspace


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
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(request.tracking, workspace)
    refs = request.refs or tuple(newest_chains(tracker))
    found = compare_runs(
        tracker, refs, is_complete=request.is_complete, has_curves=request.page is not None
    )
    if request.page is not None:
        _write(request.page, render_comparison(as_json(found)))
    return found


def as_json(found: Comparison) -> dict[str, Any]:
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
