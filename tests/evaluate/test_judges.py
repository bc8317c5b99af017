"""Stage evaluate with language models as judges, behind a real local server and in this process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import Act, ChatServer, chat_server
from student_runs import evaluation_inputs

from flows.cli.score_judgments import score_judgments
from flows.evaluate import evaluate
from tasks.artifacts import EvalReport, PolicyCheckpoint, load_artifact
from tasks.config.loading import load_config, merge
from tasks.errors import ClusterError, ConfigError, DataError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.questions import ModelAnswer, write_answers

pytestmark = pytest.mark.slow

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
MODELS = ("base", "policy", "student")
Run = Callable[..., EvalReport]


@pytest.fixture(scope="module")
def upstreams(preferences: str, base: str) -> dict[str, Any]:
    return evaluation_inputs(CHAIN, preferences, base)


@pytest.fixture
def run(upstreams: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs the stage with some changes and returns the report's artefact."""
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")

    def evaluated(server: ChatServer | None = None, **changes: Any) -> EvalReport:
        if server is not None:
            endpoint: dict[str, Any] = {
                "base_url": server.url,
                "model": "judge-1",
                "api_key_env": "JUDGE_KEY",
            }
            endpoint |= {"backoff_seconds": 0.02, "attempts": 2}
            changes = merge({"judge": "openai", "judging": {"endpoint": endpoint}}, changes)
        cfg = EvaluateConfig.model_validate(merge(CHAIN.evaluate.model_dump(), changes))
        return load_artifact(Path(evaluate(cfg, **upstreams)), EvalReport)

    return evaluated


def _rate(content: str, nth: int) -> Act:
    """Give every answer a 6, and every comparison to place A."""
    if "<answer A>" in content or "<conversation A>" in content:
        return Act(text="[[A]]")
    return Act(text="Rating: [[6]]")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(_rate) as found:
        yield found


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_judged_over_http_in_both_ways(
    run: Run, server: ChatServer, tmp_path: Path, shared_data: Path
) -> None:
    given = tmp_path / "other.jsonl"
    write_answers(given, [ModelAnswer(q, "other", ("I", "You")) for q in range(1, 5)])
    found = run(
        server,
        judging={"pairwise": True, "repeats": 2},
        answers={"files": {"other": str(given)}},
        gate={"min_score": 5.0, "min_win_rate": 0.5, "max_regression": 0.1},
    )
    report = found.report
    assert report["judge"] == "judge-1" and report["scale"] == "1 to 10, by judge-1"
    assert set(report["questions"]) == {*MODELS, "other"} and set(report["held_out"]) == set(MODELS)
    # 4 questions, 2 turns, 2 repeats: 4 models alone; 3 against the base in both orders.
    assert len(server.seen) == 4 * 2 * 2 * (4 + 3 * 2)
    for section in report["questions"].values():
        assert (section["turn_1"], section["turn_2"], section["mean"]) == (6.0, 6.0, 6.0)
        assert (section["valid"], section["coverage"]) == (16, 1.0)
        assert section["agreement"]["equal"] == 1.0
    for name in ("policy", "student", "other"):
        pairwise = report["pairwise"][name]
        # Always place A: the orders disagree, which is a tie.
        assert (pairwise["ties"], pairwise["win_rate_adjusted"]) == (16, 0.5)
        assert (pairwise["orders_agree"], pairwise["win_rate"]) == (0.0, 0.0)
        assert report["differences"][name]["difference"] == 0.0
    assert report["gate"]["verdict"] == "passed" and found.manifest.metrics["gate_passed"] == 1.0
    assert len(report["judging"]["prompts_sha256"]) == 64
    assert report["judging"]["requests"] == len(server.seen)
    everything = "".join(
        file.read_text(errors="replace") for file in found.path.rglob("*") if file.is_file()
    )
    assert "sk-secret" not in everything
    page = (found.path / "report.html").read_text()
    assert page.count("<article") == 4 and "both orders: tie" in page
    rows = _rows(found.path / "model_judgment" / "student.jsonl")
    assert len(rows) == 16 and rows[0]["judge"][1].startswith("rlhf-flows-single")
    files = sorted((found.path / "model_judgment").iterdir())
    again = score_judgments(files)
    assert {row.model: row.mean.value for row in again.rows if row.mean} == {
        name: section["mean"] for name, section in report["questions"].items()
    }
    assert {row.model for row in again.pairs} == {*MODELS, "other"} and again.differing == 0
    alpaca = json.loads((found.path / "alpaca" / "student.json").read_text())
    assert {row["generator"] for row in alpaca} == {"student"} and alpaca[0]["output"]


def test_models_served_by_vllm_answer_as_in_this_process(run: Run) -> None:
    """Greedy decoding of the same prompts: chat template, end of turn and limits are the same."""
    program = Path(__file__).parents[1] / "vllm_stand_in.py"
    vllm = {"command": [sys.executable, str(program), "serve"], "arguments": []}
    greedy = dict.fromkeys(CHAIN.evaluate.category_temperatures, 0.0)
    changes: dict[str, Any] = {"generation": {"temperature": 0.0}, "category_temperatures": greedy}
    here = run(**changes)
    there = run(**changes, answers={"backend": "vllm", "vllm": vllm})
    assert here.path != there.path
    for name in MODELS:
        ours, theirs = (
            [(row["question_id"], row["choices"][0]["turns"]) for row in _rows(file)]
            for file in (at.path / "model_answer" / f"{name}.jsonl" for at in (here, there))
        )
        assert ours == theirs and len(ours) == 4
        ours, theirs = (
            json.loads((at.path / "alpaca" / f"{name}.json").read_text()) for at in (here, there)
        )
        assert ours == theirs and ours


def test_stage_that_failed_goes_on_where_it_was(run: Run) -> None:
    with chat_server(_rate) as server:
        endpoint = {"max_concurrency": 1, "max_requests": 10}
        with pytest.raises(ClusterError, match=r"The budget of 10 requests .* is spent"):
            run(server, judging={"endpoint": endpoint}, seed=11)
        assert len(server.seen) == 10
        # The budget is a setting: more of it is the same evaluation, and what was spent counts.
        found = run(server, judging={"endpoint": endpoint | {"max_requests": 24}}, seed=11)
        assert len(server.seen) == 24
    assert found.report["judging"]["requests"] == 24
    assert [s["valid"] for s in found.report["questions"].values()] == [8, 8, 8]


def test_bad_input_is_refused_before_anything_is_asked(
    run: Run, server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.jsonl"
    write_answers(other, [ModelAnswer(q, "m", ("I", "You")) for q in (901, 902)])
    with pytest.raises(DataError, match=r"no answer to the questions \[1, 2, 3, 4\]"):
        run(server, answers={"files": {"m": str(other)}})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"name": "single-v1", "system_prompt": "", "prompt_template": "{oops}"}')
    with pytest.raises(DataError, match="unknown fields"):
        run(server, judging={"prompts": str(prompts)})
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY holds no key"):
        run(server)
    assert server.seen == []


def test_answers_and_judge_by_a_server_and_real_questions(run: Run, shared_data: Path) -> None:
    folder = shared_data / "mt_bench"

    def script(content: str, nth: int) -> Act:
        is_judged = "[The Start of" in content or "<|The Start of" in content
        return Act(text="Rating: [[8]]") if is_judged else Act(text="I would say so.")

    with chat_server(script) as server:
        endpoint = {"base_url": server.url, "api_key_env": None}
        changes: dict[str, Any] = {
            "questions": str(folder / "question.jsonl"),
            "max_questions": None,
            "judging": {
                "prompts": str(folder / "judge_prompts.jsonl"),
                "references": str(folder / "reference_answer_gpt-4.jsonl"),
            },
            "answers": {
                "backend": "openai",
                "endpoint": endpoint,
                "served": {name: f"{name}-model" for name in MODELS},
            },
        }
        # In the middle of the held-out prompts, and of the questions.
        for n_requests in (5, 50):
            budget = {"answers": {"endpoint": {"max_requests": n_requests}}}
            with pytest.raises(ClusterError, match=f"The budget of {n_requests} requests"):
                run(server, **merge(changes, budget))
            assert len(server.seen) == n_requests
        found = run(server, **changes)
    n_asked = Counter(seen.payload["model"] for seen in server.seen)
    # 12 held-out prompts and 80 questions of two turns, none of them twice but for a second turn
    # that the budget did not allow: at most 16 conversations were under way.
    assert n_asked["policy-model"] == n_asked["student-model"] == 12 + 160
    assert 12 + 160 <= n_asked["base-model"] <= 12 + 160 + 16
    report = found.report
    assert report["n_questions"] == 80 and len(report["questions"]["base"]["categories"]) == 8
    assert report["questions"]["student"]["mean"] == 8.0
    rows = _rows(found.path / "model_judgment" / "student.jsonl")
    names = [row["judge"][1] for row in rows]
    assert {name: names.count(name) for name in set(names)} == {
        "single-v1": 50,
        "single-math-v1": 30,
        "single-v1-multi-turn": 50,
        "single-math-v1-multi-turn": 30,
    }
    assert report["judging"]["prompts"] == "judge_prompts.jsonl"
    assert {seen.payload["model"] for seen in server.seen} == {
        "judge-1",
        *(f"{name}-model" for name in MODELS),
    }
    assert (found.path / "radar.png").read_bytes().startswith(b"\x89PNG")


def test_given_answers_by_the_reward_model(run: Run, tmp_path: Path) -> None:
    given = tmp_path / "other.jsonl"
    long = "word " * 200
    write_answers(given, [ModelAnswer(q, "other", ("I", long)) for q in range(1, 5)])
    report = run(answers={"files": {"other": str(given)}}).report
    assert report["judge"] == "reward_model" and "not an MT-Bench score" in report["scale"]
    other = report["questions"]["other"]
    # What is too long for the reward model has no score.
    assert (other["valid"], other["failed"], other["turn_2"]) == (4, 4, None)
    assert other["mean"] == other["turn_1"] and "other" not in report["held_out"]


def test_judge_that_cannot_judge_gives_no_score_and_fails_the_gate(
    run: Run, upstreams: dict[str, Any]
) -> None:
    model = load_artifact(Path(upstreams["base"]), PolicyCheckpoint).model_dir
    found = run(
        judge="transformers",
        judging={"model": str(model), "max_new_tokens": 8, "max_prompt_tokens": 1000},
        gate={"min_score": 1.0},
    )
    # The tiny model cannot judge: that is said, and no number is made up.
    assert found.report["judge"] == "model"
    for section in found.report["questions"].values():
        assert (section["mean"], section["coverage"], section["failed"]) == (None, 0.0, 8)
    assert found.report["judging"]["failures"] == {"no rating from 1 to 10 in the judge's text": 24}
    assert found.report["gate"]["verdict"] == "failed"
    assert found.manifest.metrics["student_judgment_coverage"] == 0.0
    assert "student_question_score" not in found.manifest.metrics
