"""AlpacaEval's two file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import DataError, MissingInputError
from tasks.evaluate.judgments import is_annotations, score_annotations, write_model_outputs


def _write(path: Path, preferences: list[Any]) -> Path:
    rows = [{"generator_1": "base", "generator_2": "ours", "preference": p} for p in preferences]
    path.write_text(json.dumps(rows))
    return path


def test_win_rate_and_standard_error_by_hand(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.json", [1, 2, 2, 1.5, None, 0, float("nan")])
    (score,) = score_annotations(path)
    # Of 0, 1, 1, 0.5, 0.5 (an early file's 0 is a draw): 3 / 5. Sum of squared deviations
    # 0.36 + 0.16 + 0.16 + 0.01 + 0.01 = 0.7; sqrt(0.7 / 4 / 5).
    assert score.win_rate == pytest.approx(0.6)
    assert score.standard_error == pytest.approx((0.7 / 20) ** 0.5)
    assert (score.wins, score.draws, score.losses, score.failed) == (2, 2, 1, 2)
    assert (score.model, score.baseline) == ("ours", "base")


def test_soft_preferences_and_models_apart(tmp_path: Path) -> None:
    rows = [
        {"generator_1": "b", "generator_2": "x", "preference": 1.25},
        {"generator_1": "b", "generator_2": "y", "preference": 1.75},
        {"generator_1": "b", "generator_2": "z", "preference": None},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    found = score_annotations(path)
    assert [(score.model, score.win_rate) for score in found] == [
        ("y", 0.75),
        ("x", 0.25),
        ("z", None),
    ]


@pytest.mark.parametrize("preference", [3, 0.5, -1, "2", True])
def test_bad_preference_names_its_row(tmp_path: Path, preference: Any) -> None:
    path = _write(tmp_path / "a.json", [1, preference])
    with pytest.raises(DataError, match=r"a\.json, row 2: preference is"):
        score_annotations(path)


def test_files_that_are_no_annotations(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, found in (("[]", "no annotations"), ("[1]", "row 1: no field"), ("[", "not JSON")):
        path.write_text(content)
        with pytest.raises(DataError, match=found):
            score_annotations(path)
    with pytest.raises(MissingInputError):
        score_annotations(tmp_path / "absent.json")
    assert not is_annotations(tmp_path / "absent.json")
    path.write_text("\n [1]")
    assert is_annotations(path)


def test_export(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    write_model_outputs(path, ["q"], ["ü"], "ours", "hh")
    assert json.loads(path.read_text()) == [
        {"instruction": "q", "output": "ü", "generator": "ours", "dataset": "hh"}
    ]
    with pytest.raises(DataError, match="cannot hold a text"):
        write_model_outputs(path, ["q"], ["\ud800"], "ours", "hh")
