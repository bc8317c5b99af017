"""Judging of made-up answers by a server, in tests and in processes that they kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from chat_server import ChatServer

from tasks.data.history import LineStore
from tasks.evaluate.config import EndpointConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.judges import EndpointJudge, Graded, GradingPlan, Sampling, grade
from tasks.evaluate.prompts import load_judge_prompts
from tasks.evaluate.questions import ModelAnswer, Question


def endpoint_of(server: ChatServer | str, **changes: Any) -> EndpointConfig:
    url = server if isinstance(server, str) else server.url
    fast = {"backoff_seconds": 0.02, "timeout_seconds": 5.0, "api_key_env": "JUDGE_KEY"}
    return EndpointConfig(base_url=url, model="judge-1", **{**fast, **changes})


def plan_of(n_questions: int, models: tuple[str, ...] = ("m",), **changes: Any) -> GradingPlan:
    questions = [Question(q, "writing", (f"ask {q}.", f"again {q}.")) for q in range(n_questions)]
    answers = {
        name: [
            ModelAnswer(q, name, (f"{name} {q} one", f"{name} {q} two"), 0.0)
            for q in range(n_questions)
        ]
        for name in models
    }
    return GradingPlan(questions, answers, load_judge_prompts("own"), ("math",), **changes)


def run(
    cfg: EndpointConfig, plan: GradingPlan, path: Path, rating_attempts: int = 2, **used: int
) -> Graded:
    judge = EndpointJudge(ChatEndpoint(cfg, Usage(**used)), Sampling(0.0, 64, rating_attempts))
    store = LineStore(path)
    try:
        return grade(judge, plan, store)
    finally:
        store.close()


if __name__ == "__main__":
    run(endpoint_of(sys.argv[1], max_concurrency=2), plan_of(20), Path(sys.argv[2]))
