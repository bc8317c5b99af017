"""Lineage as a Mermaid diagram, and `rlhf lineage`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.runs import lineage_mermaid
from tasks.artifacts import ParentRef, file_sha256
from tasks.tracking.lineage import LineageNode
from tasks.tracking.mlflow import Tracker


def _tree(raw_path: str = "/raw/pairs.jsonl") -> LineageNode:
    raw = LineageNode(kind="file", fingerprint="f0" * 32, path=raw_path, status="changed")
    data = LineageNode(
        kind="preference_dataset",
        stage="ingest",
        fingerprint="f1" * 32,
        path="/data",
        status="present",
        parents={"source": raw},
    )
    base = LineageNode(
        kind="policy_checkpoint",
        stage="sft",
        fingerprint="f2" * 32,
        path="/base",
        status="present",
        parents={"preferences": data},
    )
    return base.model_copy(
        update={"path": "/policy", "parents": {"base": base, "preferences": data}}
    )


def test_every_node_and_link_is_drawn_once() -> None:
    assert lineage_mermaid(_tree()).splitlines() == [
        "flowchart TD",
        '    n0["sft<br/>policy_checkpoint f2f2f2f2f2f2"]',
        '    n1["sft<br/>policy_checkpoint f2f2f2f2f2f2"]',
        '    n2["ingest<br/>preference_dataset f1f1f1f1f1f1"]',
        '    n3(["pairs.jsonl<br/>file f0f0f0f0f0f0<br/>changed"])',
        "    n1 -->|base| n0",
        "    n2 -->|preferences| n0",
        "    n2 -->|preferences| n1",
        "    n3 -->|source| n2",
        "    classDef broken stroke:#c00,stroke-width:3px,color:#c00",
        "    class n3 broken",
    ]


def test_names_cannot_end_a_label_or_be_html() -> None:
    text = lineage_mermaid(_tree('/raw/x"]; click n0 "javascript:alert(1)" <img src=x>#`|'))
    line = next(line for line in text.splitlines() if line.startswith("    n3("))
    label = line.removeprefix('    n3(["').removesuffix('"])').replace("<br/>", "")
    # What is left are letters, harmless signs, and entities of numbers.
    assert re.fullmatch(r"(?:[\w ./:@=+,-]|#\d+;)+", label), label


def test_command_prints_one_form_and_fails_for_a_broken_link(
    tracker: Tracker, make_artifact: Callable[..., Any], tmp_path: Path
) -> None:
    raw = tmp_path / "pairs.jsonl"
    raw.write_text("{}")
    source = ParentRef(kind="file", fingerprint=file_sha256(raw), path=str(raw))
    path = str(make_artifact("ingest", {"source": source}).path)
    run = CliRunner().invoke
    diagram = run(app, ["lineage", path, "--mermaid"])
    assert diagram.exit_code == 0
    assert diagram.stdout.startswith("flowchart TD\n")
    tree = json.loads(run(app, ["lineage", path, "--json", "--verify"]).stdout)
    assert (tree["status"], tree["parents"]["source"]["status"]) == ("verified", "verified")
    both = run(app, ["lineage", path, "--mermaid", "--json"])
    assert (both.exit_code, both.stdout) == (2, "")
    raw.write_text("{} ")
    broken = run(app, ["lineage", path])
    assert broken.exit_code == 1
    assert f"changed: {raw}: " in broken.stdout
