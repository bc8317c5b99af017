"""Model cards and the report of a student."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.algorithms.statistics import Bootstrap, clustered_mean
from tasks.artifacts import ParentRef, read_manifest
from tasks.distill.config import ModelCardConfig
from tasks.distill.report import (
    BASE,
    STUDENT,
    TEACHER,
    Agreement,
    CardFacts,
    ModelFigures,
    StudentReport,
    base_name,
    data_names,
    licenses_of,
    lineage_rows,
    render_student_card,
    write_cards,
    write_student_report,
)
from tasks.report.pairs import ResponsePair, compare_pairs


def _facts(**changes: Any) -> CardFacts:
    known: dict[str, Any] = {
        "base": "owner/name",
        "base_license": "apache-2.0",
        "data": ["Anthropic/hh-rlhf", "pairs.jsonl"],
        "data_license": "mit",
        "license": "cc-by-4.0",
        "teacher": "offline_ppo 0123",
        "settings": {"data": "teacher", "loss": "forward_kl"},
        "lineage": [("student", "student_adapter", "aa", "run1"), ("policy", "x", "bb", "")],
        "metrics": {"teacher_same_top": 0.9876},
    }
    return CardFacts(**(known | changes))


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_front_matter_is_what_the_hub_reads(form: Any) -> None:
    card = render_student_card(_facts(), form)
    _, head, body = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["base_model"] == "owner/name" and fields["license"] == "cc-by-4.0"
    assert fields["library_name"] == {"adapter": "peft", "merged": "transformers"}[form]
    assert fields["base_model_relation"] == {"adapter": "adapter", "merged": "finetune"}[form]
    # A file is no data set of the hub.
    assert fields["datasets"] == ["Anthropic/hh-rlhf"]
    for text in ("apache-2.0", "mit", "0.9876", "run1", "bb", "pairs.jsonl"):
        assert text in body


def test_what_nobody_says_is_unknown(tmp_path: Path) -> None:
    assert set(licenses_of(ModelCardConfig(), tmp_path).values()) == {"unknown"}
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: 'apache-2.0'\n---\n# Base\n")
    found = licenses_of(ModelCardConfig(license="mit"), tmp_path)
    assert found == {"license": "mit", "base_license": "apache-2.0", "data_license": "unknown"}
    head = yaml.safe_load(render_student_card(_facts(license="unknown"), "merged").split("---")[1])
    assert (head["license"], head["license_name"]) == ("other", "unknown")


def test_names_cannot_break_the_card(tmp_path: Path) -> None:
    facts = _facts(base='a"b: c\n---\n<b>', data=["x|y", "<script>"], metrics={"a_b": 1.0})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "README.md").write_text("what peft wrote")
    write_cards(facts, {"adapter": tmp_path / "adapter"})
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == facts.base
    assert "<script>" not in card and "<b>" not in card.split("---\n", 2)[2]


def test_lineage_reaches_the_raw_files(make_artifact: Callable[..., Any]) -> None:
    raw = ParentRef(kind="file", fingerprint="f" * 64, path="/data/pairs.jsonl")
    preferences = make_artifact("ingest", {"source": raw}, run_id="run-ingest")
    hub = ParentRef(kind="model", fingerprint="e" * 64, path="owner/name")
    base = make_artifact("sft", {"preferences": preferences, "model": hub})
    policy = make_artifact("offline_ppo", {"preferences": preferences, "base": base})
    parents = {"policy": policy.as_parent(), "base": base.as_parent()}
    rows = lineage_rows(parents)
    assert [row[0] for row in rows] == ["policy", "base", "preferences", "model", "source"]
    assert rows[2] == (
        "preferences",
        "preference_dataset",
        preferences.fingerprint[:16],
        "run-ingest",
    )
    assert base_name(read_manifest(base.path), None) == "owner/name"
    assert base_name(read_manifest(preferences.path), None).startswith("built by stage ingest")
    local = ParentRef(kind="model", fingerprint="d" * 64, path="/models/mine")
    assert base_name(read_manifest(base.path), local) == "mine"
    assert data_names(read_manifest(preferences.path)) == ["pairs.jsonl"]


def _pairs(scores: list[tuple[float, float]]) -> list[ResponsePair]:
    return [
        ResponsePair(str(i), "prompt", "theirs", "ours", theirs, ours, 3 + i, 4)
        for i, (ours, theirs) in enumerate(scores)
    ]


def test_report_by_hand(tmp_path: Path) -> None:
    # Won, lost, tied, won: (2 + 0.5) / 4.
    scores = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (2.0, 1.0)]
    held_out = compare_pairs(_pairs(scores), "the reward model", Bootstrap())
    figures = {
        name: ModelFigures(1000, 2**20, [s[0] for s in scores], 4.0, 2.0, 16, 3.5)
        for name in (STUDENT, TEACHER, BASE)
    }
    agreement = Agreement(clustered_mean([0.1, 0.3]), 64, False, 0.75)
    history = [(5, {"kl": 0.4, "hard": 2.0}), (10, {"kl": 0.2, "hard": 1.5})]
    report = StudentReport(
        figures, agreement, {BASE: held_out, TEACHER: held_out}, 100, 2**18, history
    )
    metrics = report.metrics()
    assert metrics["win_rate_against_teacher"] == pytest.approx(0.625)
    assert metrics["teacher_kl_per_token"] == pytest.approx(0.2)
    # 16 tokens in 2 seconds; the mean of 1, 0, 0.5 and 2.
    assert metrics["student_tokens_per_second"] == 8.0 and metrics["base_score"] == 0.875
    files = write_student_report(report, tmp_path)
    assert all(file.stat().st_size for file in files)
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["models"]["student"]["tokens_per_second"] == 8.0
    assert record["agreement"]["labels"] == 64
    page = (tmp_path / "report.md").read_text()
    for text in ("75.0% of the positions", "at least: 64 tokens", "62.5%", "100 of them in the"):
        assert text in page
