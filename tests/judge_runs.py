"""Judging of made-up answers by a server, in tests and in processes that they kill."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat_server import ChatServer

from tasks.data.history import LineStore
from tasks.evaluate.config import EndpointConfig, JudgingConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.judges import EndpointJudge, grade
from tasks.evaluate.judgments import PairJudgment, Score
from tasks.evaluate.prompts import load_judge_prompts
from tasks.evaluate.questions import ModelAnswer, Question


@dataclass
class Plan:
    """Made-up answers, and how they are judged."""

    questions: list[Question]
    answers: dict[str, list[ModelAnswer]]
    judging: JudgingConfig


@dataclass(frozen=True)
class Graded:
    """What came of it; the cost is that of all runs."""

    scores: list[Score]
    pairs: list[PairJudgment]
    usage: Usage


def endpoint_of(server: ChatServer | str, **changes: Any) -> EndpointConfig:
    url = server if isinstance(server, str) else server.url
    fast = {"backoff_seconds": 0.02, "timeout_seconds": 5.0, "api_key_env": "JUDGE_KEY"}
    return EndpointConfig(base_url=url, model="judge-1", **{**fast, **changes})


def plan_of(n_questions: int, models: tuple[str, ...] = ("m",), **judging: Any) -> Plan:
    questions = [Question(q, "writing", (f"ask {q}.", f"again {q}.")) for q in range(n_questions)]
    answers = {
        name: [
            ModelAnswer(q, name, (f"{name} {q} one", f"{name} {q} two")) for q in range(n_questions)
        ]
        for name in models
    }
    return Plan(questions, answers, JudgingConfig(max_new_tokens=64, **judging))


def run(cfg: EndpointConfig, plan: Plan, path: Path) -> Graded:
    with closing(LineStore(path)) as store:
        judge = EndpointJudge(ChatEndpoint(cfg, Usage.of(store)), plan.judging)
        prompts = load_judge_prompts("own")
        scores, pairs = grade(
            judge,
            plan.questions,
            plan.answers,
            prompts,
            plan.judging,
            store,
            baseline="base",
            seed=0,
        )
        return Graded(scores, pairs, Usage.of(store))


if __name__ == "__main__":
    run(endpoint_of(sys.argv[1], max_concurrency=2), plan_of(20), Path(sys.argv[2]))
