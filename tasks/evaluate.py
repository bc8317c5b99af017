"""Stage evaluate: two-turn answers and held-out prompts, scored by the reward model and named
so."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.backends.cluster import resolve_device
from tasks.backends.generation import EndTokens, TransformersGenerator
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session, open_session
from tasks.config import EvaluateConfig
from tasks.context import StageContext
from tasks.data.eval_report import plot_scores, render_report
from tasks.data.hh import Message
from tasks.data.pairs import read_pairs
from tasks.data.questions import (
    ModelAnswer,
    Question,
    read_questions,
    temperature_for,
    write_answers,
)
from tasks.data.rendering import Renderer
from tasks.data.scores import Score, compare_scores, summarize_scores, write_scores
from tasks.demo.measure import clean_accuracy, good_rate
from tasks.errors import DataError

REWARD = "reward"
JUDGE = ("reward_model", "standardized-score")


@task(name="evaluate-models", cache_policy=NO_CACHE)
def evaluate_models(  # noqa: PLR0913 - one argument per upstream
    ctx: StageContext,
    cfg: EvaluateConfig,
    preferences: PreferenceDataset,
    student: StudentAdapter,
    policy: PolicyCheckpoint,
    base: PolicyCheckpoint,
    reward_model: RewardModelCheckpoint,
) -> EvalReport:
    """Let base, policy and student answer, and score the answers with the reward model.

    Raises:
        RlhfError: inputs that do not fit together (before anything is generated).
    """
    models = {"base": base.model_dir, "policy": policy.model_dir, "student": student.model_dir}
    renderer = _one_renderer(
        cfg, base, {"policy": policy, "student": student, "reward": reward_model}
    )
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    questions = _questions(ctx, cfg)
    session = open_session(cfg.runtime)
    session.load(RoleSpec(REWARD, "value_model", str(reward_model.model_dir), trained_head=True))
    judge = _Judge(session, renderer, reward_model.statistics)
    prompts = _held_out_prompts(preferences, cfg.held_out_prompts)
    answers: dict[str, list[ModelAnswer]] = {}
    responses: dict[str, list[str]] = {}
    for name, model_dir in models.items():
        speaker = _Speaker(cfg, renderer, model_dir)
        ctx.log.progress(len(answers), len(models), f"{name} answers")
        answers[name] = _answer(speaker, name, questions)
        responses[name] = speaker.reply(prompts, cfg.generation.temperature, cfg.seed)
    ctx.log.progress(len(models), len(models), "scoring")
    report = _report(ctx, judge, questions, answers, prompts, responses)
    if preferences.manifest.config.get("source") == "demo":
        report["demo"] = _demo(judge, preferences, prompts, responses)
    ctx.draft.metrics |= _flat(report)
    return ctx.publish(EvalReport, lambda path: _write(path, report, questions, answers, judge))


@dataclass
class _Speaker:
    """A model that answers."""

    cfg: EvaluateConfig
    renderer: Renderer
    model_dir: Path

    def __post_init__(self) -> None:
        tokens = EndTokens(self.renderer.end_of_turn_id, self.renderer.pad_token_id)
        self.generator = TransformersGenerator(
            self.model_dir,
            tokens,
            device=resolve_device(self.cfg.runtime),
            threads=self.cfg.runtime.cpu_threads,
        )

    def reply(
        self, prompts: Sequence[Sequence[Message]], temperature: float, seed: int
    ) -> list[str]:
        """Return one response per prompt."""
        rendered = [self.renderer.prompt_ids(prompt)[0] for prompt in prompts]
        generation = self.cfg.generation.model_copy(update={"temperature": temperature})
        found = self.generator.generate(rendered, generation, seed)
        return [self.renderer.decode(ids) for ids in found]


@dataclass(frozen=True)
class _Judge:
    """The reward model as a judge; its scores are standardised with the training split's
    statistics."""

    session: Session
    renderer: Renderer
    statistics: Mapping[str, float]

    def score(self, prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> Tensor:
        """Return (N,) scores in standard deviations of the training scores."""
        rows = []
        for prompt, response in zip(prompts, responses, strict=True):
            prompt_ids, _ = self.renderer.prompt_ids(prompt)
            # What the model said is cut to the renderer's limit, as its training data was.
            response_ids = self.renderer.response_ids(response)[0]
            rows.append(Row(prompt_ids, response_ids[: self.renderer.limits.max_response_tokens]))
        raw = self.session.scores(REWARD, rows)
        return (raw - self.statistics["mean"]) / self.statistics["std"]


def _one_renderer(
    cfg: EvaluateConfig, base: PolicyCheckpoint, others: Mapping[str, Artifact]
) -> Renderer:
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    for name, artifact in {"base": base, **others}.items():
        if artifact.manifest.renderer_fingerprint is not None:
            renderer.check_same(artifact.manifest.renderer_fingerprint, f"the {name} model")
    return renderer


def _questions(ctx: StageContext, cfg: EvaluateConfig) -> list[Question]:
    if cfg.questions == "demo":
        from tasks.demo.questions import write_questions

        path = Path(write_questions(ctx.workspace.cache_dir / "demo-questions.jsonl"))
    else:
        path = Path(ctx.sources["questions"].path)
    return read_questions(path)[: cfg.max_questions]


def _held_out_prompts(preferences: PreferenceDataset, n_prompts: int) -> list[tuple[Message, ...]]:
    """Return distinct prompts of the test split, in the dataset's order."""
    unique = dict.fromkeys(pair.prompt for pair in read_pairs(preferences, "test"))
    prompts = list(unique)[:n_prompts]
    if not prompts:
        raise DataError("The test split has no prompts", "at least one", "raise ingest.test_share")
    return prompts


def _answer(speaker: _Speaker, name: str, questions: Sequence[Question]) -> list[ModelAnswer]:
    """Answer both turns, the first answer being part of the second prompt."""
    cfg = speaker.cfg
    by_temperature: dict[float, list[Question]] = {}
    for question in questions:
        value = temperature_for(
            question.category, cfg.category_temperatures, cfg.generation.temperature
        )
        by_temperature.setdefault(value, []).append(question)
    answers = []
    for temperature, group in by_temperature.items():
        first = [(Message("user", question.turns[0]),) for question in group]
        replies = speaker.reply(first, temperature, cfg.seed)
        second = [_follow_up(q, reply) for q, reply in zip(group, replies, strict=True)]
        last = speaker.reply(second, temperature, cfg.seed + 1)
        for question, one, two in zip(group, replies, last, strict=True):
            answers.append(ModelAnswer(question.question_id, name, (one, two), time.time()))
    return sorted(answers, key=lambda answer: answer.question_id)


def _follow_up(question: Question, reply: str) -> tuple[Message, ...]:
    return (
        Message("user", question.turns[0]),
        Message("assistant", reply),
        Message("user", question.turns[1]),
    )


def _judgments(
    judge: _Judge, questions: Sequence[Question], answers: Sequence[ModelAnswer]
) -> list[Score]:
    prompts: list[tuple[Message, ...]] = []
    replies: list[str] = []
    keys: list[tuple[int, str, int]] = []
    by_id = {question.question_id: question for question in questions}
    for answer in answers:
        question = by_id[answer.question_id]
        first = (Message("user", question.turns[0]),)
        prompts += [first, _follow_up(question, answer.turns[0])]
        replies += answer.turns
        keys += [(answer.question_id, answer.model_id, turn) for turn in (1, 2)]
    values = judge.score(prompts, replies).tolist()
    return [
        Score(question_id, model_id, turn, value, JUDGE, tstamp=time.time())
        for (question_id, model_id, turn), value in zip(keys, values, strict=True)
    ]


def _report(
    ctx: StageContext,
    judge: _Judge,
    questions: Sequence[Question],
    answers: Mapping[str, list[ModelAnswer]],
    prompts: Sequence[Sequence[Message]],
    responses: Mapping[str, list[str]],
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "judge": "reward_model",
        "scale": "standard deviations of the reward model's training scores; not an MT-Bench score",
        "n_questions": len(questions),
        "n_held_out_prompts": len(prompts),
        "questions": {},
        "held_out": {},
    }
    scores = {name: judge.score(prompts, found).tolist() for name, found in responses.items()}
    category_of = {question.question_id: question.category for question in questions}
    for name, found in answers.items():
        judged = _judgments(judge, questions, found)
        report["questions"][name] = _summary(judged, category_of)
        win = compare_scores(scores[name], scores["base"])
        report["held_out"][name] = {
            "mean_score": sum(scores[name]) / len(prompts),
            "win_rate_against_base": win.adjusted,
            "mean_characters": sum(map(len, responses[name])) / len(prompts),
        }
    return report


def _summary(judged: Sequence[Score], category_of: Mapping[int, str]) -> dict[str, Any]:
    total = summarize_scores(judged)
    categories = sorted(set(category_of.values()))
    return {
        "turn_1": total.turn_means.get(1),
        "turn_2": total.turn_means.get(2),
        "mean": total.mean,
        "coverage": total.coverage,
        "categories": {
            category: summarize_scores(
                [score for score in judged if category_of[score.question_id] == category]
            ).mean
            for category in categories
        },
    }


def _demo(
    judge: _Judge,
    preferences: PreferenceDataset,
    prompts: Sequence[Sequence[Message]],
    responses: Mapping[str, list[str]],
) -> dict[str, Any]:
    """Measure with the demo world's oracle, which training never sees."""
    pairs = read_pairs(preferences, "test")
    asked = [pair.prompt for pair in pairs]
    chosen = judge.score(asked, [pair.chosen for pair in pairs])
    rejected = judge.score(asked, [pair.rejected for pair in pairs])
    return {
        "oracle_good_rate": {name: good_rate(prompts, found) for name, found in responses.items()},
        "reward_accuracy_clean": clean_accuracy(pairs, chosen, rejected),
    }


def _flat(report: Mapping[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in report["questions"]:
        metrics[f"{name}_question_score"] = report["questions"][name]["mean"]
        metrics[f"{name}_win_rate_against_base"] = report["held_out"][name]["win_rate_against_base"]
        metrics[f"{name}_held_out_score"] = report["held_out"][name]["mean_score"]
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"]
        metrics |= {f"{name}_oracle_good_rate": rate for name, rate in rates.items()}
        metrics["reward_accuracy_clean"] = report["demo"]["reward_accuracy_clean"]
    return metrics


def _write(
    directory: Path,
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, list[ModelAnswer]],
    judge: _Judge,
) -> None:
    (directory / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    for name, found in answers.items():
        write_answers(directory / "model_answer" / f"{name}.jsonl", found)
        write_scores(
            directory / "model_judgment" / f"{name}.jsonl", _judgments(judge, questions, found)
        )
    (directory / "report.md").write_text(render_report(report, questions, answers))
    plot_scores(report, directory / "scores.png")
