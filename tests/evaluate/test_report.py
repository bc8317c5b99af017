"""The page and the plot of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate.questions import ModelAnswer, Question
from tasks.evaluate.report import plot_radar, plot_scores, render_report

EVIL = '<script>alert("x")</script>\n\n# heading | cell'
ESCAPED = r'&lt;script&gt;alert("x")&lt;/script&gt; \# heading \| cell'


def _report(**extra: Any) -> dict[str, Any]:
    categories = {"math": -0.375, "coding": 0.5, "stem": None}
    scores = {"turn_1": 0.5, "turn_2": -1.25, "mean": -0.375, "categories": categories}
    scores |= {"coverage": 1.0, "truncated": 1, "interval": [-0.5, 0.25]}
    held_out = {"mean_score": 0.125, "win_rate_against_base": 0.75}
    return {
        "judge": "reward_model",
        "scale": "standard deviations",
        "questions": {"base": scores, "policy": scores},
        "held_out": {"base": held_out, "policy": held_out},
        **extra,
    }


def _page(n_questions: int = 1, **extra: Any) -> str:
    questions = [Question(i, "math", ("One?", "Two?")) for i in range(n_questions)]
    answers = {"policy": [ModelAnswer(0, "policy", (EVIL, "fine"), 0.0)]}
    return render_report(_report(**extra), questions, answers)


def test_what_models_wrote_is_escaped_and_stays_on_its_line() -> None:
    page = _page()
    assert "<script>" not in page
    assert f"- policy: {ESCAPED}\n" in page
    assert "- policy: fine\n" in page


def test_what_was_asked_is_escaped() -> None:
    question = Question(1, "<b>", (EVIL, "Two?"))
    page = render_report(_report(), [question], {})
    assert "<script>" not in page and "<b>" not in page
    assert f"**{ESCAPED}**" in page and "(&lt;b&gt;)" in page


def test_scores_stand_in_one_row_per_model() -> None:
    rows = [line for line in _page().splitlines() if line.startswith("| policy")]
    assert rows == ["| policy | 0.50 | -1.25 | -0.38 | 0.750 | 0.12 |"]


def test_oracle_is_shown_only_where_it_exists() -> None:
    assert "oracle" not in _page()
    page = _page(demo={"oracle_good_rate": {"base": 0.5, "policy": 0.875}})
    assert "Good answers by the oracle: base 0.500, policy 0.875" in page


def test_page_stays_short() -> None:
    assert _page(n_questions=80).count("## Question") == 6


def test_question_without_an_answer_is_shown_empty() -> None:
    assert "- policy: \n" in _page(n_questions=2)


def test_model_without_a_score_is_shown_without_a_number() -> None:
    report = _report(judge="gpt-<b>", scale="1 to 10")
    scores = {"turn_1": None, "turn_2": None, "mean": None, "categories": {"math": None}}
    report["questions"]["policy"] = scores | {"coverage": 0.0}
    del report["held_out"]["policy"]
    page = render_report(report, [], {})
    assert "| policy | - | - | - | - | - |" in page and "nan" not in page.lower()
    assert "policy 0.0%" in page and "# Evaluation by gpt-&lt;b&gt;" in page


def test_verdict_is_told() -> None:
    check = {"name": "min_score", "limit": 6.0, "value": None, "passed": False, "what": "mean"}
    page = _page(gate={"model": "student", "verdict": "failed", "checks": [check]})
    assert "Gate: student failed." in page and "- min_score: failed, - (mean), limit 6" in page


@pytest.mark.parametrize("plot", [plot_scores, plot_radar])
def test_plot_is_a_picture(tmp_path: Path, plot: Any) -> None:
    file = tmp_path / "scores.png"
    plot(_report(), file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.rstrip().endswith(b"IEND\xaeB`\x82")
    assert len(content) > 5000


def test_circle_needs_three_categories(tmp_path: Path) -> None:
    report = _report()
    del report["questions"]["base"]["categories"]["stem"]
    assert not plot_radar(report, tmp_path / "radar.png")
    assert not (tmp_path / "radar.png").exists()
