"""Stage evaluate: two-turn answers and held-out prompts, scored by the reward model, named so."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.backends.reward_scoring import RewardScorer
from tasks.backends.session import open_session
from tasks.backends.speaking import Prompt, Reply, Speaker
from tasks.backends.trajectories import response_rows
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
from tasks.data.rendering import Renderer, render_pairs
from tasks.data.scores import (
    UNBOUNDED_METHOD,
    Score,
    compare_scores,
    summarize_scores,
    write_scores,
)
from tasks.demo.measure import clean_accuracy, good_rate
from tasks.errors import DataError

JUDGE = ("reward_model", UNBOUNDED_METHOD)


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
    others = {"policy": policy, "student": student, "reward": reward_model}
    renderer = _one_renderer(cfg, base, others)
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    questions = _questions(ctx, cfg)
    prompts = _held_out_prompts(preferences, cfg.held_out_prompts)
    session = open_session(cfg.runtime, ctx.log)
    judge = RewardScorer.load(session, reward_model)
    heard: dict[str, _Heard] = {}
    for name, model_dir in models.items():
        ctx.log.progress(len(heard), len(models), f"{name} answers")
        speaker = Speaker(model_dir, renderer, cfg.runtime)
        heard[name] = _hear(speaker, name, cfg, questions, prompts)
        heard[name].judge(judge)
    ctx.log.progress(len(models), len(models), "scored")
    report = _report(questions, heard)
    if preferences.manifest.config.get("source") == "demo":
        report["demo"] = _demo(judge, preferences, renderer, prompts, heard)
    ctx.draft.counts |= {"questions": len(questions), "held_out_prompts": len(prompts)}
    ctx.draft.metrics |= _flat(report)
    return ctx.publish(EvalReport, lambda path: _write(path, report, questions, heard))


@dataclass
class _Heard:
    """All that one model said, and its scores once judged."""

    name: str
    first: dict[int, Reply]
    second: dict[int, Reply]
    held_out: list[Reply]
    judgments: list[Score] = field(default_factory=list)
    held_out_scores: list[float] = field(default_factory=list)

    @property
    def answers(self) -> list[ModelAnswer]:
        """The answers in the order of the questions."""
        return [
            ModelAnswer(key, self.name, (self.first[key].text, self.second[key].text), time.time())
            for key in sorted(self.first)
        ]

    def judge(self, judge: RewardScorer) -> None:
        """Score every answer and every held-out response."""
        turns = [(key, turn) for turn in (1, 2) for key in sorted(self.first)]
        replies = [(self.first if turn == 1 else self.second)[key] for key, turn in turns]
        values = judge.score([reply.row for reply in replies]).total.tolist()
        self.judgments = [
            Score(key, self.name, turn, value, JUDGE, tstamp=time.time())
            for (key, turn), value in zip(turns, values, strict=True)
        ]
        self.held_out_scores = judge.score([reply.row for reply in self.held_out]).total.tolist()


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


def _held_out_prompts(preferences: PreferenceDataset, n_prompts: int) -> list[Prompt]:
    """Return distinct prompts of the test split, in the dataset's order."""
    unique = dict.fromkeys(pair.prompt for pair in read_pairs(preferences, "test"))
    prompts = list(unique)[:n_prompts]
    if not prompts:
        raise DataError("The test split has no prompts", "at least one", "raise ingest.test_share")
    return prompts


def _hear(
    speaker: Speaker,
    name: str,
    cfg: EvaluateConfig,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
) -> _Heard:
    """Ask both turns of each question, the first answer being part of the second prompt."""
    by_temperature: dict[float, list[Question]] = {}
    for question in questions:
        temperature = temperature_for(
            question.category, cfg.category_temperatures, cfg.generation.temperature
        )
        by_temperature.setdefault(temperature, []).append(question)
    heard = _Heard(name, {}, {}, speaker.reply(prompts, cfg.generation, cfg.seed))
    for temperature, group in by_temperature.items():
        sampling = cfg.generation.model_copy(update={"temperature": temperature})
        asked = [(Message("user", question.turns[0]),) for question in group]
        replies = speaker.reply(asked, sampling, cfg.seed)
        again = [_follow_up(q, reply.text) for q, reply in zip(group, replies, strict=True)]
        last = speaker.reply(again, sampling, cfg.seed + 1)
        for question, one, two in zip(group, replies, last, strict=True):
            heard.first[question.question_id] = one
            heard.second[question.question_id] = two
    return heard


def _follow_up(question: Question, reply: str) -> Prompt:
    first, second = question.turns
    return (Message("user", first), Message("assistant", reply), Message("user", second))


def _report(questions: Sequence[Question], heard: Mapping[str, _Heard]) -> dict[str, Any]:
    category_of = {question.question_id: question.category for question in questions}
    base = heard["base"].held_out_scores
    report: dict[str, Any] = {
        "judge": "reward_model",
        "scale": "standard deviations of the reward model's training scores; not an MT-Bench score",
        "n_questions": len(questions),
        "n_held_out_prompts": len(base),
        "questions": {name: _summary(h.judgments, category_of) for name, h in heard.items()},
        "held_out": {},
    }
    for name, found in heard.items():
        report["held_out"][name] = {
            "mean_score": sum(found.held_out_scores) / len(base),
            "win_rate_against_base": compare_scores(found.held_out_scores, base).adjusted,
            "mean_characters": sum(len(reply.text) for reply in found.held_out) / len(base),
        }
    return report


def _summary(judged: Sequence[Score], category_of: Mapping[int, str]) -> dict[str, Any]:
    total = summarize_scores(judged)
    by_category: dict[str, list[Score]] = {name: [] for name in sorted(set(category_of.values()))}
    for score in judged:
        by_category[category_of[score.question_id]].append(score)
    return {
        "turn_1": total.turn_means.get(1),
        "turn_2": total.turn_means.get(2),
        "mean": total.mean,
        "coverage": total.coverage,
        "categories": {name: summarize_scores(part).mean for name, part in by_category.items()},
    }


def _demo(
    judge: RewardScorer,
    preferences: PreferenceDataset,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    heard: Mapping[str, _Heard],
) -> dict[str, Any]:
    """Measure with the demo world's oracle, which training never sees."""
    pairs = read_pairs(preferences, "test")
    rendered, _ = render_pairs(pairs, renderer)
    kept = {pair.pair_id for pair in rendered}
    scores = judge.score(response_rows(rendered)).total
    judged = [pair for pair in pairs if pair.pair_id in kept]
    return {
        "oracle_good_rate": {
            name: good_rate(prompts, [reply.text for reply in found.held_out])
            for name, found in heard.items()
        },
        "reward_accuracy_clean": clean_accuracy(judged, scores[0::2], scores[1::2]),
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
    heard: Mapping[str, _Heard],
) -> None:
    (directory / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    for folder in ("model_answer", "model_judgment"):
        (directory / folder).mkdir()
    for name, found in heard.items():
        write_answers(directory / "model_answer" / f"{name}.jsonl", found.answers)
        write_scores(directory / "model_judgment" / f"{name}.jsonl", found.judgments)
    answers = {name: found.answers for name, found in heard.items()}
    (directory / "report.md").write_text(render_report(report, questions, answers))
    plot_scores(report, directory / "scores.png")
