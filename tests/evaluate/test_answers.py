"""Answers to two-turn questions: prompts, seeds, resuming, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_server import Act, chat_server
from judge_runs import endpoint_of

from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.data.rendering import Renderer
from tasks.errors import ClusterError
from tasks.evaluate.answers import (
    Answered,
    Dialogue,
    Done,
    EndpointAnswerer,
    LocalAnswerer,
    Response,
    answer_prompts,
    answer_questions,
    mixed_seed,
    question_batches,
)
from tasks.evaluate.config import AnswersConfig, EvaluateConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.questions import Question
from tasks.runtime.generation import Speaker

LIMITS = RenderingConfig(max_prompt_tokens=96, max_response_tokens=32)
CATEGORIES = ("writing", "math")
QUESTIONS = [Question(q, CATEGORIES[q % 2], (f"What is {q}?", f"And {q} again?")) for q in range(8)]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")


@pytest.fixture(scope="module")
def local(tiny_dir: Path) -> LocalAnswerer:
    renderer = Renderer.load(tiny_dir, LIMITS)
    speaker = Speaker(tiny_dir, renderer, RuntimeConfig(device="cpu", cpu_threads=1))
    return LocalAnswerer(speaker, renderer, GenerationConfig(max_new_tokens=8, batch_size=16))


def config(seed: int = 0) -> EvaluateConfig:
    return EvaluateConfig(
        seed=seed,
        category_temperatures={"writing": 0.7, "math": 0.0},
        answers=AnswersConfig(batch_questions=3),
    )


CFG = config()


class _Killed(Exception):
    pass


class _KilledStore(LineStore):
    """A store whose process is killed once it has so many rows."""

    def __init__(self, path: Path, n_rows: int) -> None:
        super().__init__(path)
        self.n_rows = n_rows

    def append(self, row: Mapping[str, Any]) -> None:
        super().append(row)
        if len(self.rows) >= self.n_rows:
            raise _Killed


def _texts(answered: list[Answered]) -> list[list[str]]:
    return [[response.text for response in one.responses] for one in answered]


def test_parts_have_one_temperature_and_do_not_depend_on_what_is_there() -> None:
    parts = [[q.question_id for q in part] for part in question_batches(QUESTIONS, CFG)]
    assert parts == [[0, 2, 4], [6], [1, 3, 5], [7]]


def test_answers_depend_on_the_seed_where_they_are_sampled(
    local: LocalAnswerer, tmp_path: Path
) -> None:
    found = {
        seed: answer_questions(
            "m", local, QUESTIONS, config(seed), LineStore(tmp_path / f"{seed}.jsonl")
        )
        for seed in (1, 2)
    }
    store = LineStore(tmp_path / "again.jsonl")
    again = answer_questions("m", local, QUESTIONS, config(1), store)
    assert _texts(again) == _texts(found[1]) != _texts(found[2])
    # Math is greedy in the first turn, whatever the seed.
    first = [[one.responses[0].text for one in found[seed][1::2]] for seed in (1, 2)]
    assert first[0] == first[1]


def test_killed_run_that_goes_on_ends_with_the_same_answers(
    local: LocalAnswerer, tmp_path: Path
) -> None:
    store = LineStore(tmp_path / "whole.jsonl")
    whole = answer_questions("m", local, QUESTIONS, CFG, store)
    for n_stored in (1, 4, 7):
        path = tmp_path / f"{n_stored}.jsonl"
        with pytest.raises(_Killed):
            answer_questions("m", local, QUESTIONS, CFG, _KilledStore(path, n_stored))
        store = LineStore(path)
        assert len(store.rows) == n_stored
        asked = _Counting(local)
        found = answer_questions("m", asked, QUESTIONS, CFG, store)
        assert [(o.question, o.responses) for o in found] == [
            (o.question, o.responses) for o in whole
        ]
        rows = LineStore(path).rows
        assert len({row["question_id"] for row in rows}) == len(rows) == 8
        again = _Counting(local)
        answer_questions("m", again, QUESTIONS, CFG, LineStore(path))
        assert asked.n_parts <= 4 and again.n_parts == 0


def test_responses_are_counted_as_they_come(local: LocalAnswerer, tmp_path: Path) -> None:
    counts: list[int] = []
    counting = LocalAnswerer(local.speaker, local.renderer, local.cfg, counts.append)
    answer_questions("m", counting, QUESTIONS, CFG, LineStore(tmp_path / "answers.jsonl"))
    # 8 questions of two turns, in more than one batch.
    assert sum(counts) == 16 and len(counts) > 2 and min(counts) > 0


class _Counting:
    """A local answerer that counts the parts that it answers."""

    draws_together = True

    def __init__(self, local: LocalAnswerer) -> None:
        self.local = local
        self.n_parts = 0

    def answer(self, dialogues: Sequence[Dialogue], seed: int, done: Done) -> None:
        self.n_parts += 1
        self.local.answer(dialogues, seed, done)


def test_two_models_share_a_store(local: LocalAnswerer, tmp_path: Path) -> None:
    store = LineStore(tmp_path / "a.jsonl")
    first = answer_questions("one", local, QUESTIONS[:2], CFG, store)
    second = answer_questions("two", local, QUESTIONS[:2], CFG, store)
    assert len(store.rows) == 4 and _texts(first) == _texts(second)


def test_length_limits_are_told(local: LocalAnswerer, tmp_path: Path) -> None:
    found = answer_questions("m", local, QUESTIONS[:4], CFG, LineStore(tmp_path / "a.jsonl"))
    for one in found:
        for said in one.responses:
            assert said.token_ids is not None
            assert said.truncated == (local.renderer.end_of_turn_id not in said.token_ids)
            assert len(said.token_ids) <= 8
    assert any(one.as_answer("m").truncated != (False, False) for one in found)
    prompts = [(Message("user", "word " * 200),)]
    (long,) = answer_prompts("m", local, prompts, CFG, LineStore(tmp_path / "h.jsonl"))
    assert long.shortened == 1


def _reply(content: str, nth: int) -> Act:
    return Act(text=f" said to {content} ", finish_reason="length" if "3" in content else "stop")


def test_endpoint_gets_the_first_answer_in_the_second_prompt(tmp_path: Path) -> None:
    with chat_server(_reply) as server:
        answerer = EndpointAnswerer(lambda: ChatEndpoint(endpoint_of(server)), GenerationConfig())
        store = LineStore(tmp_path / "a.jsonl")
        found = answer_questions("m", answerer, QUESTIONS, CFG, store)
        assert found[2].responses[0] == Response("said to What is 2?")
        assert found[3].as_answer("m").truncated == (True, True)
        assert len(server.seen) == 16
        second = next(s.payload for s in server.seen if s.content == "And 2 again?")
        assert [(m["role"], m["content"]) for m in second["messages"]] == [
            ("user", "What is 2?"),
            ("assistant", "said to What is 2?"),
            ("user", "And 2 again?"),
        ]
        assert second["temperature"] == 0.7 and second["seed"] == mixed_seed(1, 2)
        math = next(s.payload for s in server.seen if s.content == "What is 3?")
        assert math["temperature"] == 0.0
        again = answer_questions("m", answerer, QUESTIONS, CFG, LineStore(tmp_path / "a.jsonl"))
        assert _texts(again) == _texts(found) and len(server.seen) == 16


def test_lost_answers_are_asked_again_by_the_next_run_and_no_others(tmp_path: Path) -> None:
    broken: list[str] = ["And 5 again?"]

    def script(content: str, nth: int) -> Act:
        return Act(status=500, body="no") if content in broken else _reply(content, nth)

    with chat_server(script) as server:
        cfg = endpoint_of(server, attempts=2)
        store = LineStore(tmp_path / "a.jsonl")
        answerer = EndpointAnswerer(lambda: ChatEndpoint(cfg), GenerationConfig())
        with pytest.raises(ClusterError, match=r"left 1 of 8 without .*: HTTP 500"):
            answer_questions("m", answerer, QUESTIONS, CFG, store)
        assert sum(not row["failure"] for row in store.rows) == 7
        broken.clear()
        server.seen.clear()
        answer_questions("m", answerer, QUESTIONS, CFG, store)
        assert [seen.content for seen in server.seen] == ["What is 5?", "And 5 again?"]


def test_held_out_answers_of_a_server_are_kept_and_the_budget_spans_the_runs(
    tmp_path: Path,
) -> None:
    prompts = [(Message("user", f"Held out {n}."),) for n in range(12)]
    refused: list[str] = ["Held out 4."]

    def script(content: str, nth: int) -> Act:
        return Act(status=503, body="busy") if content in refused else _reply(content, nth)

    def run_once(max_requests: int) -> tuple[list[str], Usage]:
        answers, held_out = (LineStore(tmp_path / f"{name}.jsonl") for name in ("a", "h"))
        usage = Usage.of(answers, held_out)
        cfg = endpoint_of(server, max_concurrency=1, attempts=2, max_requests=max_requests)
        answerer = EndpointAnswerer(lambda: ChatEndpoint(cfg, usage), GenerationConfig())
        said = answer_prompts("m", answerer, prompts, CFG, held_out)
        answer_questions("m", answerer, QUESTIONS[:2], CFG, answers)
        return [one.text for one in said], usage

    with chat_server(script) as server:
        # Prompts 0 to 3, prompt 4 twice in vain, prompt 5.
        with pytest.raises(ClusterError, match=r"The budget of 7 requests .* is spent"):
            run_once(7)
        assert len(server.seen) == 7
        # What failed was spent as well: nothing is left.
        with pytest.raises(ClusterError, match=r"The budget of 7 requests .* is spent"):
            run_once(7)
        assert len(server.seen) == 7
        refused.clear()
        # Seven more prompts, and two questions of two turns.
        texts, usage = run_once(7 + 7 + 4)
        assert [s.content for s in server.seen[7:9]] == ["Held out 4.", "Held out 6."]
        assert texts == [f"said to Held out {n}." for n in range(12)]
        assert len(server.seen) == usage.requests == 18
        # 16 replies of 100 tokens each; a refusal has none.
        assert usage.tokens == 1600
        assert run_once(18) == (texts, usage) and len(server.seen) == 18


def test_local_held_out_answers_are_drawn_again_in_one_go(
    local: LocalAnswerer, tmp_path: Path
) -> None:
    prompts = [(Message("user", f"What is {n}?"),) for n in range(3)]
    store = LineStore(tmp_path / "h.jsonl")
    first, second = (answer_prompts("m", local, prompts, CFG, store) for _ in range(2))
    assert first == second and store.rows == []


def test_rows_for_the_reward_model(local: LocalAnswerer) -> None:
    renderer = local.renderer
    question = QUESTIONS[0]
    first, second = (Message("user", text) for text in question.turns)
    one = Answered(question, (Response("Yes."), Response("word " * 100)), 0.0)
    row = one.reward_row(1, renderer)
    assert not isinstance(row, str)
    assert row.prompt_ids == renderer.prompt_ids((first,))[0]
    assert row.response_ids == renderer.response_ids("Yes.")[0]
    too_long = one.reward_row(2, renderer)
    assert isinstance(too_long, str) and "too long for the reward model" in too_long
    drawn = Answered(question, (Response("Yes."), Response("No.", (5, 6, 7))), 0.0)
    row = drawn.reward_row(2, renderer)
    assert not isinstance(row, str) and row.response_ids == (5, 6, 7)
    assert row.prompt_ids == renderer.prompt_ids((first, Message("assistant", "Yes."), second))[0]
