"""Answers of vLLM itself; the environment variable RLHF_VLLM names its program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from student_runs import REUSE, evaluation_inputs

from flows.evaluate import evaluate
from flows.sft import sft
from tasks.artifacts import EvalReport, load_artifact
from tasks.config.loading import load_config, merge
from tasks.evaluate.config import EvaluateConfig

PROGRAM = os.environ.get("RLHF_VLLM", "")
pytestmark = [
    pytest.mark.endurance,
    pytest.mark.skipif(not PROGRAM, reason="RLHF_VLLM names no program of vLLM, like .../bin/vllm"),
]

# vLLM's attention on CPUs wants heads of 32 dimensions or more.
CHAIN = load_config(
    Path(__file__).parents[1] / "small_chain.yaml",
    ["sft.model.tiny.hidden_size=64", "sft.model.tiny.n_heads=2"],
)
MODELS = ("base", "policy", "student")

# The models are tiny, and so is the memory to keep free for them; on a GPU this is plenty, too.
VLLM = {
    "command": [PROGRAM, "serve"],
    "arguments": ["--dtype=float32", "--gpu-memory-utilization=0.1", "--enforce-eager"],
}


@pytest.fixture(scope="module")
def upstreams(preferences: str) -> dict[str, Any]:
    return evaluation_inputs(CHAIN, preferences, sft(CHAIN.sft, preferences, REUSE))


@pytest.fixture
def no_server_left() -> Iterator[None]:
    yield
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if PROGRAM in (process.info["cmdline"] or ())
    ]
    assert left == []


def _answers(report: EvalReport, name: str) -> list[tuple[int, str]]:
    """Return the answers to the questions in two turns, and to held-out prompts."""
    rows = [
        json.loads(line)
        for line in (report.path / "model_answer" / f"{name}.jsonl").read_text().splitlines()
    ]
    two_turns = [(row["question_id"], text) for row in rows for text in row["choices"][0]["turns"]]
    held_out = json.loads((report.path / "alpaca" / f"{name}.json").read_text())
    return two_turns + [(-1, row["output"]) for row in held_out]


def _evaluated(upstreams: dict[str, Any], **answers: Any) -> EvalReport:
    """Run the stage, with greedy decoding everywhere."""
    greedy = dict.fromkeys(CHAIN.evaluate.category_temperatures, 0.0)
    changes = {
        "generation": {"temperature": 0.0},
        "category_temperatures": greedy,
        "answers": answers,
    }
    cfg = EvaluateConfig.model_validate(merge(CHAIN.evaluate.model_dump(), changes))
    return load_artifact(Path(evaluate(cfg, **upstreams)), EvalReport)


@pytest.mark.timeout(1800)
def test_greedy_answers_are_those_of_transformers(
    upstreams: dict[str, Any], no_server_left: None
) -> None:
    """Chat template, end of turn, limits and decoding are the same, for a policy and a student."""
    here = _evaluated(upstreams)
    there = _evaluated(upstreams, backend="vllm", vllm=VLLM)
    for name in MODELS:
        ours, theirs = _answers(here, name), _answers(there, name)
        assert len(ours) > 4 * 2
        assert ours == theirs
