"""`rlhf score-judgments` on files that others made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.score_judgments import print_judgments, score_judgments
from tasks.errors import DataError, MissingInputError

SharedCases = Callable[[str], list[dict[str, Any]]]

PUBLISHED = {
    "mamba_0_5_dpo_ep3": (7.7375, 6.8875, 7.3125),
    "mamba_0_5_dpo_ep1": (7.59375, 6.65, 7.121875),
    "mamba_0_75_dpo_ep1": (7.41875, 6.65, 7.034375),
    "mamba_0_75_dpo_ep3": (7.19375, 5.96875, 6.58125),
    "mamba_0_875_dpo_ep1": (6.95625, 5.81875, 6.3875),
    "mamba_0_875_dpo_ep3": (6.93125, 5.80625, 6.36875),
}


@pytest.fixture
def real_file(shared_data: Path) -> Path:
    return shared_data / "mt_bench" / "judgments_mamba" / "gpt-4_single.jsonl"


def _row(question: int, score: float, turn: int = 1, **more: Any) -> dict[str, Any]:
    row = {"question_id": question, "model": "m", "turn": turn, "score": score}
    return {**row, "judge": ["gpt-4", "single-v1"], "judgment": "", "tstamp": 1.0, **more}


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "found", "fix"),
    [
        ({"question_id": 1, "category": "math", "turns": ["", ""]}, "is a question", "_single"),
        ({"question_id": 1, "model_id": "m", "choices": []}, "is an answer", "_single.jsonl"),
        ({"question_id": 1, "model": "m"}, "no field 'judge'", '"judge": ["gpt-4", "single-v1"]'),
        ({"question_id": 1, "g1_winner": "tie"}, "no field", '"g2_winner": "tie"'),
    ],
)
def test_other_files_get_the_form_of_judgments(
    tmp_path: Path, row: dict[str, Any], found: str, fix: str
) -> None:
    with pytest.raises(DataError, match=found) as caught:
        score_judgments([_write(tmp_path / "file.jsonl", row)])
    assert fix in caught.value.fix and '"category"' not in caught.value.fix


def test_all_published_numbers_exactly(real_file: Path) -> None:
    found = score_judgments([real_file])
    assert [row.model for row in found.rows] == list(PUBLISHED)
    for row in found.rows:
        assert row.mean is not None
        assert (row.turns[1], row.turns[2], row.mean.value) == PUBLISHED[row.model]
        assert row.mean.low < row.mean.value < row.mean.high
        assert (row.valid, row.failed) == (160, 0)


def test_command_prints_the_published_numbers(real_file: Path) -> None:
    result = CliRunner().invoke(app, ["score-judgments", str(real_file)])
    assert result.exit_code == 0, result.output
    for model, figures in PUBLISHED.items():
        line = next(line for line in result.output.splitlines() if model in line)
        for figure in figures:
            assert f"{figure:.6f}" in line


def test_ratings_in_the_texts_are_the_stored_ones(real_file: Path) -> None:
    found = score_judgments([real_file], reparse=True)
    again = {
        row.model: (row.turns[1], row.turns[2], row.mean.value) for row in found.rows if row.mean
    }
    assert again == PUBLISHED and found.differing == 0


def test_categories_and_differences(real_file: Path, shared_data: Path) -> None:
    questions = shared_data / "mt_bench" / "question.jsonl"
    baseline = "mamba_0_875_dpo_ep3"
    found = score_judgments([real_file], questions, baseline)
    categories = found.rows[0].categories
    # Ten questions a category: the mean of the eight is the whole.
    assert len(categories) == 8
    known = [value for value in categories.values() if value is not None]
    assert sum(known) / 8 == pytest.approx(7.3125)
    best = next(row for row in found.differences if row.model == "mamba_0_5_dpo_ep3")
    # 7.3125 - 6.36875
    assert best.difference.value == pytest.approx(0.94375) and best.n == 160
    assert best.difference.low > 0


def test_template_counts_of_a_real_file(real_file: Path, shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("mt_bench") if case["id"] == "MTB-07")
    rows = [json.loads(line) for line in real_file.read_text().splitlines()]
    for name, count in case["expected"]["counts_of_160"].items():
        assert sum(row["judge"][1] == name for row in rows) == count * len(PUBLISHED)


def test_rerun_replaces_and_failures_are_no_numbers(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "a.jsonl",
        _row(1, 3, tstamp=1.0),
        _row(1, 9, tstamp=2.0, judge=["gpt-4", "single-math-v1"]),
        _row(1, -1, turn=2),
        _row(2, 80),
        _row(3, 0),
        _row(4, 5, turn=2),
    )
    found = score_judgments([path])
    (row,) = found.rows
    assert found.replaced == 1
    # 9 replaced 3; -1, 80 and 0 are no ratings.
    assert row.turns == {1: 9.0, 2: 5.0} and row.mean is not None and row.mean.value == 7.0
    assert (row.valid, row.failed, row.coverage) == (2, 3, 0.4)


def test_text_that_says_otherwise_is_counted(tmp_path: Path) -> None:
    wrong = _row(1, 3, judgment="[[3]] would be too harsh. Rating: [[7]]")
    path = _write(tmp_path / "a.jsonl", wrong, _row(2, 5, judgment="Rating: [[5]]"))
    found = score_judgments([path])
    assert found.differing == 1 and found.rows[0].turns == {1: 4.0}
    assert score_judgments([path], reparse=True).rows[0].turns == {1: 6.0}


def test_judge_that_refused_everything_has_no_score(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", *[_row(q, -1, judgment="I cannot.") for q in range(5)])
    result = CliRunner().invoke(app, ["score-judgments", str(path), "--json"])
    assert result.exit_code == 0
    (row,) = json.loads(result.output)["leaderboard"]
    assert (row["mean"], row["turn_1"], row["coverage"], row["failed"]) == (None, None, 0.0, 5)
    shown = CliRunner().invoke(app, ["score-judgments", str(path)]).output
    assert "nan" not in shown.lower() and "0.00%" in shown


def test_pairs_and_annotations_together(tmp_path: Path, capsys: Any) -> None:
    pair = {"question_id": 1, "model_1": "x", "model_2": "y", "turn": 1, "judge": ["j", "p"]}
    games = _write(
        tmp_path / "pair.jsonl",
        {**pair, "g1_winner": "model_1", "g2_winner": "model_1"},
        {**pair, "question_id": 2, "g1_winner": "model_1", "g2_winner": "model_2"},
    )
    annotations = tmp_path / "annotations.json"
    annotations.write_text(json.dumps([{"preference": 2}, {"preference": 1}]))
    found = score_judgments([games, annotations])
    assert [(p.model, p.rate.adjusted) for p in found.pairs if p.rate] == [("x", 0.75), ("y", 0.25)]
    assert found.annotations[0].win_rate == 0.5
    print_judgments(Console(), found)
    # The standard error of 0 and 1: sqrt(0.5 / 2).
    shown = capsys.readouterr().out
    assert "50.00" in shown and "0.7500" in shown
    assert found.as_json()["pairwise"][0]["win_rate"] == 0.5


def test_unknown_baseline_of_pairs_and_annotations_is_named(tmp_path: Path) -> None:
    pair = {"question_id": 1, "model_1": "x", "model_2": "y", "turn": 1, "judge": ["j", "p"]}
    games = _write(tmp_path / "pair.jsonl", {**pair, "g1_winner": "tie", "g2_winner": "tie"})
    annotations = tmp_path / "annotations.json"
    annotations.write_text(json.dumps([{"preference": 2, "generator_1": "a", "generator_2": "b"}]))
    for files in ([games], [games, annotations], [annotations]):
        known = score_judgments(files).as_json()
        with pytest.raises(DataError, match="No judgment of the baseline 'zzz'"):
            score_judgments(files, baseline="zzz")
        name = known["pairwise"][0]["model"] if games in files else known["annotations"][0]["model"]
        assert score_judgments(files, baseline=name).as_json() == known


def test_bad_input_is_named(tmp_path: Path, shared_data: Path) -> None:
    path = _write(tmp_path / "a.jsonl", _row(1, 5))
    with pytest.raises(MissingInputError, match=r"absent\.jsonl is not a file.*judgments"):
        score_judgments([tmp_path / "absent.jsonl"])
    with pytest.raises(DataError, match="No judgment of the baseline 'x'"):
        score_judgments([path], baseline="x")
    questions = shared_data / "mt_bench" / "question.jsonl"
    with pytest.raises(DataError, match=r"1 judged questions are not in .*\[1\]"):
        score_judgments([path], questions)
    path.write_text('{"question_id": 1}')
    result = CliRunner().invoke(app, ["score-judgments", str(path)])
    assert result.exit_code == 2


def test_command_loads_neither_torch_nor_prefect(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", _row(1, 5))
    code = (
        "import sys; from flows.cli.score_judgments import *; from pathlib import Path; "
        f"score_judgments([Path({str(path)!r})]); "
        "print([m for m in ('torch', 'prefect', 'mlflow', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
