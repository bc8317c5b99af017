"""The comparison from measurements, by hand; the page, the table and the plot."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tasks.ablation.config import AblationConfig, MethodConfig
from tasks.ablation.report import (
    AblationReport,
    AblationRun,
    Measurement,
    Split,
    choose_setting,
    headline_of,
    read_ablation,
    render_page,
    report_of,
    result_rows,
    write_ablation,
)
from tasks.errors import TrainingError

CONFIG = AblationConfig(
    methods={
        "ppo": MethodConfig(grid=({"steps": 1}, {"steps": 2})),
        "topr": MethodConfig(overrides={"policy_loss": "topr"}, grid=({"steps": 1}, {"steps": 2})),
    },
    tuning_seeds=(0, 1),
    seeds=(3, 4, 5),
)


def _run(method: str, setting: int, seed: int, rate: float | None, kl: float = 0.1) -> AblationRun:
    split: Split = "validation" if seed < 3 else "test"
    run = AblationRun(method=method, setting=setting, seed=seed, split=split)
    if rate is None:
        return run.model_copy(update={"failure": "the loss | is not finite"})
    return run.model_copy(update={"figures": {"good_rate": rate, "kl_per_token": kl}})


def _measurement(scores: list[float], good_rate: float | None = None) -> Measurement:
    return Measurement(
        split="test",
        good_rate=good_rate,
        scores=scores,
        kl_per_token=0.2,
        kl_k3_per_token=0.3,
        entropy=1.5,
        length_tokens=8.0,
        ended_share=1.0,
    )


BASE = [_run("base", 0, seed, 0.5, kl=0.0) for seed in (3, 4, 5)]
TUNING = [
    *(_run("ppo", 0, seed, rate) for seed, rate in ((0, 0.9), (1, 0.7))),
    *(_run("ppo", 1, seed, rate) for seed, rate in ((0, 0.8), (1, 0.84))),
    *(_run("topr", 0, seed, rate) for seed, rate in ((0, 0.6), (1, 0.6))),
    *(_run("topr", 1, seed, rate) for seed, rate in ((0, 0.99), (1, None))),
]


def _report() -> AblationReport:
    final = [_run("ppo", 1, s, r, kl) for s, r, kl in ((3, 0.9, 0.1), (4, 0.8, 0.2), (5, 0.7, 0.3))]
    final += [_run("topr", 0, seed, rate) for seed, rate in ((3, 0.86), (4, 0.78), (5, None))]
    return report_of("trial", CONFIG, TUNING, final, BASE)


def test_win_rate_by_hand() -> None:
    # Higher, equal, lower, lower: (1 + 0.5 + 0 + 0) / 4.
    figures = _measurement([2.0, 1.0, 0.0, -1.0]).figures(_measurement([1.0, 1.0, 1.0, 1.0]))
    assert figures == {
        "win_rate": 0.375,
        "kl_per_token": 0.2,
        "entropy": 1.5,
        "length_tokens": 8.0,
    }
    assert _measurement([1.0], 0.25).figures(_measurement([1.0]))["good_rate"] == 0.25


def test_the_best_mean_over_tuning_seeds_is_chosen() -> None:
    # ppo: (0.9 + 0.7) / 2 = 0.80 against (0.8 + 0.84) / 2 = 0.82.
    assert choose_setting(TUNING[:4], "good_rate") == 1
    # topr's second setting failed on one seed, however good it was on the other.
    assert choose_setting(TUNING[4:], "good_rate") == 0
    # Equal rates: the lower KL.
    tied = [_run("ppo", 0, 0, 0.8, kl=0.3), _run("ppo", 1, 0, 0.8, kl=0.1)]
    assert choose_setting(tied, "good_rate") == 1
    assert choose_setting([_run("ppo", 0, 0, None)], "good_rate") is None


def test_figures_and_difference_by_hand() -> None:
    ppo, topr = _report().methods
    assert (ppo.setting, topr.setting) == (1, 0)
    # 0.9, 0.8, 0.7: mean 0.8, s = 0.1.
    assert ppo.figures["good_rate"].mean == pytest.approx(0.8)
    assert ppo.figures["good_rate"].standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert ppo.figures["kl_per_token"].mean == pytest.approx(0.2)
    assert ppo.difference is None
    # Seeds 3 and 4: 0.86 - 0.9 = -0.04 and 0.78 - 0.8 = -0.02; mean -0.03, error 0.02 / 2.
    assert topr.difference is not None
    assert topr.difference.mean == pytest.approx(-0.03)
    assert topr.difference.standard_error == pytest.approx(0.01)
    assert topr.difference.n == topr.figures["good_rate"].n == 2
    assert [(run.setting, run.seed) for run in topr.failures] == [(1, 1), (0, 5)]


def test_headline_is_the_oracle_where_there_is_one() -> None:
    assert headline_of(TUNING) == "good_rate"
    run = AblationRun(method="ppo", setting=0, seed=0, split="validation", figures={"win_rate": 1})
    assert headline_of([_run("ppo", 0, 0, None), run]) == "win_rate"
    with pytest.raises(TrainingError, match="None of 1 runs"):
        headline_of([_run("ppo", 0, 0, None)])


def test_table_says_what_was_found() -> None:
    ppo, topr, base = result_rows(_report())
    assert ppo["good answers"] == "0.800 +- 0.058"
    assert (ppo["less ppo"], topr["less ppo"]) == ("", "-0.030 +- 0.010")
    assert (ppo["seeds"], topr["seeds"]) == ("3 of 3", "2 of 3")
    assert ppo["chosen setting"] == "steps=2 (2 of 2)"
    assert (base["method"], base["good answers"]) == ("base", "0.500 +- 0.000")
    assert list(ppo) == list(topr) == list(base)


def test_names_of_settings_are_shortened_unless_they_become_the_same() -> None:
    result = _report().methods[0]
    rate, other = "optimizer.learning_rate", "critic.optimizer.learning_rate"
    shown = []
    for setting in ({rate: 0.1}, {rate: 0.1, other: 0.2}):
        method = result.model_copy(update={"grid": [{}, setting]})
        report = _report().model_copy(update={"methods": [method]})
        shown.append(result_rows(report)[0]["chosen setting"])
    assert shown == ["learning_rate=0.1 (2 of 2)", f"{rate}=0.1, {other}=0.2 (2 of 2)"]


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    report = _report()
    files = write_ablation(report, tmp_path / "out")
    assert [file.name for file in files] == ["ablation.json", "ablation.md", "ablation.png"]
    assert read_ablation(tmp_path / "out") == report
    assert files[2].read_bytes().startswith(b"\x89PNG")
    page = files[1].read_text()
    assert page == render_page(report)
    for part in ("by the demo's oracle", "seeds 3, 4, 5", "topr, setting 2, seed 1 (validation)"):
        assert part in page
    assert "the loss \\| is not finite" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert len(tables) == (2 + 3) + (2 + len(TUNING))


def test_a_method_that_never_trained_is_in_the_table(tmp_path: Path) -> None:
    tuning = [*TUNING[:4], *(_run("topr", setting, 0, None) for setting in (0, 1))]
    final = [_run("ppo", 1, seed, 0.8) for seed in (3, 4, 5)]
    report = report_of("trial", CONFIG, tuning, final, BASE)
    row = result_rows(report)[1]
    assert (row["good answers"], row["less ppo"], row["seeds"]) == ("", "", "0 of 3")
    assert row["chosen setting"] == "none trained"
    write_ablation(report, tmp_path)
