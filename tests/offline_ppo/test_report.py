"""The policy's report: verdicts by hand, samples, tables, pages and plots."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tasks.algorithms.kl import ProbeKL, kl_probe_estimate
from tasks.algorithms.statistics import Bootstrap
from tasks.data.hh import Message
from tasks.data.history import History, read_history
from tasks.errors import DataError, TrainingError
from tasks.offline_ppo.report import (
    GuardEvent,
    PolicyReport,
    render_policy_report,
    summarize_metrics,
    summarize_policy,
    summarize_weights,
    write_policy_report,
)
from tasks.report.pairs import (
    RESPONSE_PAIR_SCHEMA,
    ResponsePair,
    compare_pairs,
    pick_samples,
    prompt_text,
    render_samples,
    sample_rows,
    write_sample_table,
)

JUDGE = "the reward model that it was trained on"
FEW = Bootstrap(replicates=200)
KEYS = {
    *("schema_version", "verdict", "summary", "judge", "last_step", "n_prompts", "n_pairs"),
    *("win_rate", "length_controlled_win_rate", "score_difference", "length_difference_tokens"),
    *("subsets", "kl_probe", "kl_bound", "guard_events", "metrics", "weights", "facts", "samples"),
}
PLOTS = {"reward", "kl", "effective_sample_size", "weights", "logprob_drift", "schedule"}
NASTY = "![x](http://a.example/p.png) <script>\n```\n# Not a heading\n````\n\x1b[31m\ud800"


def _pair(number: int, difference: float, extra_tokens: int = 0, **changes: Any) -> ResponsePair:
    made: dict[str, Any] = {
        "prompt_id": f"p{number:03d}",
        "prompt": f"Question {number}?",
        "base_response": "short",
        "policy_response": "better",
        "base_score": 0.0,
        "policy_score": difference,
        "base_tokens": 20,
        "policy_tokens": 20 + extra_tokens,
    }
    return ResponsePair(**(made | changes))


def _pairs(n_won: int, n_lost: int, won_extra: int = 0, lost_extra: int = 0) -> list[ResponsePair]:
    """Lengths differ by the given number and one more, in turn."""
    won = [_pair(i, 1.0, won_extra + i % 2) for i in range(n_won)]
    lost = [_pair(n_won + i, -1.0, lost_extra + i % 2) for i in range(n_lost)]
    return won + lost


def _history(n_steps: int = 60) -> History:
    drawn = random.Random(0)
    history: History = []
    for step in range(1, n_steps + 1):
        metrics = {
            "reward_mean": drawn.gauss(0, 1),
            "kl_data": step / 1000,
            "ess_share": 0.8,
            "ess_share_raw": 0.5,
            "chosen_logprob_drift": step / 10,
            "rejected_logprob_drift": -step / 5,
            "learning_rate": 1e-4,
            "batch_prompts": 16.0,
        }
        if step % 10 == 0:
            metrics |= {"probe_reward": step / 50, "kl_probe": step / 500}
        history.append((step, metrics))
    return history


EVENT = GuardEvent(30, "kl_probe", "0.12 > 0.1: rolled back to step 20", ((20, 0.04), (30, 0.12)))


def _kl(value: float) -> ProbeKL:
    mask = torch.ones(2, 2, dtype=torch.bool)
    # Means of the two responses are 0.75 and 1.25 of the value.
    logprobs = value * torch.tensor([[0.75, 0.75], [1.25, 1.25]])
    return kl_probe_estimate(logprobs, torch.zeros(2, 2), mask)


def _report(pairs: list[ResponsePair] | None = None, **changes: Any) -> PolicyReport:
    report = PolicyReport(
        compare_pairs(pairs or _pairs(70, 30), JUDGE, FEW, changes.pop("kl", None)),
        history=_history(),
        events=[EVENT],
        final_weights=torch.tensor([0.5, 1.0, 2.0, 2.0]),
        bounds={"kl_probe": 0.1},
        facts={"good_rate": 0.9},
    )
    return replace(report, **changes)


# --- verdict


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        (_pairs(70, 30), "better"),
        (_pairs(30, 70), "worse"),
        (_pairs(52, 48), "undecided"),
        # All longer ones win, all shorter ones lose: one border divides them.
        (_pairs(70, 30, won_extra=5, lost_extra=-5), "better_length_unknown"),
        # Of equal length are 35 won and 30 lost: 0.54, and no more.
        (_pairs(70, 0) + [_pair(70 + i, -1.0) for i in range(30)], "better_not_at_equal_length"),
    ],
)
def test_verdict(pairs: list[ResponsePair], verdict: str) -> None:
    assert _report(pairs).verdict == verdict


def test_a_policy_that_wins_by_length_is_not_called_better() -> None:
    # At +10 tokens 9 of 10 are won, at -10 tokens 1 of 10: log odds +-log 9, so one half at 0.
    longer = [_pair(i, 1.0 if i % 10 else -1.0, 10) for i in range(80)]
    shorter = [_pair(80 + i, -1.0 if i % 10 else 1.0, -10) for i in range(20)]
    report = _report(longer + shorter)
    assert report.held_out.comparison.plain.value == 0.74
    assert report.metrics()["held_out_win_rate_length_controlled"] == pytest.approx(0.5, abs=1e-4)
    assert report.verdict == "better_not_at_equal_length"
    assert "at equal length it is not shown" in summarize_policy(report)[0]


def test_page_begins_with_the_verdict_in_words() -> None:
    page = render_policy_report(_report(_pairs(70, 30), kl=_kl(0.2)))
    lines = [line for line in page.splitlines() if line]
    assert lines[0] == (
        "# The policy is better than the base, by the reward model that it was trained on"
    )
    # Wilson for 70 of 100: (0.7 + 0.019207) / 1.038415 -+ 0.0892 = 0.6042 and 0.7811.
    assert "wins 70.0% of 100 held-out prompts (95 % interval 60.4% to 78.1%)" in lines[1]
    assert "At equal length it wins 70" in lines[1]
    # k1 0.2; the responses' deviations sum to -0.1 and 0.1: sqrt(2 * 0.02) / 4 = 0.05.
    assert "+0.2000 ± 0.0500 nats per token" in lines[3]
    assert "above the guard's bound of 0.1" in lines[3]
    assert lines[4] == r"Guards that fired: kl\_probe once; the last at step 30."


def test_page_says_what_is_not_there() -> None:
    report = _report([_pair(1, 0.0)], events=[], history=[], final_weights=None, bounds={})
    page = render_policy_report(report)
    for sentence in (
        "neither shown to be better",
        "1 ties count half",
        "KL from the base was not measured",
        "No guard fired.",
        "No step was recorded.",
    ):
        assert sentence in page
    assert "nan" not in page


def test_several_responses_to_a_prompt_are_told() -> None:
    pairs = [replace(pair, prompt_id=f"p{i // 4}") for i, pair in enumerate(_pairs(70, 30))]
    report = _report(pairs)
    assert report.held_out.comparison.plain.n_prompts == 25
    assert "100 responses to 25 held-out prompts" in summarize_policy(report)[1]


def test_rates_by_subset() -> None:
    pairs = [replace(pair, subset="ab"[i % 2]) for i, pair in enumerate(_pairs(3, 1))]
    held_out = compare_pairs(pairs, JUDGE, FEW)
    # Pairs 0 and 2 are won, of 1 and 3 the first.
    assert {name: part.value for name, part in held_out.subsets.items()} == {"a": 1.0, "b": 0.5}
    assert compare_pairs(_pairs(3, 1), JUDGE, FEW).subsets == {}


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DataError, match="no scores"):
        compare_pairs([], JUDGE, FEW)
    with pytest.raises(TrainingError, match="not finite"):
        compare_pairs([_pair(1, math.nan)], JUDGE, FEW)


# --- samples


def test_best_worst_and_random_pairs() -> None:
    pairs = [_pair(i, float(i)) for i in range(40)]
    random.Random(1).shuffle(pairs)
    samples = pick_samples(pairs, n=10, seed=3)
    groups = {name: [pair.score_difference for pair in samples[name]] for name in samples}
    assert groups["best"] == [float(i) for i in range(39, 29, -1)]
    assert groups["worst"] == [float(i) for i in range(10)]
    assert len(groups["random"]) == 10
    assert groups["random"] == sorted(groups["random"], reverse=True)
    assert all(10 <= value < 30 for value in groups["random"])
    assert pick_samples(pairs, n=10, seed=3) == samples
    assert pick_samples(pairs, n=10, seed=4) != samples


@pytest.mark.parametrize("n_pairs", range(0, 35))
def test_no_pair_is_shown_twice(n_pairs: int) -> None:
    samples = pick_samples([_pair(i, float(i % 3)) for i in range(n_pairs)], n=10)
    shown = [pair.prompt_id for pairs in samples.values() for pair in pairs]
    assert len(shown) == len(set(shown)) == min(n_pairs, 30)


def test_rows_of_tables_can_be_encoded() -> None:
    (row,) = sample_rows(pick_samples([_pair(1, 2.0, prompt=NASTY)]))
    assert (row["group"], row["rank"], row["score_difference"]) == ("best", 1, 2.0)
    row["prompt"].encode()
    assert "# Not a heading" in row["prompt"]


def test_sample_table_has_the_form_of_a_logged_table(tmp_path: Path) -> None:
    write_sample_table(tmp_path / "samples.json", pick_samples([_pair(1, 2.0), _pair(2, -1.0)]))
    found = json.loads((tmp_path / "samples.json").read_text())
    assert found["columns"][:3] == ["group", "rank", "prompt_id"]
    assert [row[:3] for row in found["data"]] == [["best", 1, "p001"], ["worst", 1, "p002"]]


@pytest.mark.slow
def test_mlflow_reads_the_sample_table(tmp_path: Path, tracker: Any) -> None:
    import mlflow

    run_id = tracker.start_run("table", {"stage": "offline_ppo"}, {})
    samples = pick_samples([_pair(1, 2.0), _pair(2, -1.0)])
    write_sample_table(tmp_path / "samples.json", samples)
    tracker.log_file(run_id, tmp_path / "samples.json")
    entry = {"path": "samples.json", "type": "table"}
    tracker.set_tags(run_id, {"mlflow.loggedArtifacts": json.dumps([entry])})
    mlflow.set_tracking_uri(tracker.tracking_uri)
    client = mlflow.MlflowClient()
    found = client.load_table(tracker.experiment_id, artifact_file="samples.json")
    assert list(found["policy_score"]) == [2.0, -1.0]
    assert list(found["prompt"]) == ["Question 1?", "Question 2?"]


def test_conversations_are_told_apart() -> None:
    turns = (Message("user", "hi"), Message("assistant", "yes"), Message("user", "why?"))
    assert prompt_text(turns) == "user: hi\n\nassistant: yes\n\nuser: why?"
    assert prompt_text(turns[:1]) == "hi"


def test_text_of_the_data_stays_text() -> None:
    pair = _pair(1, 1.0, prompt_id="*p*", policy_response=NASTY, subset="a|b's")
    lines = render_samples(pick_samples([pair])).splitlines()
    opened = lines.index("`````text")
    assert opened < lines.index("# Not a heading") < lines.index("`````", opened)
    assert not any("\x1b" in line or "\ud800" in line for line in lines)
    assert r"### 1. Prompt \*p\*" in lines
    assert any(line.endswith(r"subset a\|b's") for line in lines)
    event = GuardEvent(3, "<b>rule</b>", "a | b\n# c")
    page = render_policy_report(_report(events=[event]))
    assert "<b>" not in page
    assert r"| 3 | &lt;b&gt;rule&lt;/b&gt; | a \| b \# c |  |" in page.splitlines()


# --- course


def test_event_is_read_from_what_a_guard_recorded() -> None:
    record = {"step": 8, "rule": "kl", "message": "up", "history": [[4, 0.1], [8, "nan"]]}
    event = GuardEvent.of(record)
    assert (event.step, event.rule, event.message, event.history[0]) == (8, "kl", "up", (4, 0.1))
    assert math.isnan(event.history[1][1])
    # And becomes it again: no JSON has a NaN.
    assert event.as_json() == record


def test_metrics_are_summarized_over_their_finite_values() -> None:
    history = [(1, {"a": 3.0}), (2, {"a": math.nan, "b": math.inf}), (5, {"a": 1.0}), (6, {})]
    found = summarize_metrics(_report(history=history))
    assert set(found) == {"a"}
    assert found["a"] == {
        **{"n": 2, "n_not_finite": 1, "first": 3.0, "last": 1.0},
        **{"minimum": 1.0, "minimum_step": 5, "maximum": 3.0, "maximum_step": 1},
    }


def test_weights_by_hand() -> None:
    found = summarize_weights(torch.tensor([0.5, 1.0, 2.0, 2.0]))
    assert found is not None
    # 5.5^2 / (0.25 + 1 + 4 + 4) = 30.25 / 9.25 = 3.270270 of 4.
    assert found.pop("ess_share") == pytest.approx(3.270270 / 4, abs=1e-6)
    assert found == {"n": 4, "mean": 1.375, "maximum": 2.0, "at_maximum_share": 0.5}
    assert summarize_weights(torch.zeros(0)) is None


# --- what is written


def test_what_is_written(tmp_path: Path) -> None:
    report = _report(kl=_kl(0.05))
    files = write_policy_report(report, tmp_path / "report")
    tables = {"samples.json", "held_out_pairs.parquet", "history.jsonl"}
    pages = {"report.json", "report.md", "samples.md"}
    images = {"overview.png", *(f"{name}.png" for name in PLOTS)}
    assert {file.name for file in files} == tables | pages | images
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "report" / "report.json").read_text())
    assert set(record) == KEYS
    assert record["verdict"] == "better"
    assert record["win_rate"]["value"] == 0.7
    assert record["win_rate"]["wilson"] == pytest.approx([0.6042, 0.7811], abs=1e-4)
    assert record["kl_probe"]["k1"]["value"] == pytest.approx(0.05)
    assert record["guard_events"] == [
        {
            "step": 30,
            "rule": "kl_probe",
            "message": "0.12 > 0.1: rolled back to step 20",
            "history": [[20, 0.04], [30, 0.12]],
        }
    ]
    assert record["facts"] == {"good_rate": 0.9}
    assert record["metrics"]["kl_probe"]["n"] == 6
    assert read_history(tmp_path / "report" / "history.jsonl") == report.history
    table = pq.read_table(tmp_path / "report" / "held_out_pairs.parquet")
    assert table.schema.equals(RESPONSE_PAIR_SCHEMA)
    assert table["score_difference"].to_pylist() == [1.0] * 70 + [-1.0] * 30


ODD_COURSES: list[dict[str, Any]] = [
    {"history": []},
    {"history": [(1, {"reward_mean": 1.0})]},
    {"history": [], "events": [GuardEvent(7, "lonely")]},
    {"history": [(1, {"kl_probe": math.nan}), (2, {"kl_probe": math.inf})]},
    {
        "history": [(step, {"reward_mean": 0.0, "batch_prompts": 0.0}) for step in (1, 2)],
        "events": [GuardEvent(step, f"rule $_{step}^ {NASTY[:5]}") for step in range(1, 13)],
        "final_weights": torch.zeros(5),
        "bounds": {"ess_share": 0.3},
    },
    {"history": [(1, {})], "final_weights": torch.full((9,), 1.0)},
    {"history": [(1, {})], "final_weights": torch.tensor([1e-9])},
    {"history": [(1, {})], "events": [GuardEvent(1, "nan", "", ((1, math.nan),))]},
]


@pytest.mark.parametrize("course", ODD_COURSES)
def test_odd_courses_give_valid_json_and_pages(course: dict[str, Any]) -> None:
    pairs = [_pair(1, 0.5, prompt=NASTY, policy_response=NASTY)]
    report = PolicyReport(compare_pairs(pairs, JUDGE, FEW), **course)
    json.dumps(report.as_json(), allow_nan=False).encode()
    render_policy_report(report).encode()
    assert all(map(math.isfinite, report.metrics().values()))


@pytest.mark.parametrize("course", [ODD_COURSES[2], ODD_COURSES[4], ODD_COURSES[6]])
def test_odd_courses_can_be_drawn(course: dict[str, Any], tmp_path: Path) -> None:
    report = PolicyReport(compare_pairs([_pair(1, 0.5)], JUDGE, FEW), **course)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_policy_report(report, tmp_path)
    assert {file.stem for file in files} >= PLOTS | {"overview"}


def test_every_firing_is_a_line_in_the_plots_over_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: dict[str, Figure] = {}
    original = Figure.savefig

    def keep(self: Figure, path: Path, **options: Any) -> None:
        drawn[path.stem] = self
        original(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    events = [GuardEvent(step, "kl_probe") for step in (10, 11, 40)] + [GuardEvent(50, "ess")]
    write_policy_report(_report(events=events), tmp_path)
    assert set(drawn) == PLOTS | {"overview"}
    for name in PLOTS - {"weights"}:
        axes = drawn[name].axes[0]
        firings = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [float(np.ravel(line.get_xdata())[0]) for line in firings] == [10, 11, 40, 50]
        # The second firing is too close to the first to have a name of its own.
        assert [text.get_text() for text in axes.texts] == ["kl_probe", "kl_probe", "ess"]
    bounds = [line for line in drawn["kl"].axes[0].lines if line.get_linestyle() == "--"]
    assert [float(np.ravel(line.get_ydata())[0]) for line in bounds] == [0.1]
