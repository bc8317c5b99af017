"""What counts as the same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.cli.reproduce import Reproduction, compare_figures, compare_files, differences
from tasks.artifacts import FileEntry, Manifest, file_sha256


def _artefact(directory: Path, files: dict[str, str], **metrics: float) -> Manifest:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    entries = {
        name: FileEntry(bytes=len(text), sha256=file_sha256(directory / name))
        for name, text in files.items()
    }
    return Manifest(
        kind="eval_report",
        schema_version=1,
        stage="evaluate",
        fingerprint="f",
        created_at="now",
        config={},
        parents={},
        counts={"rows": 3},
        metrics=metrics,
        renderer_fingerprint=None,
        package_versions={},
        git_commit=None,
        mlflow_run_id=f"run-{directory.name}",
        prefect_flow_run_id=None,
        files=entries,
    )


def _lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_status_of_every_file(tmp_path: Path) -> None:
    ours = {
        "same.bin": "a",
        "other.bin": "a",
        "gone.bin": "a",
        "times.jsonl": _lines({"x": 1, "tstamp": 1.0}, {"y": [{"tstamp": 2.0, "z": 1}]}),
        "answers.jsonl": _lines({"x": 1, "tstamp": 1.0}),
        "report.json": _lines(
            {"said": ["It won.", "3 tokens a second."], "a_tokens_per_second": 3}
        ),
        "lost.json": _lines({"said": ["It won.", "3 tokens a second."], "a_tokens": 3}),
        "report.md": "| a | 1 |\n| tokens\\_per\\_second | 5 |\n",
        "page.md": "| time\\_share\\_other | 5 |\n| a | 1 |\n",
        "card.md": "| run-a |\n",
        "parent.md": "| run-c |\n",
    }
    theirs = {
        "same.bin": "a",
        "other.bin": "b",
        "new.bin": "a",
        "times.jsonl": _lines({"x": 1, "tstamp": 9.0}, {"y": [{"tstamp": 8.0, "z": 1}]}),
        "answers.jsonl": _lines({"x": 2, "tstamp": 9.0}),
        "report.json": _lines(
            {"said": ["It won.", "4 tokens a second."], "a_tokens_per_second": 4}
        ),
        "lost.json": _lines({"said": ["It lost.", "4 tokens a second."], "a_tokens": 3}),
        "report.md": "| a | 1 |\n| tokens\\_per\\_second | 6 |\n",
        "page.md": "| time\\_share\\_other | 6 |\n| a | 2 |\n",
        "card.md": "| run-b |\n",
        "parent.md": "| run-d |\n",
    }
    first, repeat = (
        _artefact(tmp_path / name, files) for name, files in (("a", ours), ("b", theirs))
    )
    found = compare_files(first, repeat, tmp_path / "a", tmp_path / "b")
    assert found == {
        "same.bin": "equal",
        "other.bin": "different",
        "gone.bin": "missing",
        "new.bin": "new",
        "times.jsonl": "equal but for times",
        "answers.jsonl": "different",
        "report.json": "equal but for times",
        "lost.json": "different",
        "report.md": "equal but for times",
        "page.md": "different",
        # A page names the run that it is of; another upstream run is a difference.
        "card.md": "equal but for times",
        "parent.md": "different",
    }
    # Without the first artefact's files the hashes have to do.
    blind = compare_files(first, repeat, tmp_path / "gone", tmp_path / "b")
    assert blind["times.jsonl"] == "different"


def test_figures_are_compared_to_the_last_bit(tmp_path: Path) -> None:
    speeds = {"tokens_per_second": 1.0, "base_tokens_per_second": 1.0}
    first = _artefact(tmp_path / "a", {}, accuracy=0.1 + 0.2, loss=1.0, **speeds)
    speeds = {"tokens_per_second": 2.0, "base_tokens_per_second": 2.0}
    repeat = _artefact(tmp_path / "b", {}, accuracy=0.3, loss=1.0, **speeds)
    (found,) = compare_figures(first, repeat)
    assert (found.name, found.first, found.repeat) == ("accuracy", "0.30000000000000004", "0.3")


def test_differences_name_what_only_one_side_has() -> None:
    found = differences(
        {"torch": "2.13", "ray": "2.60"}, {"torch": "2.14", "ray": "2.60", "x": "1"}
    )
    assert [(d.name, d.first, d.repeat) for d in found] == [
        ("torch", "2.13", "2.14"),
        ("x", "unknown", "1"),
    ]


def _reproduction(files: dict[str, Any], metrics: list[Any]) -> Reproduction:
    return Reproduction(
        run_id="r",
        stage="sft",
        repeat_run_id=None,
        repeat_path=None,
        files=files,
        metrics=metrics,
        environment=differences({"torch": "1"}, {"torch": "2"}),
    )


def test_equal_is_every_file_and_every_figure() -> None:
    assert _reproduction({"a": "equal", "b": "equal but for times"}, []).is_equal
    assert not _reproduction({"a": "equal", "b": "new"}, []).is_equal
    assert not _reproduction({"a": "different"}, []).is_equal
    assert not _reproduction({"a": "equal"}, differences({"x": "1"}, {"x": "2"})).is_equal
