"""Stage evaluate: two-turn answers, judged by the reward model or by a language model, and
held-out prompts, scored by the reward model; what the reward model gives is named so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
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
from tasks.context import StageContext
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer, render_pairs
from tasks.demo.oracle import clean_accuracy, good_rate
from tasks.errors import DataError
from tasks.evaluate.answers import (
    Answerer,
    AnswerPlan,
    Count,
    EndpointAnswerer,
    Heard,
    LateAnswerer,
    LocalAnswerer,
    ResponseCount,
    answer_prompts,
    answer_questions,
    held_out_scores,
    reward_judgments,
)
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.gate import BASELINE, decide
from tasks.evaluate.inputs import (
    evaluation_questions,
    given_answers,
    language_judge,
    store_of,
    usage_in,
)
from tasks.evaluate.judges import GradingPlan, Judge, grade
from tasks.evaluate.judgments import (
    PairJudgment,
    Score,
    write_model_outputs,
    write_pairs,
    write_scores,
)
from tasks.evaluate.prompts import OWN, load_judge_prompts
from tasks.evaluate.questions import Question, write_answers
from tasks.evaluate.report import (
    HeldOut,
    differences_section,
    failure_counts,
    flat_metrics,
    held_out_section,
    pairwise_section,
    plot_radar,
    plot_scores,
    questions_section,
    render_page,
    render_report,
)
from tasks.evaluate.vllm import served
from tasks.runtime.generation import Prompt, Speaker
from tasks.runtime.rows import response_rows
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import open_session

REWARD_MODEL = "reward_model"
_REWARD_SCALE = "standard deviations of the reward model's training scores; not an MT-Bench score"


@dataclass(frozen=True)
class _Judged:
    """All judgments of the answers.

    Args:
        judging: how they were made, for the report.
    """

    judge: str
    scale: str
    scores: list[Score]
    pairs: list[PairJudgment]
    judging: dict[str, Any]


@dataclass(frozen=True)
class _HeldOutPrompts:
    prompts: list[Prompt]
    subsets: list[str]


@dataclass(frozen=True)
class _Asked:
    """One run of the stage: what everybody is asked, and how."""

    ctx: StageContext
    cfg: EvaluateConfig
    renderer: Renderer
    questions: list[Question]
    held_out: _HeldOutPrompts


@dataclass(frozen=True)
class Models:
    """The three that are compared."""

    base: PolicyCheckpoint
    policy: PolicyCheckpoint
    student: StudentAdapter

    @property
    def by_name(self) -> dict[str, PolicyCheckpoint | StudentAdapter]:
        """Each by the name that the report gives it."""
        return {"base": self.base, "policy": self.policy, "student": self.student}


@task(name="evaluate-models", cache_policy=NO_CACHE)
def evaluate_models(
    ctx: StageContext,
    cfg: EvaluateConfig,
    preferences: PreferenceDataset,
    models: Models,
    reward_model: RewardModelCheckpoint,
) -> EvalReport:
    """Let base, policy and student answer, have the answers judged, and compare.

    Answers and judgments are stored as they arrive: a run that was killed asks only for what is
    missing.

    Raises:
        RlhfError: inputs that do not fit together (before anything is generated), or a judge or
            server that cannot go on.
    """
    renderer = _one_renderer(cfg, models.base, {**models.by_name, "reward": reward_model})
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    questions = evaluation_questions(ctx, cfg)
    given = given_answers(ctx, cfg, questions)
    judge = language_judge(ctx, cfg)
    held_out = _held_out_prompts(preferences, cfg.held_out_prompts)
    asked = _Asked(ctx, cfg, renderer, questions, held_out)
    scorer = RewardScorer.load(open_session(cfg.runtime, ctx.log), reward_model)
    directories = {name: model.model_dir for name, model in models.by_name.items()}
    heard = _listen(asked, directories) | given
    judged = _judge(asked, heard, judge, scorer)
    scored = {
        name: held_out_scores(one, held_out.prompts, held_out.subsets, scorer, renderer)
        for name, one in heard.items()
        if one.held_out
    }
    report = _report(asked, heard, judged, scored)
    if preferences.manifest.config.get("source") == "demo":
        report["demo"] = _demo(scorer, preferences, renderer, held_out.prompts, scored)
    ctx.draft.counts |= {"questions": len(questions), "held_out_prompts": len(held_out.prompts)}
    ctx.draft.metrics |= flat_metrics(report)
    return ctx.publish(EvalReport, _Payload(report, asked, heard, judged, scored).write)


def _one_renderer(
    cfg: EvaluateConfig, base: PolicyCheckpoint, artifacts: Mapping[str, Artifact]
) -> Renderer:
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    for name, artifact in artifacts.items():
        if artifact.manifest.renderer_fingerprint is not None:
            renderer.check_same(artifact.manifest.renderer_fingerprint, f"the {name} model")
    return renderer


def _held_out_prompts(preferences: PreferenceDataset, n_prompts: int) -> _HeldOutPrompts:
    """Return distinct prompts of the test split, in the dataset's order."""
    subset_of: dict[Prompt, str] = {}
    for pair in read_pairs(preferences, "test"):
        subset_of.setdefault(pair.prompt, pair.subset)
    prompts = list(subset_of)[:n_prompts]
    if not prompts:
        raise DataError("The test split has no prompts", "at least one", "raise ingest.test_share")
    return _HeldOutPrompts(prompts, [subset_of[prompt] for prompt in prompts])


def _listen(asked: _Asked, models: Mapping[str, Path]) -> dict[str, Heard]:
    """Have every model answer the questions and the held-out prompts."""
    cfg, log = asked.cfg, asked.ctx.log
    plan = AnswerPlan(
        asked.questions,
        cfg.category_temperatures,
        cfg.generation.temperature,
        cfg.answers.batch_questions,
        cfg.seed,
    )
    names = list(cfg.answers.served) if cfg.answers.backend == "openai" else list(models)
    heard = {}
    count = ResponseCount(log, 2 * len(asked.questions) + len(asked.held_out.prompts), len(names))
    with (
        closing(store_of(asked.ctx, "answers")) as answers,
        closing(store_of(asked.ctx, "held_out")) as held_out,
    ):
        # One budget for all models and all runs.
        usage = usage_in(answers, held_out)
        for index, name in enumerate(names):
            count.begin(index, name)
            with _answerer(asked, name, models, usage, count) as answerer:
                said = answer_prompts(name, answerer, asked.held_out.prompts, plan, held_out)
                heard[name] = Heard(name, answer_questions(name, answerer, plan, answers), said)
            _tell_limits(asked.ctx, heard[name])
    count.begin(len(names), "all")
    return heard


@contextmanager
def _answerer(
    asked: _Asked, name: str, models: Mapping[str, Path], usage: Usage, count: Count
) -> Iterator[Answerer]:
    cfg, ctx = asked.cfg, asked.ctx
    if cfg.answers.backend == "openai":
        served_by = ChatEndpoint(cfg.answers.endpoint_of(name), usage)
        yield EndpointAnswerer(served_by, cfg.generation, count)
    elif cfg.answers.backend == "vllm":
        with ExitStack() as stack:

            def start() -> Answerer:
                log_path = ctx.checkpoint_dir / f"vllm-{name}.log"
                server = served(cfg.answers.vllm, models[name], name, log_path)
                up = stack.enter_context(server)
                endpoint = cfg.answers.endpoint_at(up.address, name)
                served_by = ChatEndpoint(endpoint, usage, up.failure)
                return EndpointAnswerer(served_by, cfg.generation, count)

            yield LateAnswerer(start)
    else:
        speaker = Speaker(models[name], asked.renderer, cfg.runtime)
        yield LocalAnswerer(speaker, asked.renderer, cfg.generation, count)


def _tell_limits(ctx: StageContext, heard: Heard) -> None:
    cut = sum(sum(answer.truncated) for answer in heard.answers)
    if cut:
        ctx.log.event(
            f"answers.{heard.name}.truncated",
            f"{cut} of {2 * len(heard.answered)} answers of {heard.name} end at "
            "generation.max_new_tokens",
        )
    if heard.shortened:
        ctx.log.event(
            f"answers.{heard.name}.shortened",
            f"{heard.shortened} prompts of {heard.name} lost text to rendering.max_prompt_tokens",
        )


def _judge(
    asked: _Asked, heard: Mapping[str, Heard], judge: Judge | None, scorer: RewardScorer
) -> _Judged:
    if judge is None:
        scores = [s for h in heard.values() for s in reward_judgments(h, scorer, asked.renderer)]
        return _Judged(REWARD_MODEL, _REWARD_SCALE, scores, [], {})
    log, judging = asked.ctx.log, asked.cfg.judging
    source = OWN if judging.prompts == OWN else asked.ctx.sources["judge_prompts"].path
    plan = GradingPlan(
        asked.questions,
        {name: one.answers for name, one in heard.items()},
        load_judge_prompts(source),
        judging.reference_categories,
        judging.repeats,
        BASELINE if judging.pairwise else None,
        asked.cfg.seed,
    )
    with closing(store_of(asked.ctx, "judgments")) as store:
        graded = grade(judge, plan, store, lambda done, n: log.progress(done, n, "judgments"))
    failed = failure_counts(graded.scores)
    if failed:
        log.event("judgments.failed", f"{sum(failed.values())} judgments failed: {failed}")
    how = {
        "prompts": OWN if judging.prompts == OWN else Path(source).name,
        "prompts_sha256": plan.prompts.fingerprint,
        "repeats": judging.repeats,
        "requests": graded.requests,
        "tokens": graded.tokens,
        "failures": failed,
        "without_reference": plan.without_reference,
    }
    scale = f"1 to 10, by {judge.name}"
    return _Judged(judge.name, scale, graded.scores, graded.pairs, how)


def _report(
    asked: _Asked,
    heard: Mapping[str, Heard],
    judged: _Judged,
    scored: Mapping[str, HeldOut],
) -> dict[str, Any]:
    answers = {name: one.answers for name, one in heard.items()}
    report: dict[str, Any] = {
        "judge": judged.judge,
        "scale": judged.scale,
        "n_questions": len(asked.questions),
        "n_held_out_prompts": len(asked.held_out.prompts),
        "questions": questions_section(asked.questions, answers, judged.scores),
        "differences": differences_section(list(heard), judged.scores),
        "held_out": held_out_section(scored),
    }
    if asked.cfg.judging.pairwise:
        report["pairwise"] = pairwise_section(list(heard), judged.pairs)
    if judged.judging:
        report["judging"] = judged.judging
    report["gate"] = decide(asked.cfg.gate, report)
    return report


def _demo(
    scorer: RewardScorer,
    preferences: PreferenceDataset,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    scored: Mapping[str, HeldOut],
) -> dict[str, Any]:
    """Measure with the demo world's oracle, which training never sees."""
    pairs = read_pairs(preferences, "test")
    rendered, _ = render_pairs(pairs, renderer)
    kept = {pair.pair_id for pair in rendered}
    scores = scorer.score(response_rows(rendered)).total
    judged = [pair for pair in pairs if pair.pair_id in kept]
    return {
        "oracle_good_rate": {name: good_rate(prompts, one.texts) for name, one in scored.items()},
        "reward_accuracy_clean": clean_accuracy(judged, scores[0::2], scores[1::2]),
    }


@dataclass(frozen=True)
class _Payload:
    """The payload of the report's directory."""

    report: Mapping[str, Any]
    asked: _Asked
    heard: Mapping[str, Heard]
    judged: _Judged
    scored: Mapping[str, HeldOut]

    def write(self, directory: Path) -> None:
        text = json.dumps(self.report, indent=2, allow_nan=False) + "\n"
        (directory / "report.json").write_text(text)
        answers = {name: one.answers for name, one in self.heard.items()}
        for folder in ("model_answer", "model_judgment", "alpaca"):
            (directory / folder).mkdir()
        for name, given in answers.items():
            write_answers(directory / "model_answer" / f"{name}.jsonl", given)
            own = [score for score in self.judged.scores if score.model_id == name]
            write_scores(directory / "model_judgment" / f"{name}.jsonl", own)
        if self.judged.pairs:
            write_pairs(directory / "model_judgment" / "pair.jsonl", self.judged.pairs)
        self._write_alpaca(directory / "alpaca")
        self._write_pages(directory)

    def _write_alpaca(self, directory: Path) -> None:
        """Write the held-out prompts of one turn, which is what AlpacaEval compares."""
        single = [i for i, prompt in enumerate(self.asked.held_out.prompts) if len(prompt) == 1]
        asked = [self.asked.held_out.prompts[i][0].content for i in single]
        for name, one in self.scored.items():
            said = [one.texts[i] for i in single]
            write_model_outputs(directory / f"{name}.json", asked, said, name, "held_out")

    def _write_pages(self, directory: Path) -> None:
        answers = {name: one.answers for name, one in self.heard.items()}
        text = render_report(self.report, self.asked.questions, answers)
        (directory / "report.md").write_text(text)
        images = {"Mean score by category": directory / "scores.png"}
        plot_scores(self.report, directory / "scores.png")
        if plot_radar(self.report, directory / "radar.png"):
            images["Mean score by category, around a circle"] = directory / "radar.png"
        page = render_page(
            self.report,
            self.asked.questions,
            answers,
            self.judged.scores,
            self.judged.pairs,
            images,
        )
        (directory / "report.html").write_text(page, encoding="utf-8")
