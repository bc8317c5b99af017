"""Stage evaluate on real components, and the oracle's measurements."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import chat_server
from student_runs import evaluation_inputs

from flows.evaluate import evaluate
from tasks.artifacts import EvalReport, PreferenceDataset, load_artifact
from tasks.config.loading import load_config, merge
from tasks.data.hh import Message, Pair
from tasks.data.pairs import read_pairs
from tasks.demo.oracle import clean_accuracy, good_rate, is_good, parse_transcript
from tasks.demo.world import generate_pairs
from tasks.errors import ClusterError, RendererMismatchError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.questions import Question
from tasks.evaluate.stage import collect_answers

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
MODELS = ("base", "policy", "student")


@pytest.fixture(scope="module")
def upstreams(preferences: str, base: str) -> dict[str, str]:
    return evaluation_inputs(CHAIN, preferences, base)


@pytest.fixture(scope="module")
def run(upstreams: dict[str, str]) -> Any:
    """A function that runs the stage with some changes and returns the report's artefact."""

    def evaluated(**changes: Any) -> EvalReport:
        cfg = EvaluateConfig.model_validate(merge(CHAIN.evaluate.model_dump(), changes))
        return load_artifact(Path(evaluate(cfg, **upstreams)), EvalReport)

    return evaluated


@pytest.fixture(scope="module")
def evaluated(run: Any) -> EvalReport:
    found: EvalReport = run()
    return found


@pytest.fixture(scope="module")
def report(evaluated: EvalReport) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((evaluated.path / "report.json").read_text())
    return found


def _world_pairs(flipped: Sequence[int] = ()) -> list[Pair]:
    """Return four pairs of the demo world, some with the labels the wrong way round."""
    found = []
    for index, row in enumerate(generate_pairs(4, seed=3, flip_rate=0.0)):
        good, bad = parse_transcript(row["chosen"]), parse_transcript(row["rejected"])
        chosen, rejected = good[-1]["content"], bad[-1]["content"]
        if index in flipped:
            chosen, rejected = rejected, chosen
        prompt = tuple(Message(m["role"], m["content"]) for m in good[:-1])
        found.append(Pair(str(index), str(index), "demo", prompt, chosen, rejected, "x", index))
    return found


def test_good_rate_by_hand() -> None:
    pairs = _world_pairs()
    responses = [pairs[0].chosen, pairs[1].rejected, pairs[2].chosen, "Gibberish."]
    assert good_rate([pair.prompt for pair in pairs], responses) == 0.5


def test_accuracy_looks_at_the_truth_and_not_at_the_label() -> None:
    # Pair 1 is flipped: its good response is the rejected one, which scores higher here.
    # Right: 0 and 1; a tie, half right: 2; wrong: 3. (1 + 1 + 0.5 + 0) / 4.
    chosen, rejected = torch.tensor([1.0, -1.0, 0.5, 0.0]), torch.tensor([0.0, 2.0, 0.5, 3.0])
    assert clean_accuracy(_world_pairs(flipped=[1]), chosen, rejected) == 0.625
    # Without the flip pair 1 is wrong too.
    assert clean_accuracy(_world_pairs(), chosen, rejected) == 0.375


def test_server_is_started_only_for_what_is_missing(
    ingest_context: Callable[[], Any], tmp_path: Path
) -> None:
    """It would take minutes to load a model that nothing is asked of."""
    ctx = ingest_context()
    prompts = [(Message("user", "Held out."),)]
    # Ends at once: where it is started, that is an error.
    vllm = {
        "command": [sys.executable, str(Path(__file__).parents[1] / "vllm_stand_in.py"), "serve"],
        "arguments": ["--ends"],
    }

    def collect(n_questions: int, **answers: Any) -> Any:
        cfg = EvaluateConfig.model_validate({"answers": answers})
        questions = [Question(q, "math", (f"{q}?", "Why?")) for q in range(n_questions)]
        no_renderer: Any = None  # a server renders by itself
        directories = dict.fromkeys(MODELS, tmp_path)
        return collect_answers(ctx, cfg, no_renderer, questions, prompts, directories)

    with chat_server() as server:
        endpoint = {"base_url": server.url, "api_key_env": None}
        answers = collect(2, backend="openai", endpoint=endpoint, served=dict.fromkeys(MODELS, "m"))
    assert collect(2, backend="vllm", vllm=vllm) == answers
    with pytest.raises(ClusterError, match="it said last: CUDA error: out of memory"):
        collect(3, backend="vllm", vllm=vllm)


@pytest.mark.slow
def test_report_holds_every_model_and_turn(report: dict[str, Any]) -> None:
    assert report["judge"] == "reward_model" and "not an MT-Bench score" in report["scale"]
    assert (report["n_questions"], report["n_held_out_prompts"]) == (4, 12)
    assert set(report["questions"]) == set(report["held_out"]) == set(MODELS)
    for scores in report["questions"].values():
        assert scores["coverage"] == 1.0
        assert scores["mean"] == pytest.approx((scores["turn_1"] + scores["turn_2"]) / 2)
        assert all(math.isfinite(value) for value in scores["categories"].values())
    for held_out in report["held_out"].values():
        assert 0.0 <= held_out["win_rate_against_base"] <= 1.0
        assert held_out["mean_characters"] > 0
    # A model ties with itself everywhere.
    assert report["held_out"]["base"]["win_rate_against_base"] == 0.5


@pytest.mark.slow
def test_oracle_measures_the_demo(report: dict[str, Any], upstreams: dict[str, str]) -> None:
    rates = report["demo"]["oracle_good_rate"]
    assert set(rates) == set(MODELS)
    for rate in rates.values():
        # A share of 12 prompts.
        assert 0.0 <= rate <= 1.0 and rate * 12 == pytest.approx(round(rate * 12))
    pairs = read_pairs(load_artifact(Path(upstreams["preferences"]), PreferenceDataset), "test")
    flipped = sum(
        not is_good([{"role": m.role, "content": m.content} for m in p.prompt], p.chosen)
        for p in pairs
    )
    assert 0 < flipped < len(pairs) / 3
    assert 0.0 < report["demo"]["reward_accuracy_clean"] < 1.0


@pytest.mark.slow
def test_answers_and_judgments_belong_together(evaluated: EvalReport) -> None:
    for name in MODELS:
        answers, judgments = (
            [json.loads(line) for line in (evaluated.path / kind / f"{name}.jsonl").open()]
            for kind in ("model_answer", "model_judgment")
        )
        assert [answer["model_id"] for answer in answers] == [name] * 4
        assert all(len(answer["choices"][0]["turns"]) == 2 for answer in answers)
        asked = {(answer["question_id"], turn) for answer in answers for turn in (1, 2)}
        assert {(j["question_id"], j["turn"]) for j in judgments} == asked
        assert len(judgments) == 8


@pytest.mark.slow
def test_page_plot_and_metrics_tell_the_same(evaluated: EvalReport, report: dict[str, Any]) -> None:
    assert (evaluated.path / "scores.png").read_bytes().startswith(b"\x89PNG")
    page = (evaluated.path / "report.md").read_text()
    metrics = evaluated.manifest.metrics
    for name in MODELS:
        assert f"| {name} | {report['questions'][name]['turn_1']:.2f} |" in page
        assert metrics[f"{name}_question_score"] == report["questions"][name]["mean"]
        assert metrics[f"{name}_oracle_good_rate"] == report["demo"]["oracle_good_rate"][name]
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.slow
def test_own_questions_and_the_same_numbers_again(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 7, "category": "math", "turns": ["What is 1 plus 1?", "And plus 2?"]},
        {"question_id": 9, "category": "mine", "turns": ["Who are you?", "Why?"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"questions": str(file), "max_questions": None, "held_out_prompts": 3}
    first, second = (
        json.loads((run(**changes).path / "report.json").read_text()) for _ in range(2)
    )
    assert first == second
    assert (first["n_questions"], first["n_held_out_prompts"]) == (2, 3)
    assert set(first["questions"]["policy"]["categories"]) == {"math", "mine"}


@pytest.mark.slow
def test_other_renderer_is_refused_before_anything_is_generated(run: Any) -> None:
    with pytest.raises(RendererMismatchError, match="was made with renderer"):
        run(rendering={"max_response_tokens": 63})
